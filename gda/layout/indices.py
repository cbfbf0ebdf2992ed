"""Indices of blocks: one slice for each dimension, as JAX and NumPy take them.

The index of a grid has ``slice(None)`` for a dimension that is not sharded; ``bounded`` gives it
every start and stop. Such an index is a *box*.
"""

from __future__ import annotations

from collections.abc import Iterable

from gda.layout.spec import Index, Shape


def shape_at(index: Index, block_shape: Shape) -> Shape:
    """Return the shape of the block at an index; ``block_shape`` has the sizes not sharded."""
    sides = zip(index, block_shape, strict=True)
    return tuple([size if s.stop is None else s.stop - s.start for s, size in sides])


def start_of(index: Index) -> Shape:
    """Return the first element of the block at an index, which is a key of the block.

    All blocks of a grid have other first elements. Slices are not hashable before Python 3.12.
    """
    return tuple([s.start or 0 for s in index])


def is_empty(index: Index) -> bool:
    """Return True if an index has no elements: of a padded grid, that of padding alone."""
    return any(s.start == s.stop is not None for s in index)


def bounded(index: Index, shape: Shape) -> Index:
    """Return an index with every start and stop."""
    sides = zip(index, shape, strict=True)
    return tuple([slice(s.start or 0, size if s.stop is None else s.stop) for s, size in sides])


# Boxes: indices with every start and stop.


def index_at(start: Shape, shape: Shape) -> Index:
    """Return the box of this shape that begins at an element."""
    return tuple([slice(first, first + n) for first, n in zip(start, shape, strict=True)])


def sizes_of(box: Index) -> Shape:
    """Return the shape of a box."""
    return tuple([s.stop - s.start for s in box])


def hull_of(boxes: Iterable[Index]) -> Index:
    """Return the smallest box that has all others."""
    return tuple(
        [
            slice(min([s.start for s in along]), max([s.stop for s in along]))
            for along in zip(*boxes, strict=True)
        ]
    )


def common_box(one: Index, other: Index) -> Index | None:
    """Return the elements that two boxes have in common; ``None`` if there are none."""
    both = [
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    ]
    return tuple(both) if all(s.start < s.stop for s in both) else None


def within(box: Index, start: Shape) -> Index:
    """Return the place of a box in a block that begins at an element."""
    sides = zip(box, start, strict=True)
    return tuple([slice(s.start - first, s.stop - first) for s, first in sides])
