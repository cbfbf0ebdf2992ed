"""The result of a rehearsal: memory, communication and time of a program that was not run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gda.compiled.changes import check
from gda.compiled.collective_times import Interconnect, collective_seconds
from gda.compiled.hlo import Axes, Collective, Collectives, summed
from gda.compiled.hlo.allocations import Temporary
from gda.compiled.report.advice import Advice, advice_of
from gda.compiled.report.rehearsal_text import parts_of
from gda.compiled.seconds import StepSeconds
from gda.layout.boundary import public, set_module
from gda.layout.spec import SpecEntry
from gda.show.report import Report, Table


@set_module("gda")
class AxisTraffic(NamedTuple):
    """The communication of one device over some mesh axes in one call of a program.

    Attributes:
      axes: the mesh axes; None for groups of devices that no axes form.
      executions: number of collectives executed; None if the length of a loop is unknown.
      nbytes: bytes of their operands on one device; None in the same case.
      nbytes_slow: the bytes in collectives that go over the slow links, between slices of TPUs or
        between the hosts of other devices; None if there is one slice or host.
      least_seconds: the time of these collectives one after another, if all links have the speed
        that their vendor publishes; an all-reduce is a reduce-scatter and then an all-gather,
        except where a switch adds. None for a loop of unknown length, and for kinds of devices
        whose figures gda does not have, such as a CPU.

    >>> import gda
    >>> gda.AxisTraffic(('data',), executions=2, nbytes=1024, nbytes_slow=None).nbytes
    1024
    """

    axes: Axes | None
    executions: int | None
    nbytes: int | None
    nbytes_slow: int | None
    least_seconds: float | None = None


@set_module("gda")
class ArgumentBytes(NamedTuple):
    """The memory of one array among the arguments of a rehearsed call.

    Attributes:
      name: the argument and the path in it, such as ``'params/w'``.
      shape, dtype: of the global array.
      nbytes: bytes of its block on one device, without the padding of the device's own layout.
      is_donated: the call may reuse its memory.
      could_be_donated: it is not donated although a result has its shape, dtype and bytes.
      spec: the mesh axes that shard each dimension, as in ``jax.sharding.PartitionSpec``; None for
        an argument without a spec over the mesh of the program.
      is_on_host: it is in the memory of the host, and takes none of the device.

    >>> import gda
    >>> gda.ArgumentBytes('params/w', (8, 2), 'float32', nbytes=16, is_donated=False).nbytes
    16
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    is_donated: bool
    could_be_donated: bool = False
    spec: tuple[SpecEntry, ...] | None = None
    is_on_host: bool = False


