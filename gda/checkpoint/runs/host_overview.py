"""A report on the folder of one host: the local steps of its runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gda.checkpoint.inspecting import JSON_VERSION
from gda.checkpoint.local_steps.host_folder import (
    files_of,
    manifests_in,
    nbytes_in,
    present,
    runs_in,
)
from gda.checkpoint.runs.overview import age
from gda.layout.text import format_bytes
from gda.show.report import Report, Table
from gda.storage.stores.directory import FileStore
from gda.storage.stores.errors import CheckpointNotFoundError

_HEAD = ("step", "start", "age", "size here", "files here", "")


class _HostRow(NamedTuple):
    """A local step, as one host has it; ``None`` for facts that are unknown."""

    step: int
    name: str
    start: int  # of the run, which saved it
    nbytes: int  # of its files on this host
    saved: str | None = None
    num_files: int | None = None  # on all hosts
    num_here: int | None = None
    problem: str | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        files = "" if self.num_files is None else f"{self.num_here:,} of {self.num_files:,}"
        saved = age(self.saved) if self.saved else ""
        size = format_bytes(self.nbytes)
        return str(self.step), str(self.start), saved, size, files, self.problem or ""


@dataclass(frozen=True, repr=False)
class HostOverview(Report):
    """The local steps in the folder of a host, ascending, for each run that has some."""

    path: str
    runs: dict[str, Sequence[_HostRow]]  # by folder

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        runs = {path: [each._asdict() for each in rows] for path, rows in self.runs.items()}
        return {"version": JSON_VERSION, "kind": "local steps", "path": self.path, "runs": runs}

    def _parts(self) -> list[str | Table]:
        parts: list[str | Table] = []
        for path, rows in self.runs.items():
            head = _HEAD if any(each.problem for each in rows) else _HEAD[:-1]
            cells = [each.cells[: len(head)] for each in rows]
            parts += [path, Table([head, *cells], _HEAD[:5]) if rows else "no local step"]
        return parts


def host_overview_of(path: str) -> HostOverview:
    """Return the local steps on this host, from their manifests and the sizes of files.

    Raises ``CheckpointNotFoundError`` if no run has saved local steps into the folder.
    """
    if not (folders := runs_in(path)):
        raise CheckpointNotFoundError(
            f"{path} has no local steps; pass the folder that the run was given as local="
        )
    return HostOverview(path, {folder: _rows_of(folder) for folder in folders})


def _rows_of(folder: str) -> list[_HostRow]:
    rows: list[_HostRow] = []
    for name, manifest, problem in manifests_in(folder):
        place = os.path.join(folder, str(name))
        row = _HostRow(name.number, str(name), name.generation, nbytes_in(place))
        if manifest is None:
            rows.append(row._replace(problem=problem))
            continue
        files = files_of(manifest)
        num_here = sum(stop - start for start, stop in present(FileStore(place), files))
        saved = manifest.about.get("saved")
        rows.append(row._replace(saved=saved, num_files=len(files), num_here=num_here))
    return rows
