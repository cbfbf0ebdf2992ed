"""The fingerprints of a checkpoint, summed up chunk by chunk, and those that it lacks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from gda.arrays.fingerprints.formula import add, digest_of, sums_of_numpy
from gda.checkpoint.format.manifest import Chunk, Manifest
from gda.layout.text import join_some
from gda.storage.stores.errors import CorruptionError
from gda.trees.records.arrivals import Arrival
from gda.trees.records.compared_fingerprints import line_of
from gda.trees.records.recorded_tree import ArrayLeaf, Piece, format_path, saved_type


def check_provable(url: str, arrivals: Sequence[Arrival]) -> None:
    """Raise unless the fingerprints of arrays can be compared, before these are read."""
    cast = [each.record.path for each in arrivals if each.dtype != each.record.dtype]
    if cast:
        paths = join_some([format_path(path) for path in cast])
        raise ValueError(
            f"a cast changes the fingerprint of {paths}; restore without check_fingerprint, or "
            "without cast"
        )
    _check_recorded(url, [each.record for each in arrivals])


def _check_recorded(url: str, leaves: Sequence[ArrayLeaf]) -> None:
    lacking = [format_path(leaf.path) for leaf in leaves if leaf.fingerprint is None]
    if lacking:
        raise CorruptionError(
            f"{url} was saved without the fingerprints of {join_some(lacking)}; save it with "
            "fingerprint=True to compare them"
        )


class ChunkSums:
    """The fingerprints of all arrays of a checkpoint, summed up chunk by chunk without a device."""

    def __init__(self, url: str, manifest: Manifest) -> None:
        self._leaves = manifest.array_leaves
        _check_recorded(url, self._leaves)
        self._arrays = manifest.arrays
        self._guard = threading.Lock()
        self._sums = [add([]) for _ in self._leaves]
        self._alone: dict[int, int] = {}
        self._packed: dict[Chunk, list[tuple[int, Piece]]] = {}
        for number, leaf in enumerate(self._leaves):
            if leaf.array is not None:
                self._alone[leaf.array] = number
            for piece in leaf.pieces:
                self._packed.setdefault(manifest.chunk_of(piece), []).append((number, piece))

    def add(self, where: Chunk, data: np.ndarray[Any, Any]) -> None:
        """Add the elements of a chunk to the arrays that it belongs to; by any thread."""
        array, chunk = where
        if (alone := self._alone.get(array)) is not None:
            grid = self._arrays[array].grid
            within = data[tuple(map(slice, grid.shape_within(chunk)))]
            parts = [(alone, within, grid.start(chunk))]
        else:
            parts = [
                (number, piece.of_chunk(data), piece.start)
                for number, piece in self._packed.get(where, ())
            ]
        for number, part, start in parts:
            sums = sums_of_numpy(part, start)
            with self._guard:
                self._sums[number] += sums

    def problems(self) -> list[str]:
        """Return a line for each array whose fingerprint is not the one recorded."""
        return [
            line_of(leaf)
            for leaf, sums in zip(self._leaves, self._sums, strict=True)
            if digest_of(*saved_type(leaf), sums) != leaf.fingerprint
        ]
