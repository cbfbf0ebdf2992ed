"""The server of a process that offers: it answers one question of each connection, in threads.

A puller asks the first process for the catalog, and keeps that connection open as long as it pulls,
which keeps the version alive. It asks every process for pieces of blocks. Each question is checked
before anything is sent.
"""

from __future__ import annotations

import contextlib
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gda.arrays.dtypes import is_float
from gda.arrays.transport.connection import Address, BlockAs, Connection, Deadline
from gda.arrays.transport.listening import SECONDS_TO_ASK, Server
from gda.exchange.versions import Versions
from gda.layout.dtype_names import recorded_dtype
from gda.layout.indices import index_at, within
from gda.layout.spec import Shape
from gda.multihost.places import one_line
from gda.storage.casts import DoesNotFitError, Origin, check_holds
from gda.trees.records.recorded_tree import ValueLeaf, format_path
from gda.trees.records.saved_leaves import SavedLeaf, on_host

MOST_SECONDS = 86400.0
MOST_PIECES = 1000  # of a question
_MOST_QUESTION_BYTES = 2**20
# Errors of a question, and their names on the way to the puller.
ERRORS = {
    each.__name__: each
    for each in (
        ConnectionError,
        DoesNotFitError,
        LookupError,
        PermissionError,
        TimeoutError,
        ValueError,
    )
}

# JSON, and the blocks that follow it, each with the dtype to send.
_Answer = tuple[bytes, list[BlockAs]]


class HeldTree:
    """A version of the tree in one process, with the blocks that this process holds.

    Attributes:
      leaves: without their blocks; without a grid if all processes have the whole array.
      structure: that of ``flatten``.
      values: the result of ``values_of``, which must be the same in all processes.
    """

    def __init__(
        self, leaves: Sequence[SavedLeaf | ValueLeaf], structure: Any, values: dict[str, str]
    ) -> None:
        self.structure, self.values = structure, values
        arrays = [leaf for leaf in leaves if isinstance(leaf, SavedLeaf)]
        self._data = {x.number: {block.start: block.data for block in x.blocks} for x in arrays}
        self.leaves = [x._replace(blocks=()) if isinstance(x, SavedLeaf) else x for x in leaves]

    def pieces(self, numbers: Any, start: Any, shape: Any, dtype: Any) -> Iterator[BlockAs]:
        """Yield one piece of some leaves; ``ValueError`` unless a block of this process has it."""
        start, shape = tuple(start), tuple(shape)
        for number in numbers:
            is_number = type(number) is int and 0 <= number < len(self.leaves)
            leaf = self.leaves[number] if is_number else None
            if not isinstance(leaf, SavedLeaf):
                raise ValueError(f"has no array {number!r:.80}")
            at = _piece_in_block(start, shape, dtype, leaf.block_shape)
            data = self._data[number].get(at.first)
            if data is None or any(map(operator.gt, at.stops, data.shape)):
                raise ValueError(
                    f"holds no block of array {number} with the piece at {start} {shape}"
                )
            if not isinstance(data, np.ndarray):
                # It replaces the pinned memory that an accelerator has copied the block to.
                data = self._data[number][at.first] = on_host(data)
            block = data[at.place]
            if at.dtype != block.dtype:
                _check_cast(leaf, start, block, at.dtype)
            yield block, at.dtype


class _PieceInBlock(NamedTuple):
    """The place of a piece: the first element of its block, its index there; its dtype to send."""

    first: Shape
    place: Any
    stops: Shape
    dtype: np.dtype[Any]


