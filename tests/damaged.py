"""Checkpoints with damage, in one file or consistently, as an attacker would make it."""

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of

import gda
from gda.checkpoint.writing import writer

Edit = Callable[[dict[str, Any]], object]


def make_tree(offset: int = 0) -> dict[str, Any]:
    """A tree of which ``w`` and ``half`` are arrays of their own where chunks are tiny."""
    mesh = mesh_of({"x": 4, "y": 2})
    return {
        "w": cut(batch(8, 4) + offset, mesh, P("x")),
        "half": cut((batch(4, 8) + offset).astype(ml_dtypes.bfloat16), mesh, P(None, "y")),
        "small": [
            np.arange(3, dtype=np.int8) + np.int8(offset),
            np.array([True, False]),
            np.ones(2) + offset,
        ],
        "int4": jnp.arange(3).astype(jnp.int4),
        "key": jax.random.key(offset),
        "more": np.arange(2.0) - offset,
        "step": 7 + offset,
        "name": "a run",
    }


def limit_sizes(patch: pytest.MonkeyPatch, packed_below: int, chunk: int, pack: int) -> None:
    """Make small arrays take the ways of large ones: arrays of their own, and several chunks."""
    patch.setattr(writer, "PACKED_BELOW", packed_below)
    patch.setattr(writer, "CHUNK_BYTES", chunk)
    patch.setattr(writer, "PACK_BYTES", pack)


def save_tiny(path: Path, tree: Any, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        limit_sizes(patch, 64, 32, 32)
        gda.checkpoint.save(path, tree, **options)


class Damaged:
    """A checkpoint that is changed, looked at, and put right again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = path / "manifest.json"
        self.whole = {
            file: file.read_bytes()
            for file in sorted(path.rglob("*"))
            if file.is_file() and file.name != ".lock"
        }
        self.body = json.loads(self.whole[self.manifest].partition(b"\n")[2])
        self.data = path / self.body["data"]

    @property
    def chunks(self) -> list[Path]:
        return [file for file in self.whole if file.name.startswith("c.")]

    def leaves_in(self, file: Path) -> list[str]:
        """The paths of the leaves of the array that a file belongs to, by the JSON."""
        names = [array["name"] for array in self.body["arrays"]]
        number = names.index(file.parent.name)
        return [
            "/".join(map(str, leaf["path"]))
            for leaf in self.body["leaves"]
            if leaf.get("array") == number
            or any(piece[0] == number for piece in leaf.get("pieces", []))
        ]

    def mend(self) -> None:
        for file, data in self.whole.items():
            is_there = file.exists() and file.stat().st_size == len(data)
            if not is_there or file.read_bytes() != data:
                file.write_bytes(data)

    @contextlib.contextmanager
    def changed(self, file: Path, data: bytes | None) -> Iterator[None]:
        """Give a file other content, or remove it."""
        if data is None:
            file.unlink()
        else:
            file.write_bytes(data)
        try:
            yield
        finally:
            file.write_bytes(self.whole[file])

    def seal(self, edit: Edit | Any) -> None:
        """Write a manifest that is whole; ``edit`` changes its JSON, or is it."""
        body = edit
        if callable(edit):
            body = copy.deepcopy(self.body)
            edit(body)
        self.manifest.write_bytes(sealed(json.dumps(body).encode()))


def flip(data: bytes, at: int) -> bytes:
    """Flip a bit of one byte."""
    return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def sealed(body: bytes, version: Any = 1) -> bytes:
    seal = {"gda-checkpoint": version, "nbytes": len(body), "sha256": sha256(body).hexdigest()}
    return json.dumps(seal).encode() + b"\n" + body


def array_named(body: dict[str, Any], end: str = "w") -> dict[str, Any]:
    return next(array for array in body["arrays"] if array["name"].endswith(end))


def leaf_at(body: dict[str, Any], *path: str | int) -> dict[str, Any]:
    return next(leaf for leaf in body["leaves"] if leaf["path"] == list(path))


def on_array(**fields: Any) -> Edit:
    return lambda body: array_named(body).update(fields)


def on_leaf(*path: str | int, **fields: Any) -> Edit:
    return lambda body: leaf_at(body, *path).update(fields)


def on_piece(position: int, value: Any) -> Edit:
    return lambda body: leaf_at(body, "more")["pieces"][0].__setitem__(position, value)


def put(**fields: Any) -> Edit:
    return lambda body: body.update(fields)


def as_links(folder: Path, blobs: Path) -> Path:
    """Move every file of a folder to ``blobs``, with a link in its place, as hubs do."""
    blobs.mkdir()
    for number, path in enumerate(sorted(each for each in folder.rglob("*") if each.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    return folder
