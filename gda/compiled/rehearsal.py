"""The result of a rehearsal: memory, communication and time of a program that was not run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gda.compiled.changes import check
from gda.compiled.checkpoint_interval import CheckpointInterval, interval_of
from gda.compiled.rehearsal_facts import RehearsalFacts
from gda.compiled.report.advice import Advice, advice_of, shortfall_of
from gda.compiled.report.rehearsal_text import parts_of
from gda.compiled.report.trace import write_trace
from gda.layout.boundary import public, set_module
from gda.show.report import Report, Table


@set_module("gda")
@dataclass(frozen=True, repr=False)
class Rehearsal(RehearsalFacts, Report):
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
      flops_model: those of ``flops_total`` without the products that ``jax.checkpoint`` computes
        again. What a kernel or a custom derivative computes again counts.
      seconds: the time of one call: ``seconds.bound``, ``seconds.estimate`` and their parts.
      examples, price: as they were given.
      seconds_advised: the estimate for the same call with its batch sharded over the axes that
        shard no argument; None unless devices repeat work and this was rehearsed as well.
      num_hosts: the hosts of the devices.

    >>> import gda, numpy as np
    >>> x, w = np.zeros((16, 64), np.float32), np.zeros((64, 32), np.float32)
    >>> rehearsal = gda.rehearse(lambda x, w: (x @ w).sum(), x, w)
    >>> rehearsal.argument_bytes, rehearsal.flops, rehearsal.fits
    (12288, 65536.0, None)
    >>> [(each.name, each.nbytes) for each in rehearsal.arguments]
    [('w', 8192), ('x', 4096)]
    """

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Changes that would save time or memory, the largest savings first.

        Each comes from the facts above: work that devices repeat, arguments that could be donated,
        temporaries that are too large. An argument is to be sharded if the program does not fit, or
        if gathering it takes little of the time. Advice that saves less than 1 % is omitted.
        """
        return advice_of(self)

    @public
    def checkpoint_interval(
        self,
        *,
        seconds_between_failures: float,
        save_seconds: float,
        restart_seconds: float = 0.0,
    ) -> CheckpointInterval:
        """Return the time between checkpoints that loses least, and the time that it leaves.

        Saving often costs saves; saving rarely loses more training in a failure. The interval is
        Young's square root of ``2 * save_seconds * seconds_between_failures`` with two further
        terms of Daly, and the share of training is that of Daly's model: failures are independent
        and may strike saves and restarts too.

        - J. W. Young, A first order approximation to the optimum checkpoint interval,
          Communications of the ACM 17(9), 1974.
        - J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
          Future Generation Computer Systems 22(3), 2006.

        Args:
          seconds_between_failures: the mean of the whole job: that of one host divided by the
            number of hosts.
          save_seconds: the time that a save holds the training loop.
          restart_seconds: from a failure until training goes on at the last checkpoint.

        Raises:
          ValueError: a time is no number above 0; ``restart_seconds`` may be 0.

        >>> import gda, jax, numpy as np
        >>> rehearsal = gda.rehearse(jax.numpy.sin, np.zeros(8, np.float32))
        >>> interval = rehearsal.checkpoint_interval(
        ...     seconds_between_failures=4 * 3600, save_seconds=30, restart_seconds=300)
        >>> round(interval.seconds), round(interval.training_share, 3)
        (910, 0.918)
        """
        times = seconds_between_failures, save_seconds, restart_seconds
        return interval_of(*times, self.seconds.estimate)

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
            "measured_range": self.measured_range and self.measured_range._asdict(),
            "examples_per_second": self.examples_per_second,
            "cost": self.cost,
            "cost_per_million": self.cost_per_million,
            "activation_blocks": self.activation_blocks,
            "repetitions": self.repetitions,
            "least_devices": self.least_devices,
            "state_bytes": self.state_bytes,
        }

    @public
    def save_trace(self, path: str | Path) -> None:
        """Write the estimate of the step as a file that https://ui.perfetto.dev opens.

        It has Chrome's trace-event format (JSON), with a track for the products, one for memory
        traffic, one for each set of mesh axes with its collectives, and one for the waits, so that
        one sees what hides behind what; the live bytes of temporaries, from XLA's assignment of
        buffers, with the largest at the peak. A loop is drawn as one turn with its number of turns.
        The metadata of the file say what it cannot know.

        Args:
          path: the JSON file.

        Raises:
          ValueError: there is no estimate, as for CPUs.

        >>> import gda, jax, numpy as np
        >>> mesh = gda.rehearsal_mesh('v5e:2x2', {'data': 4})  # doctest: +SKIP
        >>> x = gda.abstract(np.zeros((64, 64)), mesh, ('data',))  # doctest: +SKIP
        >>> gda.rehearse(lambda x: x @ x.T, x).save_trace('step.json')  # doctest: +SKIP
        """
        write_trace(self, Path(path))

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
        return parts_of(self, [each.text for each in self.advice], shortfall_of(self, self.advice))
