"""The steps of a run on the hosts' own disks: saved often, and read after a host is lost.

Every function here is one meeting of all processes, like those of the run.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import operator
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Self

import jax

from gda.arrays.transport.connection import Address
from gda.arrays.transport.listening import address_towards
from gda.checkpoint.format import manifest_json
from gda.checkpoint.format.manifest import Manifest
from gda.checkpoint.local_steps.files_of_hosts import FileServer, Host, StepOfHosts, fetch_manifest
from gda.checkpoint.local_steps.host_folder import (
    FoundStep,
    HostFolder,
    RunStart,
    StepName,
    WholeStep,
    partners_of,
    whole_steps,
)
from gda.checkpoint.local_steps.local_save import HostsOfRun, LocalSave
from gda.checkpoint.restoring import restored
from gda.checkpoint.save_in_flight import SaveInFlight
from gda.checkpoint.saving import CommittedSave
from gda.checkpoint.step_folders.rules import is_due
from gda.layout.text import counted, format_bytes, join_some
from gda.multihost import coordination
from gda.multihost.steps import Done
from gda.storage.options import Options, check_count
from gda.storage.stores.errors import CorruptionError
from gda.trees.records.recorded_tree import flatten
from gda.trees.records.requests import Request
from gda.trees.records.saved_leaves import given_leaves, without_ties

log = logging.getLogger("gda")

_LOOPBACK = "127.0.0.1"


class LocalSteps:
    """The local steps of a run.

    Args:
      path: the folder on each host.
      every: as for ``Run``, of these steps.
      keep: the newest steps that each host keeps.
      copies: the other hosts that have each block, at least.
      meet: ``all_do`` with the timeout and the errors of the run.
      failed: called after a save that failed, in its thread.
      check_owner: called before a save is committed.
    """

    def __init__(
        self,
        path: str,
        every: int,
        keep: int,
        copies: int,
        options: Options,
        timeout: float,
        meet: Callable[..., Done[Any]],
        failed: Callable[[], None],
        check_owner: Callable[[], None],
    ) -> None:
        self._path, self._every, self._keep, self._copies = path, every, keep, copies
        self._options, self._timeout = options, timeout
        self._meet, self._check_owner = meet, check_owner
        self._hosts: HostsOfRun | None = None
        self._server: FileServer | None = None
        self._whole: list[WholeStep] = []
        self._names: list[str] = []  # of the complete steps, ascending
        self._flight = SaveInFlight(
            meet=meet,
            store_of=lambda name: self._known.folder.store(name),
            not_saved=f"was not saved on the local disks {path}",
            failed=failed,
        )
        self._is_begun = False
        self._is_asked = False  # the next step is due, because a host has lost its files

    @classmethod
    def of(cls, path: Any, every: Any, keep: Any, copies: Any, *rest: Any) -> Self | None:
        """Return the local steps that arguments of ``Run`` describe; ``None`` without a folder."""
        if path is None:
            if every is not None:
                raise ValueError("local_every was given without local; pass the folder too")
            return None
        path = _checked(path, every)
        check_count(every, "local_every")
        check_count(keep, "local_keep")
        if isinstance(copies, bool) or not isinstance(copies, int) or copies < 0:
            raise ValueError(f"local_copies must be a whole number from 0 on, not {copies!r}")
        return cls(path, operator.index(every), operator.index(keep), copies, *rest)

    @property
    def compared(self) -> dict[str, Any]:
        """The arguments that must be the same in all processes."""
        return {
            "local": self._path,
            "local_every": self._every,
            "local_keep": self._keep,
            "local_copies": self._copies,
        }

    def is_due(self, number: int, previous: int) -> bool:
        """Return True if a step is to be saved."""
        return self._is_asked or is_due(number, previous, self._every)

    # The beginning of a start.

    def look(self, start: RunStart, least: int) -> list[WholeStep]:
        """Return the steps that the hosts have together, the newest first.

        ``least`` is the start that has saved the newest step of the store: those of starts before
        are not used.
        """
        folder: HostFolder | None = None
        self._is_begun = False

        def work() -> dict[str, Any]:
            nonlocal folder
            folder = HostFolder(self._path, start)
            found, unused = folder.look()
            for line in unused:
                log.warning("local steps: %s; it is not used", line)
            server, token = self._serve(folder)
            return {
                "id": folder.id,
                "name": socket.gethostname(),
                "server": [*server, token],
                "steps": [asdict(each) for each in found],
            }

        def decide(parts: dict[int, Any]) -> dict[str, Any]:
            firsts: dict[str, int] = {}
            for process, part in parts.items():
                firsts.setdefault(part["id"], process)
            numbers = {each: number for number, each in enumerate(firsts)}
            of_firsts = [parts[process] for process in firsts.values()]
            found = {
                host: [FoundStep(**step) for step in part["steps"]]
                for host, part in enumerate(of_firsts)
            }
            whole, unused = whole_steps(found, least)
            names: dict[str, set[str]] = {}
            for part in parts.values():
                names.setdefault(part["id"], set()).add(part["name"])
            shared = [sorted(each) for each in names.values() if len(each) > 1]
            return {
                "host_of": [numbers[part["id"]] for part in parts.values()],
                "servers": [part["server"] for part in of_firsts],
                "whole": [[str(each.name), [*each.holders.items()]] for each in whole],
                "unused": unused,
                "shared": shared,
            }

        what = f"looking for local steps, in {self._path}"
        decision = self._meet(work, decide=decide, what=what).decision
        assert folder is not None
        if jax.process_index() == 0:
            for line in decision["unused"]:
                log.warning("local step %s; it is not used", line)
            for names in decision["shared"]:
                log.warning(
                    "local=%r is one folder for the hosts %s: the loss of its disk loses all local "
                    "steps in it",
                    self._path,
                    join_some(names),
                )
        servers = [
            Host(number, Address(host, port), token)
            for number, (host, port, token) in enumerate(decision["servers"])
        ]
        self._hosts = HostsOfRun(folder, decision["host_of"], servers, self._copies)
        self._whole = [
            WholeStep(name, dict(holders))
            for text, holders in decision["whole"]
            if (name := StepName.of(text)) is not None
        ]
        return self._whole

    def _serve(self, folder: HostFolder) -> tuple[Address, str]:
        """Listen for other hosts, with a new secret; return the address, and the secret."""
        self.close()
        if jax.process_count() == 1:
            return Address(_LOOPBACK, 0), ""
        place, token = coordination.coordinator_address(), uuid.uuid4().hex
        towards = Address.of(place) if place else Address(_LOOPBACK, 0)
        self._server = FileServer(folder.path, address_towards(towards), token)
        return self._server.address, token

    def read(self, step: WholeStep, request: Request, told: Counter[int]) -> Any:
        """Return the state of a step; add the bytes that came from other hosts to ``told``."""
        hosts, name = self._known, str(step.name)
        there = {
            hosts.servers[host]: ranges
            for host, ranges in step.holders.items()
            if host != hosts.here
        }
        file, manifest = self._manifest_of(name, [*there])
        store = StepOfHosts(hosts.folder.path, name, file, manifest, there, self._timeout)
        state = restored(store, request, Options(), self._timeout)
        told.update(store.fetched)
        return state

    def _manifest_of(self, name: str, there: Sequence[Host]) -> tuple[bytes, Manifest]:
        """Return the file and the manifest of a step: of this host, or of the first with one."""
        store = self._known.folder.store(name)
        reads = [lambda: store.read(manifest_json.NAME, manifest_json.MOST_BYTES)]
        reads += [partial(fetch_manifest, host, name, self._timeout) for host in there]
        for read in reads:
            with contextlib.suppress(OSError, ValueError):
                file = read()
                return file, manifest_json.load(file, store.url)
        raise CorruptionError(f"no host has the whole manifest of the local step {name}")

    def begin(self, state: Any, step: int, used: WholeStep | None, told: Mapping[int, int]) -> str:
        """Begin to save after a step, and return a text of its hosts.

        Raises ``OSError`` in all processes if the folder of a host is too small.
        """
        hosts = self._known

        def work() -> dict[str, Any]:
            hosts.folder.start = replace(hosts.folder.start, began=step)
            _, leaves = flatten(state)
            given, _ = without_ties(leaves, given_leaves(leaves, self._options))
            own, sent = hosts.nbytes_of(given)
            room = hosts.folder.room() if hosts.is_first else None
            return {"own": own, "sent": [*sent.items()], "room": room, "told": [*told.items()]}

        def decide(parts: dict[int, Any]) -> dict[str, Any]:
            needed: Counter[int] = Counter()
            for process, part in parts.items():
                needed[hosts.host_of[process]] += part["own"]
                needed.update(dict(part["sent"]))
            rooms = {
                hosts.host_of[process]: part["room"]
                for process, part in parts.items()
                if part["room"] is not None
            }
            self._check_room(needed, rooms)
            of_hosts: dict[int, Counter[int]] = {}
            for process, part in parts.items():
                of_hosts.setdefault(hosts.host_of[process], Counter()).update(dict(part["told"]))
            return {"text": _text_of(used, of_hosts), "needed": max(needed.values())}

        what = f"the room for local steps, in {self._path}"
        decision = self._meet(work, decide=decide, what=what).decision
        self._is_begun = True
        older = [str(each.name) for each in self._whole if used and each.name <= used.name]
        self._names = older[: self._keep][::-1]
        self._is_asked = used is not None and len(used.holders) < len(hosts.servers)
        if hosts.is_first:
            hosts.folder.keep_only(self._names)
        if jax.process_index() == 0:
            log.info(
                "a local step takes up to %s on a host in %s; %s",
                format_bytes(decision["needed"]),
                hosts.folder.path,
                _text_of_losses(len(hosts.servers), self._copies),
            )
        return decision["text"]

    def _check_room(self, needed: Mapping[int, int], rooms: Mapping[int, int]) -> None:
        for host, nbytes in sorted(needed.items()):
            total = nbytes * (self._keep + 1)
            if total > rooms[host]:
                raise OSError(
                    errno.ENOSPC,
                    f"{self._path} of host {host} has room for {format_bytes(rooms[host])}, and "
                    f"{self._keep + 1} local steps of {format_bytes(nbytes)} need "
                    f"{format_bytes(total)}: {self._keep} that are kept, and the one that is "
                    "written. Give it a larger folder, or local_copies=0",
                )

    @property
    def _known(self) -> HostsOfRun:
        assert self._hosts is not None
        return self._hosts

    # A save.

    def save(self, number: int, state: Any, logs_errors: bool) -> bool:
        """Begin to save a step; raise in all processes if the save before has failed."""
        if not self._is_begun:
            self.begin(state, 0, None, {})
        self._flight.failure()  # only now, the seconds of this save begin
        begun_at, hosts, names = time.monotonic(), self._known, self._names
        saving = LocalSave(
            hosts, number, names, self._keep, self._options, self._timeout, self._check_owner
        )

        def completed(written: CommittedSave, free_since: float) -> None:
            log.info(
                f"saved step {number} on local disks: the loop waited "
                f"{free_since - begun_at:.3f} s; complete after "
                f"{time.monotonic() - begun_at:.1f} s; {format_bytes(written.nbytes)} in all"
            )

        is_begun = self._flight.begin(number, saving, state, logs_errors, completed)
        self._is_asked = self._is_asked and not is_begun
        return is_begun

    def finish(self, logs_errors: bool) -> None:
        """Wait for the save in flight; if it failed in any process, all raise, or log."""
        self._flight.finish(f"end of a local save, in {self._path}", logs_errors)

    def close(self) -> None:
        """End the server of this process."""
        if self._server is not None:
            self._server.close()
            self._server = None


def _text_of(used: WholeStep | None, told: Mapping[int, Mapping[int, int]]) -> str:
    """Return the hosts of a step, and the bytes that came from others."""
    if used is None:
        return ""
    lines = []
    for host, sources in told.items():
        is_new = host not in used.holders
        if sources or is_new:
            from_hosts = [f"{format_bytes(n)} from host {each}" for each, n in sources.items()]
            what = " is new" if is_new else ""
            lines.append(f"host {host}{what}: {join_some(from_hosts) if from_hosts else 'nothing'}")
    disks = "host's disk" if len(told) == 1 else "hosts' disks"
    return f"from {len(used.holders)} of {len(told)} {disks}" + "".join(
        f"; {line}" for line in lines
    )


def _text_of_losses(num_hosts: int, copies: int) -> str:
    """Return the losses of hosts that a local step survives."""
    if num_hosts == 1:
        return "there is one host, whose loss loses local steps"
    if not copies:
        return "no copies are made: a lost host loses the blocks that no other host holds"
    pairs = sorted(
        {tuple(sorted((host, *partners_of(host, num_hosts, copies)))) for host in range(num_hosts)}
    )
    groups = join_some([" and ".join(map(str, pair)) for pair in pairs])
    lost = counted(min(copies, num_hosts - 1), "host")
    return f"it survives the loss of any {lost}, and of more unless they are all of {groups}"


def _checked(path: Any, every: Any) -> str:
    """Return the path of local steps; raise unless it and ``every`` belong together."""
    if every is None:
        raise ValueError("local needs local_every, the number of steps between local steps")
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str) or not path or "://" in path:
        raise ValueError(
            f"local must be a folder on each host's own disk, such as '/dev/shm/run', not {path!r}"
        )
    return os.path.abspath(os.path.expanduser(path))
