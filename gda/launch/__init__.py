"""Start one program in several processes of this machine, as a cluster would on several hosts.

::

    python -m gda.launch -n 4 --devices-per-process 2 train.py --steps 100

The program calls ``gda.launch.initialize()`` before anything else of JAX, and runs unchanged on a
cluster. All processes end within seconds when one of them fails or when the launcher is
interrupted, and none outlives the launcher, however that ends.

To read in this order: ``__main__`` (the command line), ``run`` (until all are done or one fails),
``child`` (the first code in each process), ``ending`` (its last), ``output`` (whose line is whose),
``children`` (processes that end with their parent), ``arguments`` (command lines and mistakes).
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import Any

__all__ = ["initialize"]


def __dir__() -> list[str]:
    return list(__all__)


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **options: Any,
) -> None:
    """Make this process one of many: ``jax.distributed.initialize``, wherever it was started.

    Under ``python -m gda.launch``, or wherever JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID are set, these say who the others are. On a cluster that JAX detects (Slurm,
    Open MPI, Kubernetes, Cloud TPU) JAX finds out itself. Must come before any other use of JAX;
    returns when all processes have called it. When the program ends, the process first waits, up
    to 30 s, for what its CPU devices still do: JAX alone may hang at its end while a collective is
    under way.

    Args:
      coordinator_address: ``host:port`` where process 0 serves. Arguments win over the variables.
      num_processes: how many there are.
      process_id: which of them this is, from 0.
      options: others of ``jax.distributed.initialize``.

    Raises:
      ValueError: nothing says who the others are, or a variable is missing or malformed. Finding
        nothing is never taken for being alone.
      RuntimeError: JAX was used before, or the others did not come in time.

    In a program that ``python -m gda.launch -n 4 program.py`` starts::

        import gda.launch

        gda.launch.initialize()
        assert jax.process_count() == 4
    """
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
        **options,
    }
    arguments = _with_variables({name: value for name, value in given.items() if value is not None})
    import jax  # here, so that the command lines do not wait for it

    from gda.launch.ending import finish_pending

    atexit.register(finish_pending)
    try:
        jax.distributed.initialize(**arguments)
    except ValueError as error:
        if "num_processes" in arguments:
            raise
        raise ValueError(
            f"nothing says which processes there are ({str(error).rstrip('.')}). Start the program "
            "by `python -m gda.launch -n 4 program.py` (-n 1 for one process), or on a cluster "
            "that JAX detects (Slurm, Open MPI, Kubernetes, Cloud TPU), or set "
            "JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID in each process."
        ) from error


def _with_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given arguments, and for those not given what the variables say."""
    from gda.launch.children import ARGUMENT_OF, arguments_of  # imports what takes long

    arguments = {**given, **arguments_of(without=given)}
    # The address alone is fine: JAX's own variable, for clusters that it detects.
    if not arguments.keys() - given.keys() & {"num_processes", "process_id"}:
        return arguments
    missing = [name for name, argument in ARGUMENT_OF.items() if argument not in arguments]
    if missing := [name for name in missing if name.startswith("JAX_")]:
        raise ValueError(
            f"{' and '.join(missing)} must be set as well where JAX_NUM_PROCESSES or "
            "JAX_PROCESS_ID is; `python -m gda.launch` sets all that is needed"
        )
    return arguments
