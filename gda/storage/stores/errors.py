"""The errors of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from gda.layout.boundary import set_module


@set_module("gda.checkpoint")
class CorruptionError(ValueError):
    """A checkpoint is damaged, or a file is missing; ``problems`` has one line for each finding.

    >>> import gda, numpy as np, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder, {'w': np.arange(4)})
    ...     chunk = next(pathlib.Path(folder).glob('data-*/*/c.*'))
    ...     _ = chunk.write_bytes(bytes(32))
    ...     try:
    ...         gda.checkpoint.verify(folder)
    ...     except gda.checkpoint.CorruptionError as error:
    ...         len(error.problems)
    1
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


@set_module("gda.checkpoint")
class NewerFormatError(ValueError):
    """A checkpoint is of a newer gda, or has a dtype that is not known here; it is not damaged.

    >>> import gda, numpy as np, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder, {'w': np.arange(4)})
    ...     manifest = pathlib.Path(folder, 'manifest.json')
    ...     text = manifest.read_text()
    ...     _ = manifest.write_text(text.replace('"gda-checkpoint": 1', '"gda-checkpoint": 2'))
    ...     try:
    ...         gda.checkpoint.restore(folder)
    ...     except gda.checkpoint.NewerFormatError:
    ...         print('update gda')
    update gda
    """


@set_module("gda.checkpoint")
class CheckpointNotFoundError(FileNotFoundError):
    """There is no complete checkpoint at a path.

    >>> import gda, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         gda.checkpoint.restore(folder)
    ...     except gda.checkpoint.CheckpointNotFoundError:
    ...         print('start from the beginning')
    start from the beginning
    """


@set_module("gda.checkpoint")
class SaveError(RuntimeError):
    """Nothing was committed: another process failed, or another save into the path is running.

    >>> import gda, numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         gda.checkpoint.save(folder, {'w': np.arange(4)})
    ...     except gda.checkpoint.SaveError:
    ...         print('train on, and save at the next step')
    """


def repr_of(value: object) -> str:
    """Return the ``repr`` of a value; the hexadecimal digits of a very long integer."""
    return hex(value) if isinstance(value, int) and value.bit_length() > 1000 else repr(value)