@set_module("gda")
@dataclass(frozen=True, repr=False)
class Rehearsal(Report):
    """The memory, the communication and the time of a call that was compiled and not run.

    ``gda.rehearse`` makes it; ``print`` and notebooks show it as tables. All bytes are those of one
    device.

    Attributes:
      name: the name of the function.
      device_kind: the kind of the devices, as JAX names it.
      num_devices: number of devices of the program.
      mesh_shape: sizes of the mesh axes by name, in mesh order; empty if no mesh is known.
      fits: the program fits into the memory of a device; None if the capacity is unknown.
      capacity_bytes: the memory that programs have on a device of this kind; None if unknown.
      peak_bytes: the memory that the program takes: the sum of the parts below, less
        ``aliased_bytes``. For a program that the compiler refuses, what it asks for.
      argument_bytes: of the arguments that the program uses, in the layout of the device; for a
        program that does not fit, without the padding of that layout.
      output_bytes: of the results, those in donated arguments included, and on a CPU 8 for the
        address of each if there are several; None, as the next three, if it does not fit.
      temporary_bytes: of everything that the program holds meanwhile; arrays that are not needed
        at the same time share memory. On TPUs without what collectives take beside their arrays.
      aliased_bytes: of the results that take the memory of donated arguments.
      code_bytes: of the program itself.
      undonated_bytes: of the arguments that could be donated and are not.
      flops: floating-point operations of the products in one call on one device, loops with their
        length. Work that devices repeat counts on each. None if a loop or a kernel is unknown.
      compile_seconds: the time of tracing, lowering and compiling.
      collectives: as ``gda.collectives`` has them; None if the program does not fit and the
        compiler does not write it.
      traffic: the totals for each set of mesh axes, the most bytes first; empty if the program does
        not fit.
      arguments: the arrays among the arguments that the program uses, the largest on a device
        first; for a program that does not fit, all arrays among them.
      temporaries: the largest arrays that the program holds while it runs; empty if the compiler
        tells none, or JAX's compilation cache on disk has the program.
      message: the words of the compiler for a program that does not fit; else empty.
      flops_total: those of the function as it was traced, on all devices together, each once;
        None also for a function that came lowered or compiled.
      seconds: the time of one call: ``seconds.bound``, ``seconds.estimate`` and their parts.
      examples, price: as they were given.

    >>> import gda, numpy as np
    >>> x, w = np.zeros((16, 64), np.float32), np.zeros((64, 32), np.float32)
    >>> rehearsal = gda.rehearse(lambda x, w: (x @ w).sum(), x, w)
    >>> rehearsal.argument_bytes, rehearsal.flops, rehearsal.fits
    (12288, 65536.0, None)
    >>> [(each.name, each.nbytes) for each in rehearsal.arguments]
    [('w', 8192), ('x', 4096)]
    """

    name: str
    device_kind: str
    num_devices: int
    mesh_shape: dict[str, int] = field(hash=False)  # a dict has no hash
    fits: bool | None
    capacity_bytes: int | None
    peak_bytes: int | None
    argument_bytes: int
    output_bytes: int | None
    temporary_bytes: int | None
    aliased_bytes: int | None
    code_bytes: int | None
    undonated_bytes: int
    flops: float | None
    compile_seconds: float
    collectives: Collectives | None
    traffic: tuple[AxisTraffic, ...]
    arguments: tuple[ArgumentBytes, ...]
    temporaries: tuple[Temporary, ...] = ()
    message: str = ""
    flops_total: float | None = None
    seconds: StepSeconds = field(default_factory=StepSeconds)
    examples: float | None = None
    price: float | None = None

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Changes that would save time or memory, what saves most first.

        Each comes from the facts above: work that devices repeat, arguments that could be donated,
        temporaries that are too large. An argument is to be sharded if the program does not fit, or
        if gathering it takes little of the time. Advice that saves less than 1 % is omitted.
        """
        return advice_of(self)

    @property
    def repetitions(self) -> float | None:
        """The number of devices that do the same work, on average; None if it is unknown.

        It is 1 if they share the products, and ``num_devices`` if each computes all of them, as
        with a batch that is not sharded. XLA may add products of its own, or remove some.
        """
        if not self.flops or not self.flops_total:
            return None
        return max(1.0, self.flops * self.num_devices / self.flops_total)

    @property
    def examples_per_second(self) -> float | None:
        """The examples in an estimated second; None if there are none, or the estimate is."""
        seconds = self.seconds.estimate
        return self.examples / seconds if self.examples and seconds else None

    @property
    def cost(self) -> float | None:
        """The estimated cost of one call on all devices, in the currency of ``price``."""
        seconds = self.seconds.estimate
        if self.price is None or seconds is None:
            return None
        return self.price * self.num_devices * seconds / 3600

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, strings and numbers, for JSON."""
        found = None if self.collectives is None else [*map(asdict, self.collectives)]
        document = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return document | {
            "mesh_shape": dict(self.mesh_shape),
            "collectives": found,
            "traffic": [each._asdict() for each in self.traffic],
            "arguments": [each._asdict() for each in self.arguments],
            "temporaries": [each._asdict() for each in self.temporaries],
            "advice": [each._asdict() for each in self.advice],
            "seconds": self.seconds.to_dict(),
            "examples_per_second": self.examples_per_second,
            "cost": self.cost,
        }

    @public
    def check(self, path: str | Path) -> None:
        """Fail if the peak or the communication differs from a golden file. For tests.

        The file has the devices, the mesh, the peak, and the bytes for each kind of collective and
        set of axes. It has nothing of the program's text, so a new version of JAX leaves it valid
        unless the program changes. A change of at most 5 % of a number of bytes is accepted, and
        never a collective of another kind or over other axes. ``pytest --gda-update-golden`` writes
        it; without pytest, the environment variable ``GDA_UPDATE_GOLDEN=1`` does.

        Args:
          path: the JSON file.

        Raises:
          AssertionError: something differs; the message has a line for each difference.
          FileNotFoundError: there is no such file, and it is not to be written.
          ValueError: the file is not a golden file.

        >>> import gda, jax, numpy as np, os, tempfile
        >>> rehearsal = gda.rehearse(lambda x: x + 1, jax.ShapeDtypeStruct((8,), np.float32))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     os.environ['GDA_UPDATE_GOLDEN'] = '1'
        ...     rehearsal.check(folder + '/step.json')  # writes it
        ...     del os.environ['GDA_UPDATE_GOLDEN']
        ...     rehearsal.check(folder + '/step.json')  # compares
        """
        check(self, Path(path))

    def _parts(self) -> list[str | Table]:
        return parts_of(self)


def traffic_of(
    collectives: Collectives, has_slow: bool, host_of: Sequence[int], links: Interconnect | None
) -> tuple[AxisTraffic, ...]:
    """Return the totals for each set of mesh axes, the most bytes first.

    ``host_of`` has the host of each position of the mesh if links between hosts are the slow ones.
    It is empty for TPUs, whose programs mark what goes between slices.
    """
    traffic = []
    for axes, total in collectives.by_axis().items():
        some = [each for each in collectives if each.axes == axes]
        slow = summed(each.nbytes_total if _is_slow(each, host_of) else 0 for each in some)
        seconds = None
        if links is not None:
            seconds = summed(
                None if each.count is None else each.count * collective_seconds(each, links).bound
                for each in some
            )
        traffic.append(AxisTraffic(axes, *total, slow if has_slow else None, seconds))
    return tuple(sorted(traffic, key=lambda each: -(each.nbytes or 0)))


def _is_slow(collective: Collective, host_of: Sequence[int]) -> bool:
    if collective.is_between_slices or not host_of:
        return collective.is_between_slices
    together = [*collective.groups, *collective.pairs]
    return any(len({host_of[position] for position in group}) > 1 for group in together)
