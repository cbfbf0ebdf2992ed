"""Rehearsals against golden files."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meshes import abstract, mesh_of

import gda


def rehearsed(mesh: Mesh, *specs: Any, size: int = 64) -> gda.Rehearsal:
    def step(w: Any, x: Any) -> Any:
        return x @ w

    w, x = abstract((size, 32), mesh, *specs[0]), abstract((16, size), mesh, *specs[1])
    return gda.rehearse(step, w, x)


@pytest.fixture(scope="module")
def reducing() -> gda.Rehearsal:
    """A product with one all-reduce over y of float32[4,32]."""
    return rehearsed(mesh_of({"x": 4, "y": 2}), P("y"), P("x", "y"))


@pytest.fixture(scope="module")
def silent() -> gda.Rehearsal:
    return rehearsed(mesh_of({"x": 4, "y": 2}), P(), P("x"))


def too_large(rehearsal: gda.Rehearsal) -> gda.Rehearsal:
    """Return the answer for a program that does not fit."""
    unknown = dict.fromkeys(("output_bytes", "temporary_bytes", "aliased_bytes", "code_bytes"))
    return dataclasses.replace(
        rehearsal, fits=False, peak_bytes=2**40, collectives=None, traffic=(), **unknown
    )


@pytest.fixture
def golden(tmp_path: Path, reducing: gda.Rehearsal, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The golden file of the product with an all-reduce."""
    path = tmp_path / "made" / "step.json"
    monkeypatch.setenv("GDA_UPDATE_GOLDEN", "1")
    reducing.check(path)
    monkeypatch.delenv("GDA_UPDATE_GOLDEN")
    return path


def differences(rehearsal: gda.Rehearsal, path: Path) -> list[str]:
    """Return the lines of the differences."""
    with pytest.raises(AssertionError) as caught:
        rehearsal.check(path)
    first, *lines, last = str(caught.value).splitlines()
    assert first == f"step differs from {path}:"
    assert last == "if this is intended, write the file again with pytest --gda-update-golden"
    assert all(line.startswith("  ") for line in lines)
    return [line.strip() for line in lines]


def test_a_golden_file_has_devices_peak_and_communication(
    golden: Path, reducing: gda.Rehearsal
) -> None:
    assert json.loads(golden.read_text()) == {
        "version": 1,
        "device_kind": "cpu",
        "mesh": {"x": 4, "y": 2},
        "fits": None,
        "peak_bytes": reducing.peak_bytes,
        "collectives": {"all-reduce over y": 512},
    }
    reducing.check(str(golden))


def test_differences_are_in_words(golden: Path, silent: gda.Rehearsal) -> None:
    turned = dataclasses.replace(silent, mesh_shape={"x": 2, "y": 4})
    mesh, peak, gone = differences(turned, golden)
    assert mesh == "mesh: {'x': 4, 'y': 2} before, {'x': 2, 'y': 4} now"
    assert re.fullmatch(r"peak: [\d.]+ KiB before, [\d.]+ KiB now", peak)
    assert gone == "all-reduce over y: 512 B before, 0 B now"


def test_bytes_may_change_by_a_twentieth(golden: Path, reducing: gda.Rehearsal) -> None:
    document = json.loads(golden.read_text())
    for nbytes, expected in ((488, []), (487, ["all-reduce over y: 487 B before, 512 B now"])):
        golden.write_text(json.dumps(document | {"collectives": {"all-reduce over y": nbytes}}))
        if expected:
            assert differences(reducing, golden) == expected
        else:
            reducing.check(golden)
    golden.write_text(json.dumps(document | {"collectives": {}}))
    assert differences(reducing, golden) == ["all-reduce over y: 0 B before, 512 B now"]


def test_an_answer_that_changes(golden: Path, reducing: gda.Rehearsal) -> None:
    fits, peak = differences(too_large(reducing), golden)  # and no collective, which is unknown
    assert fits == "fits: None before, False now"
    assert peak.startswith("peak: ")


def test_unknown_numbers_stay_unknown(golden: Path, reducing: gda.Rehearsal) -> None:
    document = json.loads(golden.read_text())
    document["collectives"] = {"all-reduce over y": None}
    golden.write_text(json.dumps(document))
    assert reducing.collectives is not None
    found = tuple(dataclasses.replace(each, count=None) for each in reducing.collectives)
    until = dataclasses.replace(reducing.collectives, found=found)
    dataclasses.replace(reducing, collectives=until).check(golden)


def test_files_that_are_none(tmp_path: Path, silent: gda.Rehearsal) -> None:
    path = tmp_path / "step.json"
    with pytest.raises(FileNotFoundError, match="write it with pytest --gda-update-golden"):
        silent.check(path)
    for text, message in (
        (b"{", "Expecting property name"),
        (b"[]", 'it has no "version": 1'),
        (b'{"version": 1}', "KeyError('device_kind'); write it again"),
        (b"\xff\xfe", ""),
    ):
        path.write_bytes(text)
        says = re.escape(f"{path} is not a golden file")
        with pytest.raises(ValueError, match=f"{says}.*{re.escape(message)}"):
            silent.check(path)
