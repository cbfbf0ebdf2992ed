"""What can be wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence


class CorruptionError(ValueError):
    """A checkpoint is not what was saved; ``problems`` has one line for each thing found."""

    __module__ = "gda.checkpoint"

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class CheckpointNotFoundError(FileNotFoundError):
    """There is no complete checkpoint at a path."""

    __module__ = "gda.checkpoint"


class SaveError(RuntimeError):
    """Nothing was committed: another process failed, or another save is at work on the path."""

    __module__ = "gda.checkpoint"


def said(value: object) -> str:
    """Return a value as Python writes it; of a very long integer the hexadecimal digits."""
    return hex(value) if isinstance(value, int) and value.bit_length() > 1000 else repr(value)
