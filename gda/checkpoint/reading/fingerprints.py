"""The comparison of arrays with their recorded fingerprints, on devices or chunk by chunk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gda.arrays.fingerprints import fingerprint
from gda.arrays.fingerprints import formula as fingerprint_formula
from gda.checkpoint.format.errors import CorruptionError
from gda.checkpoint.format.manifest import ArrayLeaf, Manifest, Piece
from gda.checkpoint.format.structure import format_path
from gda.checkpoint.reading.files import Chunk
from gda.checkpoint.reading.restored_leaves import Target, saved_type
from gda.layout.text import join_some
from gda.mesh import processes_of, sharding_of
from gda.multihost.steps import all_do
from gda.trees.leaves import grid_of_leaf, is_container


def check_provable(url: str, targets: Sequence[Target]) -> None:
    """Raise unless the fingerprints of arrays can be compared, before these are read.

    Raises:
      CorruptionError: an array was saved without one.
      ValueError: an array is to be cast, which changes its fingerprint.
    """
    cast = [target for target in targets if target.dtype != target.leaf.dtype]
    if cast:
        paths = join_some([format_path(target.leaf.path) for target in cast])
        raise ValueError(
            f"a cast changes the fingerprint of {paths}; restore without check_fingerprint, or "
            "without cast"
        )
    _check_recorded(url, [target.leaf for target in targets])


def _check_recorded(url: str, leaves: Sequence[ArrayLeaf]) -> None:
    lacking = [format_path(leaf.path) for leaf in leaves if leaf.fingerprint is None]
    if lacking:
        raise CorruptionError(
            f"{url} was saved without the fingerprints of {join_some(lacking)}; save it with "
            "fingerprint=True to compare them"
        )


def check_fingerprints(url: str, targets: Sequence[Target], values: Sequence[Any]) -> None:
    """Raise unless every array has the fingerprint that was recorded. All processes must call it.

    Raises:
      CorruptionError: an array has another.
    """
    shares = [_Share(target, value) for target, value in zip(targets, values, strict=True)]

    def judge(parts: dict[int, list[Any]]) -> list[str]:
        return [
            format_path(share.target.leaf.path)
            for share, *of_all in zip(shares, *parts.values(), strict=True)
            if share.digests(of_all) != {share.target.leaf.fingerprint}
        ]

    what = f"comparing fingerprints with the checkpoint {url}"
    done = all_do(lambda: [share.part() for share in shares], judge=judge, what=what, timeout=600)
    if wrong := done.verdict:
        problems = [_differing(path) for path in wrong]
        raise CorruptionError(f"{url}: {join_some(problems)}", problems)


def _differing(path: str) -> str:
    return f"array {path} is not what was saved: its fingerprint differs"


class ChunkSums:
    """The fingerprints of all arrays of a checkpoint, summed up chunk by chunk without a device.

    Raises:
      CorruptionError: an array was saved without one.
    """

    def __init__(self, url: str, manifest: Manifest) -> None:
        self._leaves = [leaf for leaf in manifest.leaves if isinstance(leaf, ArrayLeaf)]
        _check_recorded(url, self._leaves)
        self._arrays = manifest.arrays
        self._guard = threading.Lock()
        self._sums = [fingerprint_formula.add([]) for _ in self._leaves]
        self._alone: dict[int, int] = {}
        self._packed: dict[Chunk, list[tuple[int, Piece]]] = {}
        for number, leaf in enumerate(self._leaves):
            if leaf.array is not None:
                self._alone[leaf.array] = number
            for piece in leaf.pieces:
                chunk = piece.offset // self._arrays[piece.array].chunk_shape[0]
                self._packed.setdefault((piece.array, chunk), []).append((number, piece))

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
            sums = fingerprint_formula.sums_of_numpy(part, start)
            with self._guard:
                self._sums[number] += sums

    def problems(self) -> list[str]:
        """Return a line for each array whose fingerprint is not the one recorded."""
        problems = []
        for leaf, sums in zip(self._leaves, self._sums, strict=True):
            if fingerprint_formula.digest_of(*saved_type(leaf), sums) != leaf.fingerprint:
                problems.append(_differing(format_path(leaf.path)))
        return problems


class _Share:
    """The share of this process in the fingerprint of a restored array."""

    def __init__(self, target: Target, value: Any) -> None:
        self.target = target
        self._array = value.array if is_container(value) else value
        self._pending = None
        if isinstance(self._array, jax.Array):
            self._pending = fingerprint.begin(self._array, grid_of_leaf(value))

    def part(self) -> list[list[int]]:
        """Return the processes that hold the array, and the sums over the share of this one."""
        if self._pending is None:
            sums = fingerprint_formula.sums_of_numpy(np.asarray(self._array))
        else:
            sums = self._pending.result()
        return [list(self._holders()), sums.tolist()]

    def _holders(self) -> tuple[int, ...]:
        if not isinstance(self._array, jax.Array) or self._array.is_fully_addressable:
            return (jax.process_index(),)
        mesh: Any = sharding_of(self._array).mesh
        return tuple(processes_of(mesh).numbers)

    def digests(self, parts: Sequence[list[list[int]]]) -> set[str]:
        """Return the set of fingerprints from the parts of all processes: one if all are equal."""
        by_holders: dict[tuple[int, ...], list[np.ndarray[Any, Any]]] = {}
        for holders, sums in parts:
            by_holders.setdefault(tuple(holders), []).append(np.array(sums, np.uint32))
        shape, dtype = saved_type(self.target.leaf)
        return {
            fingerprint_formula.digest_of(shape, dtype, fingerprint_formula.add(shares))
            for shares in by_holders.values()
        }
