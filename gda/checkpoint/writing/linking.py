"""Links to the files of another checkpoint, the base, for arrays that have not changed.

All processes decide alike, by the fingerprints of whole arrays. A block that cannot be linked is
written by its process alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from gda.arrays.fingerprints.formula import digest_of
from gda.checkpoint.format import manifest_json
from gda.checkpoint.format.manifest import Manifest, StoredArray, file_of
from gda.checkpoint.writing.writer import Share, Writer, Written
from gda.storage import tasks
from gda.storage.stores.directory import FileStore
from gda.trees.records.recorded_tree import ArrayLeaf, Path, saved_type
from gda.trees.records.saved_leaves import Block, SavedLeaf

_COMPARED_BYTES = 4096  # of a file


@dataclass(frozen=True)
class Links:
    """The links from a base to a new checkpoint; its methods are its steps in their order."""

    writer: Writer
    store: FileStore  # of the writer
    base_store: FileStore
    base: Manifest

    @cached_property
    def _there(self) -> dict[Path, tuple[ArrayLeaf, StoredArray]]:
        return {
            leaf.path: (leaf, self.base.arrays[leaf.array])
            for leaf in self.base.array_leaves
            if leaf.array is not None
        }

    def compared(self, share: Share) -> tuple[Share, dict[str, Any]]:
        """Wait for the sums of the arrays that may be those of the base.

        An array that begins with other bytes differs. So if all arrays changed, a save on CPU does
        not wait for their sums, and is not slower than without a base.

        Returns:
          the share with these sums, and the part of this process for ``unchanged``, as JSON.
        """
        begun = {
            leaf.number: share.sums.get(leaf.number) or leaf.begin_sums()
            for leaf in share.large
            if self._may_be_same(leaf)
        }
        sums = {number: each.result().tolist() for number, each in begun.items()}
        return replace(share, sums={**share.sums, **begun}), {"base": self.base.data, "sums": sums}

    def unchanged(self, share: Share, parts: Sequence[dict[str, Any]]) -> list[int]:
        """Return the numbers of the arrays that equal the base, from the parts of all processes."""
        # Another save replaces it just now, or one process cannot read it.
        if len({part["base"] for part in parts}) > 1:
            return []
        return [
            leaf.number
            for leaf in share.large
            if all(str(leaf.number) in part["sums"] for part in parts)
            and self._there[leaf.record.path][0].fingerprint
            == digest_of(
                *saved_type(leaf.record), [part["sums"][str(leaf.number)] for part in parts]
            )
        ]

    def linked(self, share: Share, unchanged: Collection[int]) -> Share:
        """Link the blocks of some arrays; return a share without those that are linked."""
        linked: dict[tuple[int, int], list[Written]] = {}

        def finish(leaf: SavedLeaf, block: Block, files: list[Written]) -> None:
            linked[leaf.number, block.number] = files

        blocks = [
            (leaf, block)
            for leaf in share.large
            if leaf.number in unchanged
            for block in leaf.blocks
        ]
        each = (
            tasks.Task(0, functools.partial(self._link, *of), functools.partial(finish, *of))
            for of in blocks
        )
        tasks.run(each, self.writer.options)

        def rest(leaf: SavedLeaf) -> SavedLeaf:
            left = [each for each in leaf.blocks if not linked.get((leaf.number, each.number))]
            return leaf._replace(blocks=tuple(left))

        leaves = [rest(each) if isinstance(each, SavedLeaf) else each for each in share.leaves]
        return replace(share, leaves=leaves, linked=[*itertools.chain(*linked.values())])

    def _may_be_same(self, leaf: SavedLeaf) -> bool:
        """Return False if this process knows that an array differs from the base."""
        there = self._there.get(leaf.record.path)
        if there is None or leaf.is_source:
            return False
        new, old = self.writer.array_of(leaf), there[1]
        if new != replace(old, name=new.name, crcs=()):
            return False
        return not any(self._begins_differently(block, old) for block in leaf.blocks[:1])

    def _begins_differently(self, block: Block, old: StoredArray) -> bool:
        """Return True if the first bytes of a block on the host are not those of its file."""
        overlap = next(old.grid.overlaps(block.start, block.data.shape), None)
        if not isinstance(block.data, np.ndarray) or overlap is None or not overlap.is_whole:
            return False
        count = _COMPARED_BYTES // old.dtype.itemsize
        first = block.data[overlap.in_block].flat[:count].tobytes()
        try:
            name = file_of(self.base.data, old, overlap.chunk)
            return self.base_store.head(name, len(first)) != first
        except (OSError, ValueError):
            return True

    def _link(self, leaf: SavedLeaf, block: Block) -> list[Written]:
        new, old = self.writer.array_of(leaf), self._there[leaf.record.path][1]
        made: list[Written] = []
        for overlap in old.grid.overlaps(block.start, block.data.shape):
            chunk = overlap.chunk
            nbytes = old.nbytes_of_file
            source = file_of(self.base.data, old, chunk)
            name = self.writer.name(new, chunk)
            if not self.store.link(name, self.base_store, source, nbytes, manifest_json.NAME):
                for each in made:
                    self.store.remove(self.writer.name(new, each.number))
                return []
            made.append(Written(new.name, chunk, old.crcs[chunk], old.nbytes_per_chunk, {}))
        return made
