"""The folder of one host: the local steps of a run.

A local step is a checkpoint whose files lie in the folders of several hosts. Each of these has the
manifest, which names the files of all hosts, and the start of the run that wrote it. No two saves
have the same name, so that files of different saves are never in one step.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from gda.checkpoint.format import manifest_json
from gda.checkpoint.format.manifest import Manifest, file_of
from gda.layout.text import join_some
from gda.storage.stores.checksums import CRC_BYTES
from gda.storage.stores.directory import FileStore

_NAME = re.compile(r"(\d+)\.(\d+)\.([0-9a-f]{16})")
_ID = "host.id"  # made once; the processes that read the same one are on one host
_RUN = "run-"


class StepName(NamedTuple):
    """The name of a local step: its number, the start that saved it, and the name of its data."""

    number: int
    generation: int
    data: str

    @classmethod
    def of(cls, text: str) -> Self | None:
        """Return the name in a text; ``None`` if it is no name of a local step."""
        found = _NAME.fullmatch(text)
        return cls(int(found[1]), int(found[2]), f"data-{found[3]}") if found else None

    def __str__(self) -> str:
        return f"{self.number:08d}.{self.generation}.{self.data.removeprefix('data-')}"


@dataclass(frozen=True)
class RunStart:
    """A start of a run, as the manifest of each local step has it.

    Attributes:
      run: the id of the run.
      generation: the number of this start.
      history: changes with each rollback.
      began: the step at which this start has resumed.
    """

    run: str
    generation: int
    history: str
    began: int = 0

    def about(self, number: int) -> dict[str, Any]:
        """Return the fields of the manifest of a step."""
        return {**self.__dict__, "step": number}


class FileOfStep(NamedTuple):
    """A file that a manifest names: its name, its size, and the CRC-32C of all but the tail."""

    name: str
    nbytes: int
    crc: int
    tail: int  # bytes of a checksum at its end


def files_of(manifest: Manifest) -> list[FileOfStep]:
    """Return the files with data, in the same order in all processes."""
    chunks = [
        FileOfStep(
            file_of(manifest.data, array, chunk),
            array.nbytes_of_file,
            array.crcs[chunk],
            CRC_BYTES,
        )
        for array in manifest.arrays
        for chunk in range(array.grid.num_chunks)
    ]
    return chunks + [
        FileOfStep(manifest.file_of(leaf, process), *leaf.files[process], 0)
        for leaf in manifest.per_process
        for process in range(len(leaf.files))
    ]


@dataclass(frozen=True)
class FoundStep:
    """A local step in the folder of a host, as the host tells it.

    Attributes:
      name: that of its folder.
      began: the step at which its start has resumed.
      num_files: of all hosts.
      here: the files that this host has, as ranges of their numbers: start and stop.
    """

    name: str
    began: int
    num_files: int
    here: list[list[int]]

    @property
    def place(self) -> StepName:
        name = StepName.of(self.name)
        assert name is not None
        return name


class HostFolder:
    """The folder of a host, with the local steps of one run, in one ``start`` of it."""

    def __init__(self, path: str, start: RunStart) -> None:
        self.top, self.start = path, start
        os.makedirs(path, exist_ok=True)
        self.id = _id_of(path)
        self.path = os.path.join(path, f"{_RUN}{start.run[:16]}")
        os.makedirs(self.path, exist_ok=True)

    def store(self, name: str) -> FileStore:
        """Return the place of a step. Nothing is synced: after a host is lost, others have it."""
        return FileStore(os.path.join(self.path, name), syncs=False)

    def look(self) -> tuple[list[FoundStep], list[str]]:
        """Return the complete steps of this run, and why other files here are not used."""
        found: list[FoundStep] = []
        others = runs_in(self.top)
        unused = [f"{path} is of another run" for path in others if path != self.path]
        for name, manifest, problem in manifests_in(self.path):
            where = os.path.join(self.path, str(name))
            if manifest is None:
                unused.append(f"{where} {problem}")
                continue
            about = manifest.about
            if about.get("history") != self.start.history or about.get("run") != self.start.run:
                unused.append(f"{where} is of a start before a rollback")
                continue
            files = files_of(manifest)
            here = present(self.store(str(name)), files)
            found.append(FoundStep(str(name), int(about.get("began", 0)), len(files), here))
        return found, unused

    def commit(self, name: str, file: bytes) -> None:
        """Write the manifest of a step, which makes it complete here."""
        with self.store(name).replacing(manifest_json.NAME, file, None):
            pass

    def keep_only(self, names: Iterable[str]) -> None:
        """Remove the steps of this start, and of those before, but some."""
        kept = {*names}
        for name in names_in(self.path):
            if str(name) not in kept and name.generation <= self.start.generation:
                self.remove(str(name))

    def remove(self, name: str) -> None:
        """Remove a step, the manifest first: what is left of it then is never used."""
        store = self.store(name)
        with contextlib.suppress(OSError):  # another process of this host removes it too
            store.remove(manifest_json.NAME)
            FileStore(self.path).remove(name)

    def room(self) -> int:
        """Return the bytes that local steps of this run may take: free ones, and their own."""
        free = os.statvfs(self.path)
        return free.f_bavail * free.f_frsize + nbytes_in(self.path)


def runs_in(path: str) -> list[str]:
    """Return the folders of runs in the folder of a host."""
    with contextlib.suppress(FileNotFoundError):
        names = sorted(os.listdir(path))
        return [os.path.join(path, name) for name in names if name.startswith(_RUN)]
    return []


def names_in(path: str) -> list[StepName]:
    """Return the names of the local steps in the folder of a run, complete or not."""
    return sorted(filter(None, map(StepName.of, os.listdir(path))))


def manifests_in(path: str) -> Iterator[tuple[StepName, Manifest | None, str]]:
    """Yield the local steps in the folder of a run; one without a manifest with its problem."""
    for name in names_in(path):
        try:
            store = FileStore(os.path.join(path, str(name)))
            yield name, manifest_json.load_manifest(store), ""
        except FileNotFoundError:
            yield name, None, "is not complete, or half removed"
        except (OSError, ValueError) as error:
            yield name, None, f"is damaged: {error}"


def present(store: FileStore, files: Iterable[FileOfStep]) -> list[list[int]]:
    """Return the numbers of the files that are in a store with their sizes, as ranges."""

    def numbers() -> Iterator[int]:
        for number, file in enumerate(files):
            with contextlib.suppress(OSError, ValueError):
                if store.size(file.name) == file.nbytes:
                    yield number

    return ranges_of(numbers())


def nbytes_in(path: str) -> int:
    """Return the bytes of the files in a folder, behind links too; one that vanishes is nothing."""
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, file)).st_size
    return total


def ranges_of(numbers: Iterable[int]) -> list[list[int]]:
    """Return ascending numbers as ranges of start and stop.

    >>> ranges_of([0, 1, 2, 5])
    [[0, 3], [5, 6]]
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def _id_of(path: str) -> str:
    """Return the id of a folder, which its first process makes."""
    place = os.path.join(path, _ID)
    beside = f"{place}.{uuid.uuid4().hex}"
    with open(beside, "w") as file:
        file.write(uuid.uuid4().hex)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(beside, place)
    finally:
        os.unlink(beside)
    with open(place) as file:
        return file.read()


