"""The save of a local step: each host writes the blocks that its devices hold.

A block that only one host holds is also sent to another one. So a lost host loses nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from gda.arrays.fingerprints.on_devices import PendingSums
from gda.checkpoint.format import manifest_json
from gda.checkpoint.format.manifest import ChunkGrid, Manifest
from gda.checkpoint.local_steps.files_of_hosts import Host, fetch_manifest, send_copies
from gda.checkpoint.local_steps.host_folder import HostFolder, StepName, partners_of
from gda.checkpoint.saving import Begun, Claim, Save, Taken, new_data
from gda.checkpoint.writing.writer import Share, Writer, is_packed
from gda.layout.cover import writing_of_grid
from gda.layout.processes import Writing
from gda.storage.options import Options
from gda.storage.stores.errors import SaveError
from gda.trees.records.saved_leaves import (
    Block,
    Given,
    GivenLeaf,
    SavedLeaf,
    SavedPerProcess,
    with_blocks,
)
from gda.trees.written_blocks import written_arrays


@dataclass(frozen=True)
class HostsOfRun:
    """The hosts of a start of a run.

    Attributes:
      folder: that of this host.
      host_of: the number of the host of each process.
      servers: those of the hosts, by number.
      copies: the hosts that get a block beside one that holds it, at least.
    """

    folder: HostFolder
    host_of: Sequence[int]
    servers: Sequence[Host]
    copies: int

    @property
    def here(self) -> int:
        return self.host_of[jax.process_index()]

    @property
    def is_first(self) -> bool:
        """True in the first process of a host, which does what is done once."""
        return self.host_of.index(self.here) == jax.process_index()

    def held_by(self, leaf: SavedLeaf, block: int) -> set[int]:
        """Return the hosts that write a block of a leaf."""
        if (writing := _writing_of(leaf)) is None:
            return {self.here}
        return {self.host_of[p] for p in writing.by_block[block]}

    def targets(self, holding: set[int]) -> list[int]:
        """Return the hosts to which this one sends a block that some hosts write."""
        count = len(self.servers)
        partners = [*partners_of(self.here, count, self.copies), *range(count)]
        others = [host for host in dict.fromkeys(partners) if host not in holding]
        return others[: max(self.copies + 1 - len(holding), 0)]

    def also_written(self, given: Sequence[Given]) -> list[SavedLeaf]:
        """Return leaves with the blocks that another host writes too, and this process here."""
        arrays = [each for each in given if isinstance(each, GivenLeaf)]
        written = written_arrays(
            [each.array for each in arrays], [each.grid for each in arrays], are_copies=True
        )
        turns = {id(each): one.turn for each, one in zip(arrays, written, strict=True)}
        return [
            leaf._replace(blocks=blocks)
            for each, leaf in zip(given, with_blocks(given, are_held=True), strict=True)
            if isinstance(each, GivenLeaf) and isinstance(leaf, SavedLeaf)
            if (blocks := tuple(self._also(leaf, turns[id(each)])))
        ]

    def _also(self, leaf: SavedLeaf, turn: int) -> Iterator[Block]:
        if (writing := _writing_of(leaf)) is None:
            return
        numbers = np.array([block.number for block in leaf.blocks], np.int64)
        for block, writer in zip(leaf.blocks, writing.writers(numbers, turn), strict=True):
            if self.host_of[writer] != self.here:
                here = [p for p in writing.by_block[block.number] if self.host_of[p] == self.here]
                if here[0] == jax.process_index():
                    yield block

    def nbytes_of(self, given: Sequence[Given]) -> tuple[int, dict[int, int]]:
        """Return the bytes that this process writes here, and those that it sends, by host."""
        sent: dict[int, int] = {}
        own = sum(leaf.written_bytes for leaf in self.also_written(given))
        for leaf in with_blocks(given):
            if isinstance(leaf, SavedPerProcess):
                parts = [({self.here}, len(leaf.data))]
            elif isinstance(leaf, SavedLeaf):
                size = leaf.record.dtype.itemsize
                parts = [(self.held_by(leaf, b.number), b.data.size * size) for b in leaf.blocks]
            else:
                continue
            for holding, nbytes in parts:
                own += nbytes
                for host in self.targets(holding):
                    sent[host] = sent.get(host, 0) + nbytes
        return own, sent


def _writing_of(leaf: SavedLeaf) -> Writing | None:
    """Return the writers of the blocks of a leaf; ``None`` if no other host may have them."""
    grid = leaf.grid
    if grid is None or grid.processes is None or leaf.own is not None or is_packed(leaf.record):
        return None
    return writing_of_grid(grid, grid.processes)


class LocalSave(Save):
    """The save of a step into the folders of all hosts.

    It is complete when each host has its files, the copies for others, and the manifest. Only then
    does each host remove older steps.
    """

    is_shared = False

    def __init__(
        self,
        hosts: HostsOfRun,
        number: int,
        names: list[str],
        keep: int,
        options: Options,
        timeout: float,
        before_commit: Callable[[], None],
    ) -> None:
        name = f"gda.checkpoint.Run.save of step {number} on local disks"
        super().__init__(name, hosts.folder.path, {"step": number}, options, timeout, before_commit)
        self._hosts, self._number = hosts, number
        self._names, self._keep = names, keep
        self._also = Share(())
        self._crcs: dict[str, list[tuple[int, int]]] = {}  # of what other hosts write too

    def _claimed(self, looks: bool) -> Claim:
        return Claim(new_data())

    def take(self, begun: Begun, keeps: bool = False) -> Taken:
        """Take the values of the blocks that this process writes, also those of other hosts."""
        generation = self._hosts.folder.start.generation
        self._step = StepName(self._number, generation, begun.claim.data)
        self.store = self._local = self._hosts.folder.store(str(self._step))
        self._held.push(partial(self._undo, begun.claim.data))
        return super().take(begun, keeps)

    def _take(self, begun: Begun, keeps: bool) -> tuple[Share, dict[str, Any]]:
        share, told = super()._take(begun, keeps)
        leaves = self._hosts.also_written(begun.given)
        # The sums of their blocks come from the processes that write these for all.
        self._also = Share(leaves, {leaf.number: PendingSums() for leaf in leaves})
        self._also = self._also.kept() if keeps else self._also
        return share, told

    def _writer(self, claim: Claim) -> Writer:
        return replace(super()._writer(claim), writes_metadata=False)

    def _written(self, writer: Writer, share: Share) -> dict[str, Any]:
        os.makedirs(self._local.url, exist_ok=True)
        written = super()._written(writer, share)
        also = writer.write(self._also)["arrays"]
        self._crcs = {writer.array_of(leaf).name: also[leaf.number] for leaf in self._also.large}
        names: dict[int, list[str]] = {}
        for holding, name in self._files(writer, share, written):
            for host in self._hosts.targets(holding):
                names.setdefault(host, []).append(name)
        for host, some in names.items():
            server = self._hosts.servers[host]
            send_copies(server, str(self._step), some, self._local, self._timeout)
        return written

    def _files(
        self, writer: Writer, share: Share, written: dict[str, Any]
    ) -> Iterator[tuple[set[int], str]]:
        """Yield the files that this process has written for all, with the hosts that have them."""
        here = {self._hosts.here}
        for name, shape, chunk_shape, _, chunks in written["packs"]:
            grid = ChunkGrid(tuple(shape), tuple(chunk_shape))
            for chunk, _ in chunks:
                yield here, f"{writer.data}/{name}/{grid.key(chunk)}"
        for number, leaf in enumerate(share.leaves):
            if isinstance(leaf, SavedPerProcess):
                yield here, writer.name_of_value(number, leaf)
        for leaf in share.large:
            array = writer.array_of(leaf)
            for block in leaf.blocks:
                holding = self._hosts.held_by(leaf, block.number)
                for overlap in array.grid.overlaps(block.start, block.data.shape):
                    yield holding, writer.name(array, overlap.chunk)

    def _replace_manifest(self, claim: Claim, manifest: Manifest, writer: Writer) -> None:
        """Write the manifest where each host reads it."""
        about = {**manifest.about, **self._hosts.folder.start.about(self._number)}
        file = manifest_json.dump(replace(manifest, about=about))
        self.store.write(f"{claim.data}/{manifest_json.NAME}", file)

    def _complete(self, claim: Claim) -> None:
        """Complete the step on each host; then remove older ones."""
        self._together("completing", partial(self._commit_here, claim), lambda _: None)
        self._names.append(str(self._step))
        del self._names[: -self._keep]
        if self._hosts.is_first:
            self._hosts.folder.keep_only(self._names)

    def _commit_here(self, claim: Claim) -> None:
        name = f"{claim.data}/{manifest_json.NAME}"
        if self._hosts.here == self._hosts.host_of[0]:
            file = self.store.read(name, manifest_json.MOST_BYTES)
        else:
            folder = f"{self._step}/{claim.data}"
            file = fetch_manifest(self._hosts.servers[0], folder, self._timeout)
        manifest = manifest_json.load(file, self.store.join(name))
        arrays = {array.name: array for array in manifest.arrays}
        for of_array, chunks in self._crcs.items():
            for chunk, crc in chunks:
                if arrays[of_array].crcs[chunk] != crc:
                    key = arrays[of_array].grid.key(chunk)
                    raise SaveError(
                        f"replicas differ: chunk {key} of {of_array} is not the same on host "
                        f"{self._hosts.here} as where it is written for all; "
                        "gda.check_replicas_agree names the devices"
                    )
        if self._hosts.is_first:
            self._may_be_committed = True
            self._hosts.folder.commit(str(self._step), file)

    def _undo(self, data: str, _: object, error: BaseException | None, __: object) -> None:
        """Remove what this host has of a step that failed, unless it may be complete elsewhere."""
        if error is not None and not self._may_be_committed:
            self._hosts.folder.remove(str(self._step))
