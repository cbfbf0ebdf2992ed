"""Paths that name a step of a run, as ``runs/a@100`` does: new files there would hide the step."""

from __future__ import annotations

import re

from gda.storage.orbax_runs.run_folder import MARKS, PARTIAL, STEP
from gda.storage.stores.opening import Store, has, open_store

REFERENCE = re.compile(r"(.+)@(latest|best|\d+)", re.DOTALL)
# The files of a checkpoint, and of the folder of a run, by which they are known.
MANIFEST, RUN = "manifest.json", "run.json"


def has_marks(store: Store, folder: str = "") -> bool:
    """Return True if a file has a name that only a checkpoint has, of gda or of Orbax."""
    return any(has(store, f"{folder}{name}") for name in (MANIFEST, *MARKS))


def check_names_no_step(url: str, timeout: float) -> None:
    """Raise ``FileExistsError`` if new files at a path would hide a step of a run."""
    found = REFERENCE.fullmatch(url.rstrip("/"))
    if found is None or has_marks(open_store(url, timeout)):
        return
    run = open_store(found[1], timeout)
    try:
        names = run.entries()
    except (FileNotFoundError, NotADirectoryError):
        return
    steps = [name for name in names if STEP.fullmatch(name) and PARTIAL not in name]
    # Orbax has the tree in a folder of its own.
    if RUN in names or any(has_marks(run, f"{x}/{y}") for x in steps for y in ("", "default/")):
        raise FileExistsError(
            f"{found[0]} names a step of the run {found[1]}, which files there would hide; give "
            "another path, without @ at its end"
        )
