"""The errors of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from gda.layout.boundary import set_module


@set_module("gda.checkpoint")
class CorruptionError(ValueError):
    """A checkpoint is not what was saved; ``problems`` has one line for each thing found."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


@set_module("gda.checkpoint")
class CheckpointNotFoundError(FileNotFoundError):
    """There is no complete checkpoint at a path."""


@set_module("gda.checkpoint")
class SaveError(RuntimeError):
    """Nothing was committed: another process failed, or another save is at work on the path."""


def said(value: object) -> str:
    """Return a value as Python writes it; of a very long integer the hexadecimal digits."""
    return hex(value) if isinstance(value, int) and value.bit_length() > 1000 else repr(value)
