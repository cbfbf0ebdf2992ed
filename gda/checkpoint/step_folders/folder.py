"""The folder of a run: the names of its steps, their listing, and the small files in it.

A step is a checkpoint in a folder whose name is its number. Nothing here communicates: one process
calls it, and tells the others. Each small file has a checksum, because it decides what is removed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple

from gda.checkpoint.format import manifest_json
from gda.checkpoint.step_folders.rules import best_first
from gda.layout.text import format_numbers
from gda.storage.orbax_runs.run_folder import COMMITTED, MARKS, PARTIAL, STEP
from gda.storage.stores.checksums import size_and_crc
from gda.storage.stores.directory import LOCK, FileStore
from gda.storage.stores.errors import CheckpointNotFoundError, CorruptionError, SaveError
from gda.storage.stores.opening import Store, has, open_store
from gda.trees.files.step_names import REFERENCE, RUN, has_marks

# Small files of a step. The first exists while it is saved, and in an object store while it is
# removed; the second has the run and the generation that began it.
UNFINISHED, BEGUN, METRICS = "unfinished", "begun.json", "metrics.json"
_HELD, _DAMAGED = "held.json", "damaged.json"

_REMOVED = re.compile(r"\d+\.removed-[0-9a-f]{32}")  # the folder of a step, under another name
_ASIDE = re.compile(r"\d+\.damaged-\d+")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_MOST_BYTES = 2**20  # of a small file
_LARGE = 2**40  # more than a manifest has
_CRC = "crc32c"  # of the other fields of a small file
_BUSY_SECONDS = 10.0  # that another program may take for a small file
_MOST_ROLLBACKS = 100  # that run.json remembers
_MOST_ATTEMPTS = 100
_WITHOUT = {  # the effect of the removal of a small file
    RUN: "a rollback that was begun is forgotten",
    METRICS: "record the metrics again",
}

Rollbacks = tuple[tuple[int, int, str], ...]


class TakenOverError(SaveError):
    """Another program writes into the folder of a run now."""


@dataclass(frozen=True)
class Owner:
    """The program that may write into the folder of a run, as ``run.json`` has it.

    Attributes:
      run: an id of the run, the same for all programs that go on with it.
      generation: counts these programs.
      program: an id of this program.
      since, where: when it began, and its machine and process, for people.
      ends: the last step that counts, while a rollback removes the later ones.
      rolled_back: the rollbacks that were done: the step, the newest step before, and its identity.
      best: the metric by which steps are kept, and True if the highest is best.
      steps: the folders of complete steps, so that an object store need not list their data.
    """

    run: str
    generation: int
    program: str
    since: str
    where: str
    ends: int | None = None
    best: tuple[str, bool] | None = None
    rolled_back: Rollbacks = ()
    steps: tuple[str, ...] = ()

    @classmethod
    def next_after(cls, before: Owner | None, best: tuple[str, bool] | None) -> Owner:
        """Return the owner that this program becomes."""
        former = before or cls(uuid.uuid4().hex, 0, "", "", "")
        return replace(
            former,
            generation=former.generation + 1,
            program=uuid.uuid4().hex,
            since=_now(),
            where=f"{socket.gethostname()}, process id {os.getpid()}",
            best=best or former.best,
        )


class StepFolder(NamedTuple):
    """A folder whose name is a number, and the names in it."""

    name: str
    files: frozenset[str]

    @property
    def is_of_orbax(self) -> bool:
        # Older releases have no mark beside the folder of the tree.
        return not self.files.isdisjoint({*MARKS, "default"})

    @property
    def is_complete(self) -> bool:
        return manifest_json.NAME in self.files and _DAMAGED not in self.files

    @property
    def is_begun(self) -> bool:
        """True if a Run began it, which may remove it too."""
        return BEGUN in self.files

    @property
    def is_without_manifest(self) -> bool:
        """True for files of a step without its manifest, unless it was set aside."""
        is_of_gda = self.is_begun or any(map(manifest_json.DATA_PATTERN.fullmatch, self.files))
        return is_of_gda and self.files.isdisjoint({manifest_json.NAME, _DAMAGED})

    @property
    def is_nothing(self) -> bool:
        """True if all that is there has no meaning without a manifest and data."""
        return self.files <= {UNFINISHED, BEGUN, METRICS, _HELD, LOCK}

    @property
    def is_set_aside(self) -> bool:
        return _DAMAGED in self.files

    @property
    def is_held(self) -> bool:
        return _HELD in self.files


def checked_step(step: Any) -> int:
    """Return a step as an int; ``TypeError`` or ``ValueError`` if it is none."""
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)
    except TypeError:
        raise TypeError(
            f"a step must be a whole number, such as 100, not {step!r}; pass int(step)"
        ) from None
    if number < 0:
        raise ValueError(f"a step must be a whole number from 0 on, not {number}")
    return number


def name_of(step: int) -> str:
    """Return the name of the folder of a new step, which sorts as text up to 99,999,999."""
    return f"{step:08d}"


def anchored(path: Any) -> Any:
    """Return a path that stays valid when the program changes its directory."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str) or _URL.match(path) or not path:
        return path
    return os.path.abspath(os.path.expanduser(path))


