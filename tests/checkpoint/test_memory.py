"""The memory that small and hostile files take, measured in processes that may not take much."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damaged import sealed
from forks import Forks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from leaks import resident

import gda
from gda.checkpoint.writing import writer

MIB = 2**20
Taken = Callable[..., tuple[int, str, str]]


@pytest.fixture
def taken(forks: Forks) -> Taken:
    """Gives the bytes that something with a checkpoint takes in a process, and its error."""

    def taken(do: str, path: Any, most: int = 2**30, **options: Any) -> tuple[int, str, str]:
        path = path if isinstance(path, dict) else str(path)
        forks.start("measure_memory", 1, what=do, path=path, most=most, options=options)
        lines = forks.rest()
        assert lines, forks.errors()
        return json.loads(" ".join(lines[0]))

    return taken


# Of other values in tests/layout/test_strict_json.py.
@pytest.mark.parametrize(
    ("value", "size", "times"),
    [("1e9", 4 * MIB, 24), ("[]", 24 * MIB, 3)],  # 3: the file, and its text
)
def test_a_manifest_of_many_values_is_not_parsed(
    taken: Taken, tmp_path: Path, value: str, size: int, times: int
) -> None:
    gda.checkpoint.save(tmp_path, {"w": np.zeros(3)})
    body = '{"structure":[' + ",".join([value] * (size // (len(value) + 1))) + "]}"
    (tmp_path / "manifest.json").write_bytes(sealed(body.encode()))
    nbytes, kind, said = taken("inspect", tmp_path)
    assert kind == "CorruptionError", said
    assert ("so many" in said) == (times == 3), said
    assert nbytes < times * size


@pytest.mark.parametrize("file", ["manifest.json", "*/*/c.*", "*/*/zarr.json", "*/*.mine.0"])
def test_a_file_of_another_size_takes_no_memory(taken: Taken, tmp_path: Path, file: str) -> None:
    tree = {"w": np.zeros(3), "mine": gda.checkpoint.PerProcess(b"abc")}
    gda.checkpoint.save(tmp_path, tree)
    (path,) = tmp_path.glob(file)
    with open(path, "r+b") as grown:
        grown.truncate(600 * MIB)
    # Through TensorStore, as an object store, and without it.
    layers = [{"base": f"file://{tmp_path}/"}]
    for place in ({"driver": "kvstack", "layers": layers}, tmp_path):
        for do in ("restore", "verify"):
            nbytes, kind, said = taken(do, place)
            assert kind == "CorruptionError", said
            assert nbytes < SLACK, (place, do)
            assert "bytes" in said or "CRC-32C" in said


@pytest.mark.parametrize(("do", "of_arrays"), [("verify", 0), ("restore", 40 * MIB)])
def test_no_more_than_max_bytes_are_taken_beside_the_arrays(
    taken: Taken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str, of_arrays: int
) -> None:
    monkeypatch.setattr(writer, "CHUNK_BYTES", 2**21)
    gda.checkpoint.save(tmp_path, {"w": np.arange(40 * MIB, dtype=np.uint8)})
    most = 8 * MIB
    nbytes, kind, said = taken(do, tmp_path, max_workers=8, max_bytes=most)
    assert kind == "NoneType", said
    assert nbytes < of_arrays + most + SLACK


SLACK = 20 * MIB  # threads, and what the allocator keeps: more on a loaded machine


def test_saved_data_does_not_stay_on_the_host(tmp_path: Path) -> None:
    # Of int4, JAX has to make a copy for NumPy also on CPU.
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("x",)), P("x"))
    make = jax.jit(lambda: jnp.ones((8, 2**21), jnp.int4), out_shardings=sharding)
    arrays = jax.block_until_ready([make() for _ in range(3 + 8)])
    # More elements than NumPy sums up alone: what the program for them takes, is taken once.
    gda.checkpoint.save(tmp_path / "first", arrays[:3], max_bytes=2**23)
    before = resident()
    gda.checkpoint.save(tmp_path / "others", arrays[3:], max_bytes=2**23)
    assert resident() - before < 8 * 16 * MIB // 2


def test_save_takes_no_more_than_max_bytes(taken: Taken, tmp_path: Path) -> None:
    most = 64 * MIB
    nbytes, kind, said = taken("save", tmp_path / "run", max_workers=8, max_bytes=most)
    assert kind == "NoneType", said
    # A chunk of 16 MiB more, or two: a thread of TensorStore keeps what it has had.
    assert nbytes < most + 32 * MIB + SLACK
