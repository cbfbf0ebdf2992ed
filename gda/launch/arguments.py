"""A parser of command lines that reports a mistake in one line, with a suggestion."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from gda.layout.text import did_you_mean, nearest

WRONG = 2  # the exit code


class Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest option or command for an unknown one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._flags: list[str] = []
        self._commands: Any = None
        super().__init__(*args, **options)

    def add_argument(self, *args: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*args, **options)
        self._flags += action.option_strings
        return action

    def add_subparsers(self, **options: Any) -> Any:
        self._commands = super().add_subparsers(**options)
        return self._commands

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore
        """Parse all arguments; an unknown one is a mistake, of a subcommand too."""
        self._check_command(args or ())
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(flags, self._flags)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: {message} (see --help)\n")

    def _check_command(self, args: Sequence[str]) -> None:
        # Argparse would name all commands, and the nearest only in Python 3.14.
        if self._commands is None:
            return
        command = next((word for word in args if not word.startswith("-")), None)
        known = list(self._commands.choices)
        if command is not None and command not in known:
            hint = _hint([command], known) or f"; the commands are {', '.join(known)}"
            self.error(f"there is no command {command!r}{hint}")


def _hint(words: Iterable[str], known: Sequence[str]) -> str:
    """Return a hint with the nearest known words.

    >>> _hint(['--jsn'], ['--json', '--tree']), _hint(['--nothing'], ['--json'])
    ('; did you mean --json?', '')
    """
    meant = dict.fromkeys(near for word in words for near in nearest(word, known))
    return did_you_mean([" and ".join(meant)] if meant else [])