def below(path: Any, name: str) -> Any:
    """Return the path of a folder in an anchored path, which may be of any kind of place."""
    if isinstance(path, dict):
        before = path.get("path", "")
        return {**path, "path": f"{before.rstrip('/')}/{name}/" if before else f"{name}/"}
    if isinstance(path, str):
        return f"{path.rstrip('/')}/{name}"
    return path / f"{name}/"  # a key-value store of TensorStore


class RunFolder:
    """The folder of a run, which need not exist."""

    def __init__(self, path: Any, timeout: float) -> None:
        self.path, self.timeout = anchored(path), timeout
        self.url = self.store().url.rstrip("/")
        self.known: set[str] = set()  # the folders of steps that were complete

    def store(self) -> Store:
        # Anew: a store of a directory takes one that it knows, and that was removed, for an error.
        return open_store(self.path, self.timeout)

    # Steps.

    def listed(self, numbers: Collection[int] | None = None) -> dict[int, StepFolder]:
        """Return the folders of steps, complete or not, by ascending number: all, or some.

        Raises ``ValueError`` if two of them are complete and have the same number.
        """
        found: dict[int, StepFolder] = {}
        before = {*self.known}  # other threads add to it
        for name, files in self.store().numbered(before, numbers).items():
            folder, number = StepFolder(name, frozenset(files)), int(name)
            other = found.get(number, folder)
            if other is not folder and other.is_complete and folder.is_complete:
                raise ValueError(
                    f"{self.url} has step {number} twice, as {other.name} and {name}; move one of "
                    "them elsewhere"
                )
            found[number] = max(other, folder, key=lambda each: (each.is_complete, each.is_begun))
        complete = {each.name for each in found.values() if each.is_complete}
        self.known.update(complete)
        if numbers is None:
            self.known.difference_update(before - complete)
        return dict(sorted(found.items()))

    def complete(self) -> dict[int, StepFolder]:
        """Return the complete steps that no rollback is removing."""
        owner, listed = self.owner(), self.listed()
        ends = None if owner is None else owner.ends
        return {
            number: folder
            for number, folder in listed.items()
            if folder.is_complete and (ends is None or number <= ends)
        }

    def newest_of_orbax(self) -> dict[int, str]:
        """Return number and name of the newest complete step of Orbax's, with any prefix."""
        return dict(itertools.islice(self.of_orbax(), 1))

    def of_orbax(self) -> Iterator[tuple[int, str]]:
        """Yield number and name of the complete steps of Orbax's, with any prefix, newest first."""
        store = self.store()
        ours = {each.name for each in self.listed().values() if each.is_complete}
        rest = [name for name in self._names() if name not in ours and PARTIAL not in name]
        steps = [(int(found[2]), found[0]) for found in map(STEP.fullmatch, rest) if found]
        for number, name in sorted(steps, reverse=True):
            # A step of gda's that is being removed may be gone by now.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                step = StepFolder(name, frozenset(store.entries(name)))
                is_whole = COMMITTED in step.files or not store.is_remote
                if not name.isdecimal() and step.files.isdisjoint(MARKS):
                    # The user's, such as data_2024, if the tree is not there either.
                    step = StepFolder(name, frozenset(store.entries(f"{name}/default")))
                if is_whole and step.is_of_orbax:
                    yield number, name

    def aside(self) -> list[str]:
        """Return the names of the damaged steps that were set aside."""
        marked = [each.name for each in self.listed().values() if each.is_set_aside]
        return sorted([*marked, *filter(_ASIDE.fullmatch, self._names())])

    def _names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self.store().entries(known=self.known)
        return []

    def step(self, number: int) -> StepFolder:
        """Return a complete step; ``CheckpointNotFoundError`` if there is none of this number."""
        steps = self.complete()
        if number not in steps:
            known = sorted({*steps, *(each for each, _ in self.of_orbax())})
            has = f"the steps {format_numbers(known)}" if known else "no complete step"
            raise CheckpointNotFoundError(f"{self.url} has no step {number}; it has {has}")
        return steps[number]

    def identity(self, name: str) -> str:
        """Return a text that no other save of a step has."""
        # The first line of a manifest has the checksum of the rest, with a random name in it.
        return sha256(self.store().head(f"{name}/{manifest_json.NAME}", 200)).hexdigest()[:16]

    def retire(self, name: str, mine: Owner) -> str | None:
        """Take an old step out of the listing, as ``take_out``; return ``None`` if it is held."""
        with self._locked() as store:
            self.check_owner(mine)
            self.fields(f"{name}/{BEGUN}")  # or raise: a damaged one may be of another run
            if has(store, f"{name}/{_HELD}"):
                return None
            place = f"{name}/{manifest_json.NAME}"
            manifest = store.read(place, _LARGE) if store.is_remote else b""
            rest = self.take_out(name)
            if store.is_remote and has(store, f"{name}/{_HELD}"):  # without a lock: meanwhile
                store.write(place, manifest)
                store.remove(f"{name}/{UNFINISHED}")
                return None
        return rest

    def take_out(self, name: str) -> str:
        """Take a step out of the listing, by a rename or a mark; return the name of its rest."""
        store = self.store()
        self.known.discard(name)
        if isinstance(store, FileStore):
            rest = f"{name}.removed-{uuid.uuid4().hex}"
            store.rename(name, rest)
            return rest
        store.write(f"{name}/{UNFINISHED}", b"")
        store.remove(f"{name}/{manifest_json.NAME}")
        return name

    def taken_out(self) -> list[str]:
        """Return the directories that were taken out, and are still there."""
        return [] if self.store().is_remote else [*filter(_REMOVED.fullmatch, self._names())]

    def remove_rest(self, name: str, mine: Owner | None = None) -> None:
        """Remove the rest that ``take_out`` has left, if this program is still the owner."""
        store = self.store()
        # Listed first, because another program may take over, and save the step again.
        names = {*store.entries(name)} - {UNFINISHED} if store.is_remote else ()
        if mine is not None:
            self.check_owner(mine)
        for each in sorted(names, reverse=True):  # the marks of a step that is not finished go last
            store.remove(f"{name}/{each}")
        store.remove(f"{name}/{UNFINISHED}" if store.is_remote else name)

    def set_aside(self, name: str, reason: str) -> str:
        """Take a damaged step out of the listing; return its place."""
        store = self.store()
        if not isinstance(store, FileStore):  # no folder can be renamed there
            store.replace(f"{name}/{_DAMAGED}", json.dumps({"reason": reason}).encode())
            return store.join(name)
        number = 1
        while os.path.lexists(place := store.join(aside := f"{name}.damaged-{number}")):
            number += 1
        try:
            store.rename(name, aside)
        except FileNotFoundError:
            return f"{place}, which is empty because it was removed meanwhile"
        return place

    def hold(self, number: int) -> None:
        """Keep a complete step, whatever the rules say."""
        self.step(number)  # raises, before the lock makes a folder
        with self._locked() as store:
            store.replace(f"{self.step(number).name}/{_HELD}", _sealed({"since": _now()}))
            self.step(number)  # raises if a store without locks has removed it meanwhile

    # Metrics.

    def metrics(self, name: str) -> dict[str, float]:
        """Return the metrics of a step; ``CorruptionError`` if they are damaged."""
        return self.fields(f"{name}/{METRICS}").get("metrics", {})

    def set_metrics(self, name: str, metrics: Mapping[str, float]) -> None:
        self.store().replace(f"{name}/{METRICS}", _sealed({"metrics": metrics}))

    def record(self, number: int, metrics: Mapping[str, float]) -> None:
        """Add metrics of a complete step to those that it has."""
        name = self.step(number).name  # raises, before the lock makes a folder

        def merged() -> dict[str, Any]:
            self.step(number)  # raises if it was removed meanwhile
            return {"metrics": {**self.metrics(name), **metrics}}

        self._update(f"{name}/{METRICS}", merged)

    def best_first(self, metric: str, is_highest: bool) -> list[int]:
        """Return the complete steps that have a metric, from the best to the worst."""
        values = {
            number: metrics[metric]
            for number, folder in self.complete().items()
            if METRICS in folder.files and metric in (metrics := self.metrics(folder.name))
        }
        return best_first(values, is_highest=is_highest)

    # The owner.

    def owner(self) -> Owner | None:
        """Return the program that may write here; ``None`` if there was none."""
        if not (fields := self.fields(RUN)):
            return None
        try:
            owner = Owner(**{name: _tuples(value) for name, value in fields.items()})
        except TypeError:
            where = self.store().join(RUN)
            raise CorruptionError(f"{where} is not the file of a run; remove it") from None
        if not self.known:
            self.known.update(owner.steps)
        return owner

    def claim(self, best: tuple[str, bool] | None) -> Owner:
        """Make this program the owner; without locks, of two at once one raises ``SaveError``."""
        with self._locked() as store:
            version = store.version(RUN)
            mine = Owner.next_after(self.owner(), best)
            if not store.is_remote:
                for name in store.entries():
                    if name.startswith(f"{RUN}."):  # of a program that was killed as it wrote it
                        store.remove(name)
            store.replace(RUN, _sealed(asdict(mine)), version)
            store.flush()  # the entry of a new folder
        return mine

    def check_owner(self, mine: Owner) -> Owner:
        """Return the owner as it is written; ``TakenOverError`` if it is another program."""
        now = self.owner()
        if now is None or now.program != mine.program:
            by = "was removed" if now is None else f"is of {now.where}, since {now.since}"
            raise TakenOverError(
                f"another program took over {self.url}: its run.json {by}. This one may no longer "
                "save or remove anything there; end one of the two"
            )
        return now

    def set_ends(self, mine: Owner, ends: int | None, done: Rollbacks = ()) -> None:
        """Let the run end at a step, or no longer, and note rollbacks."""

        def change(now: Owner) -> Owner:
            pairs = {each[:2]: each for each in (*now.rolled_back, *done)}
            noted = tuple(pairs.values())[-_MOST_ROLLBACKS:]
            return replace(now, ends=ends, rolled_back=noted)

        self._change(mine, change)

    def _change(self, mine: Owner, change: Callable[[Owner], Owner] = lambda now: now) -> None:
        """Change the file of the owner, unless this program is no longer it."""
        self._update(
            RUN,
            lambda: asdict(
                replace(change(self.check_owner(mine)), steps=tuple(sorted(self.known)))
            ),
        )

    def begin(self, name: str, mine: Owner) -> None:
        """Write the first files of a step."""
        begun = {"run": mine.run, "generation": mine.generation}
        store = self.store()
        try:
            store.write(f"{name}/{UNFINISHED}", b"")
            store.write(f"{name}/{BEGUN}", _sealed(begun))
            store.flush()
        except OSError:  # without these files, no run would remove the folder
            with contextlib.suppress(OSError):
                store.remove(name)
            raise

    def finish(self, name: str, mine: Owner) -> None:
        """Note that a step is complete: without its manifest, it has lost it from now on."""
        store = self.store()
        store.remove(f"{name}/{UNFINISHED}")
        self.known.add(name)
        if store.is_remote:
            self._change(mine)

    def is_left_over(self, folder: StepFolder, mine: Owner) -> bool:
        """Return True for the rest of a save or a removal that this run did not finish.

        Other folders without a manifest stay: it may be lost, or the folder an incomplete copy.
        """
        if manifest_json.NAME in folder.files or UNFINISHED not in folder.files:
            return False
        # By its name, because the list of a network file system may be an old one.
        store = self.store()
        if not store.is_remote and not has(store, f"{folder.name}/{UNFINISHED}"):
            return False
        try:
            begun = self.fields(f"{folder.name}/{BEGUN}") if folder.is_begun else {}
        except CorruptionError:  # it was being written
            begun = {}
        is_mine = begun.get("run") == mine.run and begun.get("generation", 0) <= mine.generation
        return is_mine or folder.files <= {UNFINISHED, BEGUN}

    def _update(self, name: str, changed: Callable[[], dict[str, Any]]) -> None:
        """Replace the fields of a small file by those of ``changed()``."""
        for attempt in itertools.count():
            with self._locked() as store:
                version = store.version(name)
                fields = changed()
                try:
                    store.replace(name, _sealed(fields), version)
                    break
                except SaveError:  # another program was faster, on a store without locks
                    if attempt == _MOST_ATTEMPTS:
                        raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Store]:
        """Give the store, with its small files for this program alone if it has locks."""
        limit = time.monotonic() + _BUSY_SECONDS
        with contextlib.ExitStack() as stack:
            while True:
                store = self.store()
                try:
                    stack.enter_context(store.lock())
                    break
                except SaveError:  # another program is at it, for a moment
                    if time.monotonic() > limit:
                        raise
                    time.sleep(0.01)
            yield store

    def fields(self, name: str) -> dict[str, Any]:
        """Return the fields of a small file, empty without one; ``CorruptionError`` if damaged."""
        store = self.store()
        try:
            fields = json.loads(store.read(name, _MOST_BYTES))
            if fields.pop(_CRC) == _crc(fields):
                return fields
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        raise CorruptionError(
            f"{store.join(name)} is damaged: it does not fit its checksum, so nothing is removed "
            f"because of it. Copy it from a backup; or remove it, and then "
            f"{_WITHOUT.get(name.rpartition('/')[2], 'its folder is not of this run')}"
        )