# The steps that the hosts have together.


class WholeStep(NamedTuple):
    """A local step of which every file is on a host that is there."""

    name: StepName
    holders: dict[int, list[list[int]]]  # the files of each host, as ranges

    @property
    def place(self) -> str:
        """The step, for messages."""
        return f"the local step {self.name}"


def whole_steps(
    found: dict[int, list[FoundStep]], least: int = 0
) -> tuple[list[WholeStep], list[str]]:
    """Return the steps that hosts have together, the newest first, and why others are not used.

    A later start may have gone another way: a step above the one at which it resumed, of a start
    before, is not used; nor is any of a start before ``least``.
    """
    every: dict[StepName, dict[int, FoundStep]] = {}
    for host, steps in found.items():
        for step in steps:
            every.setdefault(step.place, {})[host] = step
    began = {name.generation: next(iter(at.values())).began for name, at in every.items()}
    whole: list[WholeStep] = []
    unused: list[str] = []
    for name, at in sorted(every.items(), key=lambda each: each[0][:2], reverse=True):
        later = [each for each, first in began.items() if first < name.number]
        if later := [each for each in (*later, least) if each > name.generation]:
            unused.append(
                f"{name} is of start {name.generation}, and start {max(later)} has gone another way"
            )
            continue
        holders = {host: step.here for host, step in at.items()}
        missing = _missing(holders.values(), next(iter(at.values())).num_files)
        if missing:
            ranges = [f"{start} to {stop - 1}" for start, stop in missing]
            unused.append(f"{name} lacks its files {join_some(ranges)}, which no host has")
        else:
            whole.append(WholeStep(name, holders))
    return whole, unused


def _missing(parts: Iterable[list[list[int]]], count: int) -> list[list[int]]:
    """Return the numbers below ``count`` in none of the ranges, as ranges."""
    missing, end = [], 0
    for start, stop in [*sorted(each for part in parts for each in part), [count, count]]:
        if start > end:
            missing.append([end, start])
        end = max(end, stop)
    return missing


def partners_of(host: int, num_hosts: int, copies: int) -> list[int]:
    """Return the hosts that get the copies of one: as far from it, and from each other, as can be.

    >>> partners_of(1, 8, 1), partners_of(6, 8, 1), partners_of(0, 9, 2)
    ([5], [2], [3, 6])
    """
    copies = min(copies, num_hosts - 1)
    return [(host + each * num_hosts // (copies + 1)) % num_hosts for each in range(1, copies + 1)]
