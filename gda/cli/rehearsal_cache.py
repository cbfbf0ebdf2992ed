"""Reports of ``gda rehearse`` in the cache folder of the user, so that a second run takes a second.

A record is found by its request, the environment and the machine. It names everything that the
process had read: files that Python opened or imported, libraries that it mapped into memory, and
folders that it listed. It counts while all of them are as they were. gda, JAX and the compiler are
among them, so that their versions need no place of their own.

No JAX: an answer from here starts no process and imports nothing large.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.machinery
import json
import os
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gda.cli.rehearsal_processes import Report, Request, reports_of

_MOST_RECORDS = 500  # of some 20 KiB each

# They differ between shells and not between programs.
_VOLATILE = {
    *("_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES", "TERM", "TERM_SESSION_ID", "WINDOWID"),
    *("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK", "XDG_SESSION_ID"),
    *("TMUX", "TMUX_PANE", "STY", "PYTEST_CURRENT_TEST"),
}

# Larger files, and libraries, are compared by size and time: libtpu has 500 MiB.
_MOST_HASHED_BYTES = 64 * 2**20

# No file shows the answers of other programs.
_ASKS_OTHERS = {
    *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.connect"),
}

# They list folders for the modules and packages in them; the other files there do not count.
_LIST_MODULES = (
    __name__,
    *("_frozen_importlib_external", "importlib._bootstrap_external"),  # two names of one module
    "importlib.metadata",
)
_ENDINGS = (*importlib.machinery.all_suffixes(), ".dist-info", ".egg-info")

_NOT_OF_DISKS = ("/proc/", "/sys/", "/dev/")


def cached_reports(
    requests: Sequence[Request], show_progress: Callable[[int, int], object], *, is_silent: bool
) -> list[Report]:
    """Return a report for each request, as ``reports_of``, and make only those not kept."""
    for each in (_state_of_file, _modules_in):
        each.cache_clear()
    paths = [_record_of(request) for request in requests]
    found = [_read(*each) for each in zip(paths, requests, strict=True)]
    missing = [index for index, report in enumerate(found) if report is None]
    if missing:
        asked, records = zip(*((requests[index], paths[index]) for index in missing), strict=True)
        made = reports_of(asked, show_progress, records, is_silent=is_silent)
        for index, report in zip(missing, made, strict=True):
            found[index] = report
    return [report for report in found if report is not None]


def _record_of(request: Request) -> Path:
    """Return the path of the record of a request in this environment."""
    environment = {name: value for name, value in os.environ.items() if name not in _VOLATILE}
    # A report does not depend on the other meshes, unless it was not compiled for their sake.
    request = request._replace(may_skip=False)
    key = [request, os.getcwd(), environment, sys.executable, sys.version, os.uname()]
    return _folder() / f"{_digest(key)}.json.gz"


def _folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("GDA_CACHE_DIR") or f"{caches}/gda", "rehearsals").absolute()


def _read(path: Path, request: Request) -> Report | None:
    """Return the report in a record that still counts."""
    try:
        record = json.loads(gzip.decompress(path.read_bytes()))
        report: Any = Report(**record["report"])
        if not (report.rehearsal["is_compiled"] or request.may_skip):
            return None
        is_as_it_was = _states(record["inputs"]) == record["states"]
        day = time.strftime("%Y-%m-%d", time.localtime(record["time"]))
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError):
        return None  # absent, torn or of another version
    return report._replace(kept_on=day) if is_as_it_was else None


# Of the process that makes a report.


class Inputs:
    """The files and folders that this process reads, from now to its end."""

    def __init__(self) -> None:
        self._begun = time.time_ns()
        self._files: set[str] = set()
        self._folders: set[str] = set()
        self._asks_others = False
        self._ignored = (*_NOT_OF_DISKS, f"{_folder()}/")
        sys.addaudithook(self._hear)

    def keep(self, report: Report, path: Path) -> None:
        """Write a record of a report, if there is an answer and its inputs are known."""
        if report.rehearsal is None or self._asks_others:
            return
        inputs = self._inputs()
        if any(map(self._is_newer, inputs["files"] + inputs["folders"])):
            return  # read before the change, or after it
        record = {
            "time": time.time(),
            "report": report._asdict(),
            "inputs": inputs,
            "states": _states(inputs),
        }
        # A folder that cannot be written has no records.
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(gzip.compress(json.dumps(record).encode(), 1))
            os.replace(file.name, path)
            kept = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime)
            for old in kept[:-_MOST_RECORDS]:
                old.unlink()

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _ASKS_OTHERS:
            self._asks_others = True
        elif event == "open":
            path, _, flags = args
            if not isinstance(path, int) and flags & os.O_ACCMODE != os.O_WRONLY:
                self._files.add(os.path.abspath(os.fsdecode(path)))
        elif event in ("os.listdir", "os.scandir") and not isinstance(args[0], int):
            caller = sys._getframe(1).f_globals.get("__name__")
            if caller not in _LIST_MODULES:
                self._folders.add(os.path.abspath(os.fsdecode(args[0] or ".")))

    def _inputs(self) -> dict[str, list[str]]:
        modules = {getattr(each, "__file__", None) for each in [*sys.modules.values()]}
        with open("/proc/self/maps") as maps:
            mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line}
        files = {each for each in {*self._files, *modules, *mapped} if each and each[0] == "/"}
        imported_from = [*sys.path_importer_cache, *sys.path]
        return {
            "files": [each for each in sorted(files) if not self._is_ignored(each)],
            "folders": [each for each in sorted(self._folders) if not self._is_ignored(each)],
            "import_folders": sorted({*map(os.path.abspath, imported_from)}),
        }

    def _is_ignored(self, path: str) -> bool:
        # The bytecode of a source that is itself an input.
        return f"{path}/".startswith(self._ignored) or "/__pycache__/" in path

    def _is_newer(self, path: str) -> bool:
        with suppress(OSError):
            about = os.stat(path)
            return max(about.st_mtime_ns, about.st_ctime_ns) > self._begun
        return False


# The state of inputs.


def _states(inputs: dict[str, list[str]]) -> str:
    states = [
        [*map(_state_of_file, inputs["files"])],
        [*map(_names_in, inputs["folders"])],
        [*map(_modules_in, inputs["import_folders"])],
    ]
    return _digest(states)


@functools.cache
def _state_of_file(path: str) -> str | list[int] | None:
    """Return the checksum of a file, or its size and time; None if there is no file."""
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            return None
        if path.endswith(".so") or ".so." in path or about.st_size > _MOST_HASHED_BYTES:
            return [about.st_size, about.st_mtime_ns]
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def _names_in(folder: str) -> list[str] | None:
    try:
        return sorted({*os.listdir(folder)} - {"__pycache__"})
    except OSError:
        return None


@functools.cache
def _modules_in(folder: str) -> list[str]:
    """Return the names in a folder that an import may find; a name without a dot may be one."""
    return [name for name in _names_in(folder) or [] if "." not in name or name.endswith(_ENDINGS)]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
