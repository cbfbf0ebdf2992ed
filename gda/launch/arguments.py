"""A parser of command lines that reports a mistake in one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

WRONG = 2  # the exit code


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: {message} (see --help)\n")
