"""The memory that small and hostile files take, measured in processes that may not take much."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damaged import Damaged, save_tiny, sealed
from fastcrc import crc32
from forks import Forks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from leaks import resident
from trials import Trials, tried

import gda
from gda.checkpoint.format.manifest import array_metadata
from gda.checkpoint.writing import writer

MIB = 2**20
Taken = Callable[..., tuple[int, str, str]]


@pytest.fixture
def taken(forks: Forks) -> Taken:
    """Gives the bytes that something with a checkpoint takes in a process, and its error."""

    def taken(do: str, path: Path, most: int = 2**30, **options: Any) -> tuple[int, str, str]:
        forks.start("measure_memory", 1, what=do, path=str(path), most=most, options=options)
        lines = forks.rest()
        assert lines, forks.errors()
        return json.loads(" ".join(lines[0]))

    return taken


def saved(path: Path, tree: Any, edit: Callable[[dict[str, Any]], object]) -> Damaged:
    """Save a tree, and change its manifest consistently."""
    save_tiny(path, tree)
    damaged = Damaged(path)
    damaged.seal(edit)
    return damaged


def test_many_nodes_of_a_deep_structure(taken: Taken, tmp_path: Path) -> None:
    def deepen(body: dict[str, Any]) -> None:
        node: Any = {"list": [None] * 5 * 10**5}
        for _ in range(197):
            node = {"list": [node]}
        body["structure"] = {"dict": [*body["structure"]["dict"], ["x", node]]}

    damaged = saved(tmp_path, {"w": np.zeros(3)}, deepen)
    size = damaged.manifest.stat().st_size
    nbytes, kind, said = taken("restore", tmp_path)
    assert (kind, nbytes < 12 * size) == ("NoneType", True), (nbytes / size, said)


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


def zstd_frame(nbytes: int, declared: int | None, window_log: int | None) -> bytes:
    """Return a zstd frame of zeros.

    Args:
      declared: the size in its header.
      window_log: of the window that the decoder needs; by default as large as the content.
    """
    flags = (0 if declared is None else 0xC0) | (0x20 if window_log is None else 0)
    window = b"" if window_log is None else bytes([(window_log - 10) << 3])
    parts = [b"\x28\xb5\x2f\xfd", bytes([flags]), window]
    parts.append(b"" if declared is None else declared.to_bytes(8, "little"))
    for start in range(0, nbytes, 2**17):
        size = min(nbytes - start, 2**17)
        is_last = start + size == nbytes
        parts.append((is_last | 1 << 1 | size << 3).to_bytes(3, "little") + b"\0")
    return b"".join(parts)


BOMBS = {  # the size of the chunk, and the frame
    "4 GiB": (2**10, 2**32, 2**32, 20),
    "4 GiB, which it does not declare": (2**10, 2**32, None, 20),
    "4 GiB, declared as the chunk": (2**10, 2**32, 2**10, 20),
    "2 GiB in one segment": (2**10, 2**31, 2**31, None),
    "2 GiB in one segment, declared as the chunk": (2**10, 2**31, 2**10, None),
    "2 GiB with a window of 2 GiB": (2**10, 2**31, None, 31),
    "the chunk with a window of 2 GiB": (2**10, 2**10, None, 31),
    "a large chunk with a window of 2 GiB": (2**26, 2**26, None, 31),
}


@tried("a bomb of zstd in a chunk", sample=1)
def test_a_bomb_of_zstd_takes_no_memory(taken: Taken, tmp_path: Path, trials: Trials) -> None:
    for number, name in enumerate(trials.of([*BOMBS])):
        nbytes, *of_frame = BOMBS[name]
        path = tmp_path / str(number)
        save_chunk(path, nbytes, zstd_frame(*of_frame))
        for do in ("restore", "verify"):
            held, kind, said = taken(do, path, most=2**33)  # room for a window
            most = 16 * MIB + (nbytes if do == "restore" else 0)  # the array itself
            assert (kind, held < most) == ("CorruptionError", True), (name, do, held, said)
            assert ", chunk c.0: " in said
            trials.count("refused")


def save_chunk(path: Path, nbytes: int, frame: bytes) -> None:
    """Save an array whose only chunk, of that size in the manifest, is a frame."""
    crc = crc32.iscsi(frame)
    save_tiny(path, {"w": np.zeros(2**10, np.uint8)}, "zstd", fingerprint=False)
    damaged = Damaged(path)
    (array,) = damaged.body["arrays"]
    directory = damaged.data / array["name"]
    for chunk in damaged.chunks:
        chunk.unlink()
    (directory / "c.0").write_bytes(frame + crc.to_bytes(4, "little"))
    document = array_metadata((nbytes,), (nbytes,), np.dtype(np.uint8), "zstd")
    (directory / "zarr.json").write_bytes(document)

    def declare(body: dict[str, Any]) -> None:
        array = body["arrays"][0]
        array |= {"shape": [nbytes], "chunk_shape": [nbytes], "sizes": [len(frame)]}
        array |= {
            "crc32c": f"{crc:08x}",
            "metadata": [len(document), crc32.iscsi(document)],
        }
        body["leaves"][0] |= {"shape": [nbytes]}

    damaged.seal(declare)


def test_a_tiny_chunk_of_zstd_takes_no_more_than_max_bytes(taken: Taken, tmp_path: Path) -> None:
    save_chunk(tmp_path, 2**31, zstd_frame(2**31, 2**31, 20))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 140_000
    nbytes, kind, said = taken("verify", tmp_path, max_bytes=2**27)
    assert (kind, nbytes < 16 * MIB) == ("ValueError", True), (nbytes, said)
    assert "array w, chunk c.0: decompressing it takes 2.0 GiB, and max_bytes is" in said


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 40 MiB that zstd does not make smaller, in chunks of 2 MiB."""
    path = tmp_path_factory.mktemp("compressed") / "run"
    data = np.random.default_rng(0).integers(0, 256, 40 * MIB, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "CHUNK_BYTES", 2**21)
        gda.checkpoint.save(path, {"w": data}, compression="zstd")
    return path


