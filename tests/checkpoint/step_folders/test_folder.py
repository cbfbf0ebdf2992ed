"""The listing of a run, whatever the steps in it are."""

from typing import Any

import pytest
import tensorstore as ts
from hypothesis import example, given
from hypothesis import strategies as st

from gda.checkpoint import SaveError
from gda.checkpoint.step_folders import folder as module
from gda.checkpoint.step_folders.folder import RunFolder
from gda.storage.stores.object_store import KvStore

FILES = ["manifest.json", "begun.json", "unfinished", "held.json", "data-0/w/c"]


@example([("00000001", "begun.json", True), ("00000001", "manifest.json", True)] * 2)
@example([("1", "data-0/w/c", True), ("1", "manifest.json", True), ("1", "manifest.json", False)])
@given(
    st.lists(
        st.tuples(st.sampled_from(["00000001", "7", "12"]), st.sampled_from(FILES), st.booleans()),
        max_size=12,
    )
)
def test_complete_steps_are_those_that_a_program_sees_that_knows_none(
    changes: list[tuple[Any, ...]],
) -> None:
    place = ts.KvStore.open("memory://").result() / "runs/a/"
    folder = RunFolder(place, 60)
    for step, file, is_there in changes:
        if is_there:
            folder.store().replace(f"{step}/{file}", b"x")
        else:
            folder.store().remove(f"{step}/{file}")
        found, expected = (
            {number: each for number, each in of.listed().items() if each.is_complete}
            for of in (folder, RunFolder(place, 60))
        )
        assert [*found] == [*expected]
        for number, each in expected.items():
            assert found[number].name == each.name
            assert found[number].is_begun == each.is_begun
            assert found[number].is_held == each.is_held


def test_a_record_that_others_always_change_first_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = RunFolder(ts.KvStore.open("memory://").result() / "runs/a/", 60)
    folder.store().replace("7/manifest.json", b"x")
    tries: list[str] = []

    def refuse(_: KvStore, name: str, *__: Any) -> None:
        tries.append(name)
        raise SaveError("another program was faster")

    monkeypatch.setattr(module, "_MOST_ATTEMPTS", 5)
    monkeypatch.setattr(KvStore, "replace", refuse)
    with pytest.raises(SaveError, match="another program was faster"):
        folder.record(7, {"loss": 0.5})
    assert tries == ["7/metrics.json"] * 6
