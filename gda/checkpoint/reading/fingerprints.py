"""The comparison of arrays with their recorded fingerprints, on devices or chunk by chunk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gda.arrays.fingerprints.fingerprint import begin
from gda.arrays.fingerprints.formula import add, digest_of, sums_of_numpy
from gda.arrays.fingerprints.on_devices import PendingSums
from gda.checkpoint.format.manifest import Chunk, Manifest
from gda.layout.text import join_some
from gda.mesh import processes_of, sharding_of
from gda.multihost.steps import all_do
from gda.storage.stores.errors import CorruptionError
from gda.trees.leaves import grid_of_leaf, held_by
from gda.trees.records.recorded_leaves import ArrayLeaf, Piece
from gda.trees.records.restored_leaves import RestoredLeaf, saved_type
from gda.trees.records.structure import format_path


def check_provable(url: str, leaves: Sequence[RestoredLeaf]) -> None:
    """Raise unless the fingerprints of arrays can be compared, before these are read."""
    cast = [leaf.saved.path for leaf in leaves if leaf.dtype != leaf.saved.dtype]
    if cast:
        paths = join_some([format_path(path) for path in cast])
        raise ValueError(
            f"a cast changes the fingerprint of {paths}; restore without check_fingerprint, or "
            "without cast"
        )
    _check_recorded(url, [leaf.saved for leaf in leaves])


def _check_recorded(url: str, leaves: Sequence[ArrayLeaf]) -> None:
    lacking = [format_path(leaf.path) for leaf in leaves if leaf.fingerprint is None]
    if lacking:
        raise CorruptionError(
            f"{url} was saved without the fingerprints of {join_some(lacking)}; save it with "
            "fingerprint=True to compare them"
        )


def check_fingerprints(
    url: str,
    leaves: Sequence[RestoredLeaf],
    values: Sequence[Any],
    was: str = "saved",
    timeout: float = 600,
) -> None:
    """Raise unless every array has the recorded fingerprint. All processes must call it.

    In messages, ``url`` is what the arrays are from, and they were ``"saved"`` or ``"offered"``.
    """
    begun = [_begin_share(*each) for each in zip(leaves, values, strict=True)]

    def judge(parts: dict[int, list[Any]]) -> list[str]:
        return [
            format_path(leaf.saved.path)
            for leaf, *of_all in zip(leaves, *parts.values(), strict=True)
            if _digests(leaf.saved, of_all) != {leaf.saved.fingerprint}
        ]

    what = f"comparing fingerprints with {url}"
    done = all_do(
        lambda: [(holders, sums.result().tolist()) for holders, sums in begun],
        judge=judge,
        what=what,
        timeout=timeout,
    )
    if wrong := done.verdict:
        problems = [_differing(path, was) for path in wrong]
        raise CorruptionError(f"{url}: {join_some(problems)}", problems)


def _differing(path: str, was: str) -> str:
    return f"array {path} is not what was {was}: its fingerprint differs"


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
            _differing(format_path(leaf.path), "saved")
            for leaf, sums in zip(self._leaves, self._sums, strict=True)
            if digest_of(*saved_type(leaf), sums) != leaf.fingerprint
        ]


def _begin_share(leaf: RestoredLeaf, value: Any) -> tuple[tuple[int, ...], PendingSums]:
    """Return the processes that hold a restored array, and the sums over the share of this one."""
    array = held_by(value)
    if not isinstance(array, jax.Array):
        return (jax.process_index(),), PendingSums(sums_of_numpy(np.asarray(array, leaf.dtype)))
    sums = begin(array, grid_of_leaf(value))
    if array.is_fully_addressable:
        return (jax.process_index(),), sums
    mesh: Any = sharding_of(array).mesh
    return processes_of(mesh).numbers, sums


def _digests(leaf: ArrayLeaf, parts: Sequence[list[Any]]) -> set[str]:
    """Return the set of fingerprints from the parts of all processes: one if all are equal."""
    by_holders: dict[tuple[int, ...], list[list[int]]] = {}
    for holders, sums in parts:
        by_holders.setdefault(tuple(holders), []).append(sums)
    return {digest_of(*saved_type(leaf), shares) for shares in by_holders.values()}
