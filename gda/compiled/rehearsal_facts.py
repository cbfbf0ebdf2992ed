"""The facts of a rehearsal: memory, communication and time of a program that was not run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gda.compiled.collective_times import Interconnect, collective_seconds
from gda.compiled.devices.measured_steps import MeasuredRange, measured_range_of
from gda.compiled.hlo import Axes, Collective, Collectives, summed
from gda.compiled.hlo.allocations import Temporary
from gda.compiled.seconds import StepSeconds
from gda.layout.boundary import set_module
from gda.layout.grid import ShardGrid
from gda.layout.spec import SpecEntry, axes_by_dimension


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
      copied_at: file and line of the update in a ``jax.lax.scan`` that has the array among its
        ``xs`` and ``ys``, if the program holds a copy for that, or may hold one once the array is
        donated; else None.

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
    copied_at: tuple[str, int] | None = None


@dataclass(frozen=True, repr=False)
class RehearsalFacts:
    """The fields that ``Rehearsal`` describes, and the figures that follow from them."""

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
    flops_model: float | None = None
    seconds: StepSeconds = field(default_factory=StepSeconds)
    examples: float | None = None
    price: float | None = None
    seconds_advised: float | None = None
    num_hosts: int = 1

    @property
    def state_bytes(self) -> int:
        """The bytes that each host writes in a checkpoint of the state, each block once.

        The state are the arguments that are donated, or that a result could replace. The hosts
        share the blocks, as in ``gda.checkpoint.save``.
        """
        state = (each for each in self.arguments if each.is_donated or each.could_be_donated)
        return math.ceil(sum(map(self._whole_bytes, state)) / self.num_hosts)

    @property
    def least_devices(self) -> int | None:
        """The number of devices whose memory holds the arguments, each block once.

        No layout needs fewer, and with temporaries it is more. None if the capacity is unknown.
        """
        if not self.capacity_bytes:
            return None
        on_devices = (each for each in self.arguments if not each.is_on_host)
        return max(1, math.ceil(sum(map(self._whole_bytes, on_devices)) / self.capacity_bytes))

    def _whole_bytes(self, argument: ArgumentBytes) -> int:
        grid = ShardGrid(argument.shape, self.mesh_shape, argument.spec or ())
        return argument.nbytes * grid.num_shards

    @property
    def unused_axes(self) -> tuple[str, ...]:
        """The mesh axes of several devices that shard no argument."""
        shape = self.mesh_shape
        used = {
            axis
            for each in self.arguments
            for axes in axes_by_dimension(each.spec or (), len(each.shape), shape)
            for axis in axes
        }
        return tuple(axis for axis, size in shape.items() if size > 1 and axis not in used)

    @property
    def repetitions(self) -> float | None:
        """The number of devices that do the same work, on average; None if it is unknown.

        It is 1 if they share the products, and ``num_devices`` if each computes all of them, as
        with a batch that is not sharded. XLA may add products of its own, or remove some.
        """
        return repetitions_of(self.flops, self.num_devices, self.flops_total)

    @property
    def measured_range(self) -> MeasuredRange | None:
        """The measured times of steps on this kind of devices, in units of their estimates.

        Steps that communicate over slow links are compared with such steps, and others with others.
        None if no such step was measured, or if there is no estimate or a bound alone.
        """
        if self.seconds.estimate is None or self.seconds.is_bound:
            return None
        is_slow = any(each.nbytes_slow for each in self.traffic)
        return measured_range_of(self.device_kind, is_slow)

    @property
    def examples_per_second(self) -> float | None:
        """The examples in an estimated second; None if there are none, or the estimate is.

        They are at most as many if ``seconds.is_bound``.
        """
        seconds = self.seconds.estimate
        return self.examples / seconds if self.examples and seconds else None

    @property
    def cost(self) -> float | None:
        """The estimated cost of one call on all devices, in the currency of ``price``.

        It is at least as high if ``seconds.is_bound``.
        """
        seconds = self.seconds.estimate
        if self.price is None or seconds is None:
            return None
        return self.price * self.num_devices * seconds / 3600

    @property
    def cost_per_million(self) -> float | None:
        """The estimated cost of a million examples, or tokens; None without ``examples``."""
        cost = self.cost
        return None if cost is None or not self.examples else 1e6 * cost / self.examples

    @property
    def activation_blocks(self) -> int | None:
        """The fewest blocks of the large activations: 1 if each device holds all of one.

        Large ones have a tenth or more of the bytes of the largest temporary. Those with the shape
        of an argument, or of a layer of one, are parameters. None if no whole shape is known.
        """
        shapes = (tuple(size for size in each.shape if size != 1) for each in self.arguments)
        parameters = {part for shape in shapes for part in (shape, shape[1:])}
        least = max((each.nbytes for each in self.temporaries), default=0) / 10
        blocks = (
            each.num_blocks
            for each in self.temporaries
            if each.nbytes >= least and each.whole_shape not in parameters
        )
        return min((each for each in blocks if each is not None), default=None)


def repetitions_of(flops: float | None, num_devices: int, total: float | None) -> float | None:
    """Return how often devices with ``flops`` each do the work ``total``; None if it is unknown."""
    return max(1.0, flops * num_devices / total) if flops and total else None


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