# Many arrays have pieces at one place.
@lru_cache(maxsize=4096)
def _piece_in_block(start: Shape, shape: Shape, name: str, block_shape: Shape) -> _PieceInBlock:
    is_place = all(type(n) is int and 0 <= n < 2**62 for n in (*start, *shape))
    if not is_place or not len(start) == len(shape) == len(block_shape):
        raise ValueError(f"got {[start, shape]!r:.80} as a piece of blocks of {block_shape}")
    steps = zip(start, block_shape, strict=True)
    first = tuple([at // step * step if step else 0 for at, step in steps])
    place = within(index_at(start, shape), first)
    stops = tuple([each.stop for each in place])
    return _PieceInBlock(first, (*place, ...), stops, recorded_dtype(name))


def _check_cast(leaf: Any, start: Shape, block: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> None:
    """Raise unless a piece may be cast, and has no value that the dtype cannot hold."""
    is_complex = block.dtype.kind == dtype.kind == "c"
    if not is_complex and not (is_float(dtype) and is_float(block.dtype)):
        raise ValueError(f"casts no {block.dtype} to {dtype}")
    # Here, because no error can follow a part that was sent.
    what = f"its array at {format_path(leaf.record.path)}"
    check_holds(block, dtype, Origin.of_block(what, start))


class OfferServer(Server):
    """The server of one process; it ends with ``close``, or when the program begins to exit.

    Args:
      address: to listen on; port 0 lets the system choose one.
      name: of the offer.
      token: that a puller must have.
      versions: the trees that this process holds.
      catalog: returns the catalog of a version; ``None`` in all processes but the first.
    """

    def __init__(
        self,
        address: Address,
        name: str,
        token: str | None,
        versions: Versions[HeldTree],
        catalog: Callable[[int], bytes] | None,
    ) -> None:
        self._name, self._versions, self._catalog = name, versions, catalog
        super().__init__(address, token, versions.is_closed)

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._versions.close()
        super().close()

    def answer(self, connection: Connection) -> None:
        connection.deadline = Deadline(SECONDS_TO_ASK)
        question = connection.message(_MOST_QUESTION_BYTES)
        seconds = question.get("timeout")
        if not isinstance(seconds, int | float) or not 0 < seconds <= MOST_SECONDS:
            seconds = SECONDS_TO_ASK
        connection.deadline = Deadline(float(seconds))
        answers = {"tree": self._tree, "pieces": self._pieces}
        with contextlib.ExitStack() as held:
            try:
                kind = question["ask"]
                text, blocks = answers[kind](question, connection, held)
            except (*ERRORS.values(), KeyError, TypeError) as error:
                is_known = type(error).__name__ in ERRORS
                message = str(error) if is_known else f"got a wrong question: {one_line(error)}"
                kind = type(error).__name__ if is_known else "ValueError"
                connection.send({"error": [kind, message]})
            else:
                connection.send_text(text)
                if kind == "tree":
                    connection.wait_for_end()
                else:
                    connection.send_blocks(blocks)

    def _tree(self, question: Any, asker: Connection, held: contextlib.ExitStack) -> _Answer:
        """Keep the current version until the puller ends the connection; return its catalog."""
        assert self._catalog is not None  # in the first process, whose address pullers are given
        if question["name"] not in (None, self._name):
            raise LookupError(f"offers {self._name!r}, and not {question['name']!r:.80}")
        pulled = self._versions.pulled(int(question["least"]), _sooner(asker.deadline))
        return self._catalog(held.enter_context(pulled)), []

    def _pieces(self, question: Any, asker: Connection, held: object) -> _Answer:
        pieces, number = question["pieces"], int(question["version"])
        if (count := sum([len(numbers) for numbers, *_ in pieces])) > MOST_PIECES:
            raise ValueError(f"got {count} pieces; expected are at most {MOST_PIECES}")
        # A silent puller must not keep the blocks of a dropped version alive.
        tree, asker.is_stopped = self._versions.get(
            question["run"], number, _sooner(asker.deadline)
        )
        blocks = [block for each in pieces for block in tree.pieces(*each)]
        nbytes = sum(block.size * dtype.itemsize for block, dtype in blocks)
        return json.dumps({"nbytes": nbytes}).encode(), blocks


def _sooner(deadline: Deadline) -> Deadline:
    """Return an earlier deadline, which leaves time for an answer to arrive."""
    return Deadline(0.9 * deadline.left())
