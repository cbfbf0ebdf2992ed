"""The memory that small and hostile files take, measured in processes that may not take much."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memory_program
import numpy as np
import pytest
from damaged import Damaged, leaf_at, save_tiny, sealed

import gda

MIB = 2**20
LIMIT = 120  # seconds


def taken(do: str, path: Path, most: int = 2**30, **options: Any) -> tuple[int, str, str]:
    """Return the bytes that something with a checkpoint takes in a process, and its error."""
    arguments = json.dumps([do, str(path), most, options])
    command = [sys.executable, memory_program.__file__, arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


def saved(path: Path, tree: Any, edit: Callable[[dict[str, Any]], object]) -> Damaged:
    """Save a tree, and change its manifest consistently."""
    save_tiny(path, tree)
    damaged = Damaged(path)
    damaged.seal(edit)
    return damaged


def test_an_empty_array_of_a_huge_shape_has_a_fingerprint(tmp_path: Path) -> None:
    def grow(body: dict[str, Any]) -> None:
        leaf_at(body, "w")["shape"] = [0, 2**60]

    saved(tmp_path, {"w": np.zeros((0, 3), np.int8), "more": np.zeros(3)}, grow)
    nbytes, kind, said = taken("restore", tmp_path, check_fingerprint=True)
    assert (kind, nbytes < 32 * MIB) == ("CorruptionError", True), (nbytes, said)
    assert "its fingerprint differs" in said


def test_many_nodes_of_a_deep_structure(tmp_path: Path) -> None:
    def deepen(body: dict[str, Any]) -> None:
        node: Any = {"list": [None] * 10**6}
        for _ in range(197):
            node = {"list": [node]}
        body["structure"] = {"dict": [*body["structure"]["dict"], ["x", node]]}

    damaged = saved(tmp_path, {"w": np.zeros(3)}, deepen)
    size = damaged.manifest.stat().st_size
    for do in ("inspect", "restore"):
        nbytes, kind, said = taken(do, tmp_path)
        assert (kind, nbytes < 12 * size) == ("NoneType", True), (nbytes / size, said)


@pytest.mark.parametrize("value", ["[]", "{}", '""', "1e9", '{"":""}', "[[]]"])
def test_a_manifest_of_many_values_is_not_parsed(tmp_path: Path, value: str) -> None:
    gda.checkpoint.save(tmp_path, {"w": np.zeros(3)})
    body = '{"structure":[' + ",".join([value] * (30 * MIB // (len(value) + 1))) + "]}"
    (tmp_path / "manifest.json").write_bytes(sealed(body.encode()))
    nbytes, kind, said = taken("inspect", tmp_path)
    assert kind == "CorruptionError", said
    assert nbytes < 700 * MIB
