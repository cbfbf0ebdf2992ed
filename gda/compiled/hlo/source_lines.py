"""The lines of user code that instructions, and equations of a trace, come from."""

from __future__ import annotations

import importlib.util
import os
import re
import site
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gda.compiled.hlo.instructions import Instruction


def _folders(*paths: str | None) -> tuple[str, ...]:
    return tuple(os.path.join(path, "") for path in paths if path)


# JAX and gda, whose code is not the user's, and all installed code.
_JAX = importlib.util.find_spec("jax")
LIBRARY = _folders(
    _JAX and os.path.dirname(_JAX.origin or ""),
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
)
INSTALLED = _folders(
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)

_METADATA = re.compile(r'(\w+)=("(?:\\.|[^"\\])*"|\d+)')


def metadata_of(instruction: Instruction) -> dict[str, str]:
    found = _METADATA.findall(instruction.attributes.get("metadata", ""))
    return {key: _unquoted(value) for key, value in found}


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    escaped = text[1:-1].encode().decode("unicode_escape")
    return escaped.encode("latin1", "replace").decode("utf-8", "replace")


def user_line(frames: Iterable[tuple[str, int]]) -> tuple[str | None, int | None]:
    """Return the innermost line of user code, of frames from the innermost; None if there is none.

    Installed code counts only if there is no other: a layer of a model library calls the einsum,
    but the user can change the model that has the layer.
    """
    places = [place for place in frames if place[0] and not place[0].startswith(LIBRARY)]
    own = [place for place in places if not place[0].startswith(INSTALLED)]
    return next(iter(own or places), (None, None))


def line_of_equation(equation: Any) -> tuple[str, int]:
    """Return the line of an equation of a trace; an empty file if there is none."""
    traceback = equation.source_info.traceback
    frames = () if traceback is None else traceback.frames
    file, line = user_line((frame.file_name, frame.line_num) for frame in frames)
    return file or "", line or 0


class Sources:
    """The tables of files, lines and stack frames above a program."""

    def __init__(self, text: str) -> None:
        self.files = {
            int(number): _unquoted(name)
            for number, name in re.findall(r"^(\d+) (.*)$", _table(text, "FileNames"), re.MULTILINE)
        }
        self.places = _rows(text, "FileLocations", r"file_name_id=(\d+).*?\bline=(\d+)")
        of_frame = r"file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
        self.frames = _rows(text, "StackFrames", of_frame)
        # XLA prints the number of the parent plus one, so that no frame has the parent 0.
        parents = [parent for _, parent in self.frames.values()]
        self.excess = 1 if parents and min(parents) > 0 else 0

    def line(self, metadata: Mapping[str, str]) -> tuple[str | None, int | None]:
        """Return the innermost line of user code, as ``user_line``."""
        return user_line(self._places(metadata))

    def _places(self, metadata: Mapping[str, str]) -> Iterator[tuple[str, int]]:
        """Yield files and lines, the innermost first."""
        seen = set()
        frame = int(metadata.get("stack_frame_id", 0))
        while frame in self.frames and frame not in seen:
            seen.add(frame)
            place, parent = self.frames[frame]
            file, line = self.places.get(place, (0, 0))
            yield self.files.get(file, ""), line
            frame = parent - self.excess
        yield metadata.get("source_file", ""), int(metadata.get("source_line", 0))


def _table(text: str, title: str) -> str:
    found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    return found[1] if found else ""


def _rows(text: str, title: str, form: str) -> dict[int, tuple[int, int]]:
    rows = re.findall(rf"^(\d+) \{{{form}", _table(text, title), re.MULTILINE)
    return {int(number): (int(one), int(other or 0)) for number, one, other in rows}