SLACK = 20 * MIB  # threads, and what the allocator keeps: more on a loaded machine


@pytest.mark.parametrize(("do", "of_arrays"), [("verify", 0), ("restore", 40 * MIB)])
def test_no_more_than_max_bytes_are_taken_beside_the_arrays(
    taken: Taken, compressed: Path, do: str, of_arrays: int
) -> None:
    most = 8 * MIB
    nbytes, kind, said = taken(do, compressed, max_workers=8, max_bytes=most)
    assert kind == "NoneType", said
    assert nbytes < of_arrays + most + SLACK


def test_saved_data_does_not_stay_on_the_host(tmp_path: Path) -> None:
    # Of int4, JAX has to make a copy for NumPy also on CPU.
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("x",)), P("x"))
    make = jax.jit(lambda: jnp.ones((8, 2**21), jnp.int4), out_shardings=sharding)
    arrays = jax.block_until_ready([make() for _ in range(4)])
    gda.checkpoint.save(tmp_path / "first", arrays[0], fingerprint=False, max_bytes=2**23)
    before = resident()
    gda.checkpoint.save(tmp_path / "others", arrays[1:], fingerprint=False, max_bytes=2**23)
    assert resident() - before < 2**25


def test_save_takes_no_more_than_max_bytes(taken: Taken, tmp_path: Path) -> None:
    most = 64 * MIB
    options = {"max_workers": 8, "max_bytes": most, "compression": "zstd"}
    nbytes, kind, said = taken("save", tmp_path / "run", **options)
    assert kind == "NoneType", said
    # A chunk of 16 MiB more, or two: a thread of TensorStore keeps what it has had.
    assert nbytes < most + 32 * MIB + SLACK