def _tuples(value: Any) -> Any:
    """Return a value of JSON with tuples in place of lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _sealed(fields: Mapping[str, Any]) -> bytes:
    """Return the content of a small file: JSON, with a checksum."""
    return json.dumps({_CRC: _crc(fields), **fields}).encode()


def _crc(fields: Mapping[str, Any]) -> str:
    return f"{size_and_crc(json.dumps(fields, sort_keys=True).encode())[1]:08x}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# The step that a path such as runs/a@latest names.


def path_of(path: Any, timeout: float) -> Any:
    """Return the path of the step that ``path`` names with ``@``; any other path as it is.

    A step of Orbax's in the folder counts too, except for ``@best``.

    Raises:
      CheckpointNotFoundError: the run has no such step.
      ValueError: ``@best``, and the run has no rule for the best.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    found = REFERENCE.fullmatch(text) if isinstance(text, str) else None
    if found is None or _is_there(open_store(text, timeout)):  # the name of a file may have an @
        return path
    folder, which = RunFolder(found[1], timeout), found[2]
    if which == "best":
        step = _best(folder)
    else:
        ours = {number: each.name for number, each in folder.complete().items()}
        names = dict(folder.of_orbax()) | ours
        step = max(names, default=-1) if which == "latest" else int(which)
        if step in names:
            return below(folder.path, names[step])
    if step < 0:
        what = "complete step" if which == "latest" else "step with the metric of keep_best"
        raise CheckpointNotFoundError(f"{text}: {folder.url} has no {what}")
    return below(folder.path, folder.step(step).name)


def _is_there(store: Store) -> bool:
    return has_marks(store) if store.is_remote else os.path.lexists(store.url)


def _best(folder: RunFolder) -> int:
    owner = folder.owner()
    if owner is None:
        return -1
    if owner.best is None:
        raise ValueError(
            f"{folder.url}@best: the run has no metric by which a step is best; name the step, or "
            "give its Run keep_best=(1, 'loss')"
        )
    return next(iter(folder.best_first(*owner.best)), -1)
