"""The cache of ``gda rehearse``: reports of earlier runs, while nothing that they read changes."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Run

from gda.cli import rehearsal_cache, rehearsal_processes
from gda.cli.rehearsal_cache import _record_of, cached_reports
from gda.cli.rehearsal_processes import Report, Request

PROGRAM = """
import jax
import os
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

def rehearsal(mesh):
    with open("processes.txt", "a") as file:
        print(os.getpid(), file=file)
    w = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, P(*mesh.axis_names)))
    return lambda w: w.sum(), (w,)
"""

# A process that reads as a program of a user does, and keeps its report, without compiling.
READS = """
import os, sys
from contextlib import suppress
from pathlib import Path
from gda.cli.rehearsal_cache import Inputs
from gda.cli.rehearsal_processes import Report
sys.path.insert(0, os.getcwd())
inputs = Inputs()
import sizes
Path("height.txt").read_text()
with suppress(FileNotFoundError):
    open("override.txt")
os.listdir("parts")
{more}
inputs.keep(Report({{"is_compiled": {is_compiled}}}), Path(sys.argv[1]))
"""

REQUEST = Request("program.py", "rehearsal", "cpu:2", 1, None, {"x": 2})


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Keeps a report for ``REQUEST``, of a process that reads in the current folder."""
    monkeypatch.setenv("GDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(rehearsal_cache, "reports_of", lambda *_, **options: [Report()])
    folder = tmp_path / "program"
    (folder / "parts").mkdir(parents=True)
    monkeypatch.chdir(folder)
    Path("sizes.py").write_text("WIDTH = 4\n")
    Path("height.txt").write_text("8\n")

    def kept(more: str = "", *, is_compiled: bool = True) -> None:
        program = READS.format(more=more, is_compiled=is_compiled)
        subprocess.run([sys.executable, "-c", program, _record_of(REQUEST)], check=True)

    return kept


def is_kept(request: Request = REQUEST) -> bool:
    (report,) = cached_reports([request], lambda *_: None, is_silent=True)
    assert bool(report.kept_on) == (report.rehearsal is not None)
    return bool(report.kept_on)


def test_a_report_is_kept_while_its_inputs_are_as_they_were(
    keep: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_kept()
    keep()
    assert is_kept()
    for name in ("sizes.py", "height.txt"):
        path = Path(name)
        before = path.read_text()
        path.write_text(before.replace("4", "5").replace("8", "9"))
        assert not is_kept()
        path.write_text(before)
        assert is_kept()
    for name in ("override.txt", "json.py", "parts/1"):
        Path(name).touch()
        assert not is_kept()
        Path(name).unlink()
    Path("output.txt").touch()
    assert is_kept()

    assert not is_kept(REQUEST._replace(mesh={"x": 1, "y": 2}))
    monkeypatch.setenv("COLUMNS", "50")
    assert is_kept()
    monkeypatch.setenv("WIDTH", "50")
    assert not is_kept()


@pytest.mark.parametrize("text", [b"", b"foreign", None])
def test_a_torn_record_is_made_again(keep: Callable[..., None], text: bytes | None) -> None:
    keep()
    record = _record_of(REQUEST)
    record.write_bytes(record.read_bytes()[:-100] if text is None else text)
    assert not is_kept()


@pytest.mark.parametrize(
    "more",
    [
        "Path('height.txt').write_text('9')",
        "import subprocess; subprocess.run(['true'])",
    ],
)
def test_nothing_is_kept_if_the_inputs_are_unknown(keep: Callable[..., None], more: str) -> None:
    keep(more)
    assert not _record_of(REQUEST).exists()


def test_a_mesh_alone_is_compiled_though_a_search_skipped_it(keep: Callable[..., None]) -> None:
    keep(is_compiled=False)
    assert is_kept(REQUEST._replace(may_skip=True))
    assert not is_kept()


def test_the_oldest_records_are_removed(
    keep: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = _record_of(REQUEST)
    record.parent.mkdir(parents=True)
    for age in range(3):
        old = record.with_name(str(age))
        old.touch()
        os.utime(old, (1000 - age, 1000 - age))
    keep("import gda.cli.rehearsal_cache as cache; cache._MOST_RECORDS = 2")
    assert {path.name for path in record.parent.iterdir()} == {record.name, "0"}


def test_a_second_search_starts_no_process(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(rehearsal_processes, "_most_processes", lambda: 1)
    folder = tmp_path / "program"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("program.py").write_text(PROGRAM)
    search = "rehearse", "program.py:rehearsal", "--topology", "cpu:2", "--mesh", "x,y", "--search"
    code, first, err = run(*search)
    assert (code, err) == (0, "")
    processes = Path("processes.txt").read_text().split()
    assert len(processes) == 2
    assert len({*processes}) == 1  # one process made both

    monkeypatch.delattr(rehearsal_processes, "Children")
    code, again, err = run(*search)
    assert (code, again) == (0, first)
    note = r"2 of 2 meshes from the cache of 20\d\d-\d\d-\d\d; --no-cache compiles again\n"
    assert re.fullmatch(note, err)
    with pytest.raises(NameError, match="Children"):
        run(*search, "--no-cache")
