"""The comparison of two checkpoints: by their manifests."""

from __future__ import annotations

import json
import tempfile
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.pairs import Side
from benchmarks.work import Within, Work
from gda import checkpoint
from gda.checkpoint.format import manifest_json
from gda.checkpoint.format.manifest import Manifest, StoredArray, chunk_shape_of
from gda.trees.records.recorded_tree import ArrayLeaf, flatten

JSON = "json.loads of both manifests"
SHAPE = (8192, 3072)  # 96 MiB, in chunks of 12 MiB


def _manifest(leaves: int, changed: int) -> bytes:
    """Return the manifest of so many large arrays, one of which has another fingerprint."""
    tree = {f"layer{i // 10:04}": {f"w{j}": 0 for j in range(10)} for i in range(0, leaves, 10)}
    structure, paths = flatten(tree)
    dtype = np.dtype(np.float32)
    chunk_shape = chunk_shape_of((SHAPE[0] // 8, SHAPE[1]), dtype.itemsize, 16 * 2**20)
    planned = StoredArray.planned("w", SHAPE, chunk_shape, dtype)
    crcs = list(range(planned.grid.num_chunks))
    arrays = [replace(planned, name=f"{i:05}.w", crcs=crcs) for i in range(len(paths))]
    records = [
        ArrayLeaf(
            path=path,
            kind="GlobalArray",
            shape=SHAPE,
            dtype=dtype,
            spec="P('data', 'model')",
            mesh={"data": 64, "model": 16},
            fingerprint=f"{number + 10**6 * (number == changed):016x}",
            array=number,
        )
        for number, (path, _) in enumerate(paths)
    ]
    manifest = Manifest(tuple(records), structure, "data-0123456789abcdef", tuple(arrays), {})
    return manifest_json.dump(manifest)


def _folder(side: list[Side]) -> Path:
    """Return a folder that is removed with these sides."""
    folder = tempfile.TemporaryDirectory()
    weakref.finalize(side, folder.cleanup)
    return Path(folder.name)


class _Sides(list[Side]):
    """Sides that can be referred to weakly."""


def _by_manifests(leaves: int) -> list[Side]:
    sides = _Sides()
    folder = _folder(sides)
    files = []
    for number in range(2):
        path = folder / str(number) / "manifest.json"
        path.parent.mkdir()
        path.write_bytes(_manifest(leaves, leaves // 2 * number))
        files.append(path)

    def ours() -> None:
        found = checkpoint.diff(files[0].parent, files[1].parent)
        assert len(found.of_other_content) == 2
        assert found.num_equal == leaves - 2

    def parse() -> None:
        for file in files:
            json.loads(file.read_bytes().partition(b"\n")[2])

    sides += [Side(ours), Side(parse)]
    return sides


def works(quick: bool) -> list[Work]:
    """Return the works; if ``quick``, with small checkpoints."""
    leaves = 100 if quick else 10_000
    return [
        Work(
            "diff of two checkpoints of 1 TB, 10,000 leaves, by their manifests",
            partial(_by_manifests, leaves),
            {JSON: None},
            Within(1000),
        ),
    ]
