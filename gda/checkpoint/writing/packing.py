"""Many small arrays packed into one, so that a thousand cost as much as one of their total size.

Every process has its own packs, one for each dtype. A piece is within one chunk.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from gda.arrays.fingerprints.formula import Words, sums_of_each
from gda.arrays.transport.to_host import HostBlock
from gda.checkpoint.format.manifest import StoredArray
from gda.layout.indices import index_at, within
from gda.layout.spec import Index, Shape
from gda.storage.options import Options
from gda.trees.records.recorded_leaves import Piece
from gda.trees.records.saved_leaves import Block, Keyed, SavedLeaf, to_host

PACK_BYTES = 4 * 2**20  # of a chunk


@dataclass(frozen=True, eq=False)
class Placed:
    """A piece of a leaf in a pack, and the blocks that it consists of."""

    number: int  # of the leaf
    piece: Piece  # by the number of the pack among those of this process
    blocks: tuple[Block, ...]


class Pack(NamedTuple):
    """The small arrays of one dtype that this process writes: in one array, in order of place."""

    array: StoredArray
    pieces: list[Placed]

    def chunks(self, options: Options) -> Iterator[tuple[int, list[PlacedBlock]]]:
        """Yield every chunk, and its blocks, which are being transferred to the host."""
        (size,) = self.array.chunk_shape
        blocks = ((placed, block) for placed in self.pieces for block in placed.blocks)
        for chunk, each in itertools.groupby(
            to_host(blocks, options.max_bytes), lambda host: host.key[0].piece.offset // size
        ):
            yield chunk, list(each)


PlacedBlock: TypeAlias = HostBlock[Keyed[Placed]]


def packs_of(leaves: Iterable[SavedLeaf], codec: str) -> list[Pack]:
    """Return the packs of this process, with the blocks that it writes of small arrays."""
    by_dtype: dict[np.dtype[Any], list[SavedLeaf]] = {}
    for leaf in leaves:
        if leaf.blocks and leaf.record.nbytes:
            by_dtype.setdefault(leaf.record.dtype, []).append(leaf)
    return [_pack(number, dtype, by_dtype[dtype], codec) for number, dtype in enumerate(by_dtype)]


def _pack(number: int, dtype: np.dtype[Any], leaves: Iterable[SavedLeaf], codec: str) -> Pack:
    """Lay leaves end to end; a piece that does not fit into a chunk begins the next."""
    most = PACK_BYTES // dtype.itemsize
    pieces: list[Placed] = []
    end = 0
    for leaf in leaves:
        for start, shape, blocks in _boxes(leaf):
            size = math.prod(shape)
            if end % most + size > most:
                end += -end % most
            piece = Piece(array=number, offset=end, start=start, shape=shape)
            pieces.append(Placed(leaf.number, piece, blocks))
            end += size
    chunk = min(end, most)
    name = f"packed.{dtype.name}.{jax.process_index()}"
    array = StoredArray.planned(name, (-(-end // chunk) * chunk,), (chunk,), dtype, codec)
    return Pack(array, pieces)


def _boxes(leaf: SavedLeaf) -> Iterable[tuple[Shape, Shape, tuple[Block, ...]]]:
    """Return start, shape and blocks of the parts of an array that become a piece each."""
    if leaf.written_bytes == leaf.record.nbytes:
        return [((0,) * len(leaf.record.shape), leaf.record.shape, leaf.blocks)]
    return [(block.start, block.data.shape, (block,)) for block in leaf.blocks]


def fill(array: StoredArray, blocks: Iterable[PlacedBlock]) -> np.ndarray[Any, Any]:
    """Return the data of a chunk of a pack."""
    (size,) = array.chunk_shape
    out = np.zeros(size, array.dtype)
    place_in = functools.cache(_place_in)  # the same for all leaves of one layout
    for placed, of_piece in itertools.groupby(blocks, lambda host: host.key[0]):
        part, begin = placed.piece.of_chunk(out), placed.piece.start
        for host in of_piece:
            data = host.values()
            part[place_in(host.key[1].start, begin, data.shape)] = data
    return out


def _place_in(start: Shape, begin: Shape, shape: Shape) -> Index:
    """Return the place of a block in its piece."""
    return within(index_at(start, shape), begin)


def sums_of(data: np.ndarray[Any, Any], blocks: Sequence[PlacedBlock]) -> dict[int, Words]:
    """Return the share of a chunk in the fingerprint of each leaf with a piece there."""
    alike: dict[Any, list[Placed]] = {}
    for placed in dict.fromkeys(each.key[0] for each in blocks):
        alike.setdefault((placed.piece.start, placed.piece.shape), []).append(placed)
    sums: dict[int, Words] = {}
    for (start, _), pieces in alike.items():
        parts = [placed.piece.of_chunk(data) for placed in pieces]
        for placed, of_piece in zip(pieces, sums_of_each(parts, start), strict=True):
            number = placed.number
            sums[number] = sums[number] + of_piece if number in sums else of_piece
    return sums
