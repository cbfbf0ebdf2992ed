"""Start one program in several processes of this machine, as a cluster would on several hosts.

::

    python -m gda.launch -n 4 --devices-per-process 2 train.py --steps 100

The program calls ``gda.launch.initialize()`` before anything else of JAX, and runs unchanged on a
cluster. All processes end within seconds if one fails, and within ``--grace`` seconds if the
launcher gets a signal to end. None outlives the launcher.

Read in this order: ``__main__`` (the command line), ``launching`` (until all are done or one
fails), ``child`` (the first code in each process), ``leaving`` (its last), ``output`` (prefixes of
lines), ``children`` (processes that end with their parent).
"""

from __future__ import annotations

import atexit
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
    """Join the other processes: ``jax.distributed.initialize`` for the launcher and for clusters.

    The variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID give the arguments;
    ``python -m gda.launch`` sets them. On a cluster that JAX detects (Slurm, Open MPI, Kubernetes,
    Cloud TPU) JAX finds the processes itself. Call it before any other use of JAX. It returns when
    all processes have called it. At its end, the process waits up to 30 s for the work of its CPU
    devices, because JAX alone may hang if a collective is under way.

    Args:
      coordinator_address: ``host:port`` of process 0. Arguments override the variables.
      num_processes: number of processes.
      process_id: number of this process, from 0.
      options: others of ``jax.distributed.initialize``.

    Raises:
      ValueError: no argument, variable or cluster gives the address, the number of processes or
        that of this one, or a variable is malformed. One process is never assumed.
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
    # Imported here, so that the command lines do not wait for it.
    import jax

    # Registers an exit hook, which runs after those that the program registers later.
    import gda.multihost.agreement  # noqa: F401
    from gda.launch.children import arguments_of
    from gda.launch.leaving import finish_pending

    chosen = {name: value for name, value in given.items() if value is not None}
    arguments = {**arguments_of(), **chosen}

    atexit.register(finish_pending)
    try:
        jax.distributed.initialize(**arguments)
    except ValueError as error:
        if "num_processes" in arguments:
            raise
        raise ValueError(
            f"the number of processes is not known ({str(error).rstrip('.')}). Start the program "
            "by `python -m gda.launch -n 4 program.py` (-n 1 for one process), or on a cluster "
            "that JAX detects (Slurm, Open MPI, Kubernetes, Cloud TPU), or set "
            "JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID in each process."
        ) from error
