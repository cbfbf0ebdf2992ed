"""The command line: ``python -m gda.launch -n 4 --devices-per-process 2 train.py --steps 100``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from gda.launch.children import environment
from gda.launch.launching import run
from gda.layout.text import unknown_options

_USAGE = "python -m gda.launch -n N [option ...] (script.py | -m module) [argument ...]"

_OPTIONS = (
    ("--devices-per-process", 1, "N", "CPU devices of each process; default 1"),
    ("--restarts", 0, "N", "after a failure, start again, at most N times; default 0"),
    ("--timeout", None, "SECONDS", "print all stacks and end a start after this; default: never"),
    ("--heartbeat-timeout", 10, "SECONDS", "a process silent for this long is dead; default 10"),
    ("--collective-timeout", 30, "SECONDS", "a collective on CPU waits this long; default 30"),
    ("--grace", 30, "SECONDS", "after a signal, wait this long for an orderly end; default 30"),
)

_EPILOG = """\
example:
  python -m gda.launch -n 4 --devices-per-process 2 train.py --steps 100

In train.py, before anything else of JAX:

  import gda.launch
  gda.launch.initialize()

It needs no launcher on a cluster that JAX detects (Slurm, Open MPI, Kubernetes, Cloud TPU).
Each process has CPU devices only, and finds JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
JAX_PROCESS_ID in its environment, for programs that call jax.distributed.initialize with them.
After SIGUSR1, a process writes the stacks of its threads.

Ctrl-C, SIGTERM and SIGHUP (as SIGTERM) are passed on to the processes, which are killed if they do
not end within --grace, or at a second Ctrl-C.

With --restarts, all processes end after a failure, also after --timeout. The program starts again
after 1 s, then 2 s, 4 s and so on, up to 60 s. It does not start again after exit code 0 or 75, or
after a signal to the launcher. --logs FOLDER has start1.process0.log and so on.

exit code, of the last start:
  0 if all processes succeed, else that of the first that failed (128 + number of the signal
  that killed it), also after a signal; 124 after --timeout, 2 for a wrong command. If processes do
  not end within --grace, 130 after Ctrl-C, 143 after SIGTERM.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, ``sys.argv[1:]`` by default, and return the exit code.

    Signals come to the main thread, so it must be called there. ``--help`` and mistakes in the
    command raise ``SystemExit``, as argparse does.
    """
    options = _parse(sys.argv[1:] if argv is None else argv)

    def environments(port: int) -> list[dict[str, str]]:
        return [
            environment(
                index,
                options.num_processes,
                port,
                options.devices_per_process,
                heartbeat_timeout=options.heartbeat_timeout,
                collective_timeout=options.collective_timeout,
            )
            for index in range(options.num_processes)
        ]

    return run(
        ["module" if options.m else "script", *options.command],
        environments,
        restarts=options.restarts,
        timeout=options.timeout,
        grace=options.grace,
        logs=options.logs,
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gda.launch",
        usage=_USAGE,
        description="Run a program in several processes of this machine that find each other.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", "--num-processes", type=_positive, metavar="N", required=True, help="processes"
    )
    for name, default, unit, says in _OPTIONS:
        parser.add_argument(name, type=_positive, default=default, metavar=unit, help=says)
    parser.add_argument(
        "--logs", metavar="FOLDER", help="append the output of each process of each start to a file"
    )
    parser.add_argument("-m", action="store_true", help="run a module, as python -m does")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(unknown_options(unknown, parser.format_help()))
    # A -- before the program ends the options; all words after it belong to the program.
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("no program was given; give a script, or -m and a module")
    if options.logs is not None:
        try:
            os.makedirs(options.logs, exist_ok=True)
        except OSError as error:
            parser.error(f"--logs {options.logs}: {error}")
    return options


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return number


if __name__ == "__main__":
    sys.exit(main())
