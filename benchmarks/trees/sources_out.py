"""Models of sources saved without being loaded, against the disk and against loading all of them.

A source makes its blocks when they are read, so that the disk has the writes alone. The model has
the shape of Llama 2, its weights one by one or stacked over the layers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import gda
from benchmarks.checkpoint.checkpointers import fsync
from benchmarks.checkpoint.checkpoints import Scratch, peak_of
from benchmarks.checkpoint.models import model
from benchmarks.pairs import Side
from benchmarks.work import OfSpeed, Target, WithinMiB, Work
from gda.layout.spec import Index, Shape
from gda.storage.read_boxes import box_shape_of

MIB = 2**20
MAX_BYTES = 128 * MIB
DTYPE = np.dtype(ml_dtypes.bfloat16)
_THREADS = 4

Tree = Mapping[str, "Made"]


class Made:
    """A source of rows that follow one after the other out of a few random bytes."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.dtype = shape, DTYPE
        self._values = np.random.default_rng(0).integers(0, 2**15, shape[-1] + 97, np.uint16)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE.itemsize

    def __getitem__(self, index: Index) -> np.ndarray[Any, Any]:
        sides = zip(index, self.shape, strict=True)
        *rows, columns = [range(*each.indices(size)) for each, size in sides]
        out = np.empty((*map(len, rows), len(columns)), np.uint16)
        first = rows[-1].start if rows else 0
        for number, row in enumerate(out.reshape(-1, len(columns)), first):
            row[...] = self._values[number % 97 + columns.start :][: len(columns)]
        return out.view(DTYPE)


def tree_of(layers: int, width: int, *, scanned: bool) -> Tree:
    """Return a model of sources; if ``scanned``, one for the weights of a name of all layers."""
    shapes = {name: shape for name, (shape, _) in model(layers, width).items()}
    if scanned:
        one = {name: shape for name, shape in shapes.items() if name.startswith("0.")}
        stacked = {name[2:]: (layers, *shape) for name, shape in one.items()}
        shapes = {name: shapes[name] for name in ("embedding", "head")} | stacked
    return {name: Made(shape) for name, shape in shapes.items()}


def _boxes(tree: Tree) -> list[tuple[Made, Index]]:
    boxes = []
    for source in tree.values():
        shape = box_shape_of(source.shape, DTYPE.itemsize, MAX_BYTES)
        starts = [range(0, size, step) for size, step in zip(source.shape, shape, strict=True)]
        for start in np.ndindex(*map(len, starts)):
            sides = zip(start, shape, source.shape, strict=True)
            index = [slice(n * step, min((n + 1) * step, size)) for n, step, size in sides]
            boxes.append((source, tuple(index)))
    return boxes


def _raw(tree: Tree, folder: Path) -> None:
    """Read every box, as gda does, and write it into a file of its own, durably."""
    folder.mkdir()

    def one(number: int, box: tuple[Made, Index]) -> None:
        source, index = box
        block = source[index]
        with open(folder / str(number), "wb", buffering=0) as file:
            file.write(block.reshape(-1).view(np.uint8).data)
            os.fsync(file.fileno())

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(one, *zip(*enumerate(_boxes(tree)), strict=True)))
    fsync(folder)


def _loaded(tree: Tree, folder: Path) -> None:
    folder.mkdir()
    arrays = {name: source[(slice(None),) * len(source.shape)] for name, source in tree.items()}
    save_file(arrays, folder / "model.safetensors")
    fsync(folder / "model.safetensors")


def _checkpoint(tree: Tree, folder: Path) -> None:
    gda.checkpoint.save(folder, tree, max_bytes=MAX_BYTES)


def _safetensors(tree: Tree, folder: Path) -> None:
    gda.storage.save_safetensors(folder, tree, max_bytes=MAX_BYTES)


Way = Callable[[Tree, Path], None]


def _saving(ways: Sequence[Way], layers: int, width: int, scanned: bool) -> list[Side]:
    tree, scratch = tree_of(layers, width, scanned=scanned), Scratch()
    small = {name: source for name, source in tree.items() if len(source.shape) < 2}
    (path,) = scratch.fresh()
    ways[0](small, path)  # what is written is what was read
    return [Side(partial(way, tree), scratch.fresh) for way in ways]


def _remembering(ways: Sequence[Way], layers: int, width: int, scanned: bool) -> list[Side]:
    tree, scratch = tree_of(layers, width, scanned=scanned), Scratch()

    def peak(way: Way) -> float:
        way(tree_of(1, 64, scanned=scanned), *scratch.fresh())  # what is imported once
        return max(peak_of(lambda: way(tree, *scratch.fresh())), 1) / MIB

    return [Side(partial(peak, way), times_itself=True) for way in ways]


_RAW = f"the same reads, each written and synced, {_THREADS} threads"
_LOADED = "all loaded, safetensors.numpy.save_file and fsync"


def works(quick: bool = False) -> list[Work]:
    """Return the works; if ``quick``, with a small model, only to see that everything runs."""
    layers, width = (2, 128) if quick else (4, 2048)
    targets: Mapping[str, Target | None] = {_RAW: OfSpeed(0.6), _LOADED: None}
    kinds = [
        ("checkpoint.save", _checkpoint, False, "one by one"),
        ("save_safetensors", _safetensors, True, "stacked"),
    ]
    times = [
        Work(
            f"{ours} of sources, 0.5 GiB of bfloat16, weights {name}",
            partial(_saving, (way, _raw, _loaded), layers, width, scanned),
            targets,
            ours=ours,
            raw=_RAW,
            seconds=12,
        )
        for ours, way, scanned, name in kinds
    ]
    memory = [
        Work(
            f"memory of {ours} of sources, 0.5 GiB of bfloat16, weights {name}",
            partial(_remembering, (way, _loaded), layers, width, scanned),
            {_LOADED: None},
            limit=WithinMiB(2 * MAX_BYTES / MIB),
            ours=ours,
            unit="MiB",
            seconds=0,
        )
        for ours, way, scanned, name in kinds
    ]
    return [*times, *memory]
