"""The differences between two trees of arrays and values, leaf by leaf, as a value to print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gda.layout.boundary import set_module
from gda.layout.text import counted, format_bytes, typed_shape
from gda.show.report import Report, Table
from gda.storage.stores.errors import repr_of
from gda.trees.records.recorded_tree import (
    ArrayLeaf,
    Leaf,
    Path,
    PerProcessLeaf,
    ValueLeaf,
    format_path,
)

_MOST_ROWS = 20  # of each kind of difference, in the text
_MOST_LETTERS = 60  # of a value, in the text


@set_module("gda.checkpoint")
@dataclass(frozen=True)
class LeafDifference:
    """A leaf that differs between two trees; ``Differences`` has them.

    Attributes:
      path: the keys and indices that lead to it.
      a, b: the leaf in each tree, as text: dtype and shape of an array, or the value. ``None`` in a
        tree without it.

    >>> import gda
    >>> print(gda.checkpoint.LeafDifference(('params', 'w'), 'float32[8]', 'float32[9]'))
    params/w float32[8] -> float32[9]
    """

    path: Path
    a: str | None
    b: str | None

    def __str__(self) -> str:
        return " ".join(filter(None, self._cells))

    @property
    def _cells(self) -> tuple[str, str]:
        texts = dict.fromkeys(text for text in (self.a, self.b) if text is not None)
        shown = [x if len(x) <= _MOST_LETTERS else f"{x[:_MOST_LETTERS]}…" for x in texts]
        return format_path(self.path), " -> ".join(shown)


@set_module("gda.checkpoint")
@dataclass(frozen=True, repr=False)
class Differences(Report):
    """The differences between two trees; true if there are any.

    Attributes:
      a, b: the paths of the checkpoints; ``'the tree'`` for a tree.
      only_in_a, only_in_b: leaves that the other tree does not have.
      of_other_type: arrays of another shape or dtype, values of another type, and arrays in place
        of values or of PRNG keys.
      of_other_content: leaves of one type and another content.
      num_equal: the number of leaves that are the same.
      equal_nbytes: bytes of the arrays that are the same.

    >>> import gda, numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder, {'w': np.zeros(4), 'step': 7})
    ...     differences = gda.checkpoint.diff(folder, {'w': np.zeros(4), 'step': 8})
    >>> differences.are_equal, differences.num_equal, differences.equal_nbytes
    (False, 1, 32)
    >>> print(*differences.of_other_content)
    step 7 -> 8
    """

    a: str
    b: str
    only_in_a: tuple[LeafDifference, ...] = ()
    only_in_b: tuple[LeafDifference, ...] = ()
    of_other_type: tuple[LeafDifference, ...] = ()
    of_other_content: tuple[LeafDifference, ...] = ()
    num_equal: int = 0
    equal_nbytes: int = 0

    @property
    def are_equal(self) -> bool:
        """True if all leaves are the same; containers and layouts do not count."""
        return not any(leaves for _, leaves in self._kinds)

    def __bool__(self) -> bool:
        return not self.are_equal

    def _parts(self) -> list[str | Table]:
        parts: list[str | Table] = [Table([("a:", self.a), ("b:", self.b)], has_names=False)]
        for kind, leaves in self._kinds:
            if leaves:
                rows: list[Sequence[str]] = [each._cells for each in leaves[:_MOST_ROWS]]
                if (more := len(leaves) - _MOST_ROWS) > 0:
                    rows.append([f"… {counted(more, 'more leaf', 'more leaves')}", ""])
                parts.append(f"{kind}: {_leaves(len(leaves))}")
                parts.append(Table(rows, has_names=False, indent="  "))
        return [*parts, self._equal]

    @property
    def _equal(self) -> str:
        every = "all of " if self.are_equal and self.num_equal > 1 else ""
        return f"the same: {every}{_leaves(self.num_equal)}, {format_bytes(self.equal_nbytes)}"

    @property
    def _kinds(self) -> list[tuple[str, tuple[LeafDifference, ...]]]:
        return [
            ("only in a", self.only_in_a),
            ("only in b", self.only_in_b),
            ("of other type", self.of_other_type),
            ("of other content", self.of_other_content),
        ]


def are_of_one_type(a: Leaf, b: Leaf) -> bool:
    """Return True if two leaves have the same shape and dtype, or are values of one type.

    Of values that each process has by itself, as many processes must have one.
    """
    if isinstance(a, ArrayLeaf) and isinstance(b, ArrayLeaf):
        return (a.shape, a.dtype, a.key_impl) == (b.shape, b.dtype, b.key_impl)
    if isinstance(a, PerProcessLeaf) and isinstance(b, PerProcessLeaf):
        return len(a.files) == len(b.files)
    if isinstance(a, ValueLeaf) and isinstance(b, ValueLeaf):
        return type(a.value) is type(b.value)
    return False


def differences_of(
    side_a: tuple[str, Mapping[Path, Leaf]], side_b: tuple[str, Mapping[Path, Leaf]]
) -> Differences:
    """Return the differences of two trees, each given by its name and its leaves."""
    (name_of_a, a), (name_of_b, b) = side_a, side_b
    only_in_b = [
        LeafDifference(path, None, _text(leaf)) for path, leaf in b.items() if path not in a
    ]
    only_in_a, other_type, other_content, equal = [], [], [], []
    for path, leaf in a.items():
        if (other := b.get(path)) is None:
            only_in_a.append(LeafDifference(path, _text(leaf), None))
        elif not are_of_one_type(leaf, other):
            other_type.append(LeafDifference(path, _text(leaf), _text(other)))
        elif not _is_same(leaf, other):
            other_content.append(LeafDifference(path, _text(leaf), _text(other)))
        else:
            equal.append(leaf)
    return Differences(
        name_of_a,
        name_of_b,
        only_in_a=tuple(only_in_a),
        only_in_b=tuple(only_in_b),
        of_other_type=tuple(other_type),
        of_other_content=tuple(other_content),
        num_equal=len(equal),
        equal_nbytes=sum(leaf.nbytes for leaf in equal if isinstance(leaf, ArrayLeaf)),
    )


def _is_same(a: Leaf, b: Leaf) -> bool:
    """Return True if two leaves of one type have the same content."""
    if isinstance(a, ArrayLeaf) and isinstance(b, ArrayLeaf):
        return a.fingerprint == b.fingerprint
    if isinstance(a, PerProcessLeaf) and isinstance(b, PerProcessLeaf):
        return a.files == b.files
    return _text(a) == _text(b)  # not ==: NaN is the same as NaN, and 0.0 is not -0.0


def _text(leaf: Leaf) -> str:
    if isinstance(leaf, ValueLeaf):
        return repr_of(leaf.value)
    if isinstance(leaf, PerProcessLeaf):
        return f"the values of {counted(len(leaf.files), 'process', 'processes')}"
    text = typed_shape(leaf.dtype.name, leaf.shape)
    return f"{text} of keys of {leaf.key_impl}" if leaf.key_impl else text


def _leaves(count: int) -> str:
    return counted(count, "leaf", "leaves")
