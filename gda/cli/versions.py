"""The command ``gda report``: the facts that a report of a fault needs."""

from __future__ import annotations

import argparse
import os
from typing import Any

from gda.cli.commands import OK, add_command


def add_report(commands: Any) -> None:
    add_command(commands, report, "Print versions, devices and settings, for a report of a fault.")


def report(_: argparse.Namespace) -> int:
    # Another program may need the memory that JAX would take of a GPU when it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import gda

    print(gda.report())
    return OK
