"""The local steps that hosts have together, against sets of files."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gda.checkpoint.local_steps.host_folder import (
    FoundStep,
    HostFolder,
    RunStart,
    StepName,
    partners_of,
    ranges_of,
    whole_steps,
)

COUNT = 6  # files of a step
FILES = st.sets(st.integers(0, COUNT - 1))
NAMES = st.builds(StepName, st.integers(1, 5), st.integers(1, 3), st.just("data-" + 16 * "0"))


@given(st.dictionaries(NAMES, st.dictionaries(st.integers(0, 3), FILES, min_size=1), max_size=5))
def test_a_step_is_whole_if_every_file_is_on_a_host(steps: dict) -> None:
    found = {
        host: [
            FoundStep(str(name), 9, COUNT, ranges_of(sorted(files[host])))
            for name, files in steps.items()
            if host in files
        ]
        for host in range(4)
    }
    whole, unused = whole_steps(found)
    expected = [name for name, files in steps.items() if len(set().union(*files.values())) == COUNT]
    assert {each.name for each in whole} == {*expected}
    assert len(whole) + len(unused) == len(steps)
    order = [each.name[:2] for each in whole]
    assert order == sorted(order, reverse=True)


def test_the_room_is_what_is_free_and_what_the_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = HostFolder(str(tmp_path), RunStart(16 * "b", 1, ""))
    free = SimpleNamespace(f_bavail=10, f_bfree=12, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: free if path == folder.path else None)
    assert folder.room() == 10 * 4096
    Path(folder.path, "file").write_bytes(bytes(100))
    assert folder.room() == 10 * 4096 + 100


def of(name: str, began: int) -> FoundStep:
    return FoundStep(f"{name}.{16 * 'a'}", began, 1, [[0, 1]])


def test_a_step_of_a_start_that_went_another_way_is_not_used() -> None:
    """Start 2 has resumed at step 40, so that step 60 of start 1 is of another way."""
    found = {0: [of("60.1", 0), of("40.1", 0)], 1: [of("50.2", 40)]}
    whole, (reason,) = whole_steps(found)
    assert [(each.name.number, each.name.generation) for each in whole] == [(50, 2), (40, 1)]
    assert "start 2 has gone another way" in reason


def test_a_step_of_a_start_before_that_of_the_store_is_not_used() -> None:
    assert whole_steps({0: [of("60.1", 0)]}, least=2)[0] == []


@given(st.integers(2, 40), st.integers(0, 4), st.integers(0, 39))
def test_partners_are_other_hosts_and_are_shared_out(count: int, copies: int, host: int) -> None:
    partners = partners_of(host % count, count, copies)
    assert len({*partners} - {host % count}) == min(copies, count - 1)
    received = [each for one in range(count) for each in partners_of(one, count, copies)]
    assert {received.count(each) for each in range(count)} == {min(copies, count - 1)}
