"""Saves with a base: what did not change is linked, and each checkpoint is whole by itself."""

import errno
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from damaged import flip, limit_sizes
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from kill_program import Arguments, Disk
from meshes import batch, cut, mesh_of
from trials import Trials, tried

import gda
from gda import checkpoint
from gda.arrays.transport import to_host
from gda.checkpoint import CheckpointNotFoundError, CorruptionError
from gda.storage.stores import directory
from gda.testing import Pool
from gda.trees import written_blocks
from gda.trees.records import saved_leaves

FROZEN, TRAINED = batch(64, 8), batch(16, 8)


@pytest.fixture(autouse=True)
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of 256 bytes or more have files of their own, of at most 128 bytes."""
    limit_sizes(monkeypatch, 256, 128, 128)


def tree_at(step: int, mesh: Mesh) -> dict[str, Any]:
    return {
        "frozen": cut(FROZEN, mesh, P("x")),
        "trained": cut(TRAINED + step, mesh, P("x", "y")),
        "numpy": batch(40, 4),
        "padded": gda.PaddedArray.from_source(batch(61, 7), mesh, P("x")),
        "half": jax.device_put(FROZEN.astype(jnp.bfloat16), NamedSharding(mesh, P(None, "y"))),
        "keys": jax.random.split(jax.random.key(0), 64),
        "small": np.arange(3),
        "step": step,
    }


LINKED = {"frozen", "numpy", "padded", "half", "keys"}


def files_of(path: Path) -> dict[str, list[os.stat_result]]:
    """Return the files of the chunks of each array, by the name of the array."""
    found: dict[str, list[os.stat_result]] = {}
    for file in path.glob("data-*/*/c*"):
        found.setdefault(file.parent.name.split(".")[1], []).append(file.stat())
    return found


def linked_in(path: Path) -> set[str]:
    """Return the arrays whose files are all shared; no other has one that is."""
    found = files_of(path)
    for name, files in found.items():
        assert len({file.st_nlink > 1 for file in files}) == 1, name
    return {name for name, files in found.items() if files[0].st_nlink > 1}


def check_holds(path: Path, tree: dict[str, Any]) -> None:
    """The checkpoint has the values of a tree, in every file and by every fingerprint."""
    checkpoint.verify(path)
    assert checkpoint.diff(path, checkpoint.open(path)).are_equal
    found = checkpoint.restore(path)
    for name, given in tree.items():
        if name == "keys":
            given, found[name] = map(jax.random.key_data, (given, found[name]))
        elif isinstance(given, gda.GlobalArray | gda.PaddedArray):
            given = given.gather()
        np.testing.assert_array_equal(found[name], given, name)


def save_async(path: Path, tree: Any, **options: Any) -> None:
    checkpoint.save_async(path, tree, **options).result()


@pytest.mark.parametrize("save", [checkpoint.save, save_async])
def test_what_did_not_change_is_linked_and_each_checkpoint_is_whole(
    mesh: Mesh, tmp_path: Path, save: Callable[..., None]
) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    before, after = tree_at(1, mesh), tree_at(2, mesh)
    save(first, before)
    save(second, after, base=first)
    assert linked_in(second) == LINKED
    check_holds(first, before)
    check_holds(second, after)
    found = checkpoint.diff(first, second)
    assert [leaf.path for leaf in found.of_other_content] == [("step",), ("trained",)]
    assert checkpoint.inspect(second).about.keys() == checkpoint.inspect(first).about.keys()
    shutil.rmtree(first)
    assert linked_in(second) == set()
    check_holds(second, after)


def test_a_checkpoint_may_be_the_base_of_the_one_that_replaces_it(
    mesh: Mesh, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, tree_at(1, mesh))
    before = {name: {file.st_ino for file in files} for name, files in files_of(tmp_path).items()}
    checkpoint.save(tmp_path, tree_at(2, mesh), base=tmp_path, overwrite=True)
    after = {name: {file.st_ino for file in files} for name, files in files_of(tmp_path).items()}
    assert {name for name in after if after[name] == before[name]} == LINKED
    check_holds(tmp_path, tree_at(2, mesh))


def plus(at: tuple[int, int]) -> np.ndarray:
    changed = FROZEN.copy()
    changed[at] += 1
    return changed


DIFFERENT: dict[str, tuple[np.ndarray, P]] = {
    "one element": (plus((-1, -1)), P("x")),
    "the first element": (plus((0, 0)), P("x")),
    "its shape": (FROZEN.reshape(32, 16), P("x")),
    "its dtype": (FROZEN.view(np.int32), P("x")),
    "its chunks": (FROZEN, P(None, "y")),
}


def test_an_array_of_which_anything_changed_is_written(auto_mesh: Mesh, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "1", {"w": cut(FROZEN, auto_mesh, P("x"))})
    for name, (data, spec) in DIFFERENT.items():
        tree = {"w": cut(data, auto_mesh, spec)}
        checkpoint.save(tmp_path / name, tree, base=tmp_path / "1")
        assert linked_in(tmp_path / name) == set(), name
        check_holds(tmp_path / name, tree)


def test_sources_are_written(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", FROZEN)
    tree = {"w": np.load(tmp_path / "w.npy", mmap_mode="r")}
    checkpoint.save(tmp_path / "1", tree)
    checkpoint.save(tmp_path / "2", tree, base=tmp_path / "1")
    assert linked_in(tmp_path / "2") == set()
    checkpoint.verify(tmp_path / "2")


ERRORS = {errno.EMLINK: 5, errno.ENOSYS: 0}


@pytest.mark.parametrize(("number", "after"), ERRORS.items(), ids=map(errno.errorcode.get, ERRORS))
def test_what_cannot_be_linked_is_written(
    auto_mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, after: int
) -> None:
    """Also if some files of a block could be linked."""
    tree: dict[str, Any] = {"frozen": cut(FROZEN, auto_mesh, P("x")), "numpy": TRAINED}
    links, link = [], os.link

    def refuses(source: str, path: str) -> None:
        links.append(path)
        if len(links) > after:
            raise OSError(number, os.strerror(number), source, None, path)
        link(source, path)

    checkpoint.save(tmp_path / "1", tree)
    monkeypatch.setattr(directory.os, "link", refuses)
    checkpoint.save(tmp_path / "2", tree, base=tmp_path / "1", max_workers=1)
    assert len(links) > after
    blocks = sum(file.st_nlink > 1 for files in files_of(tmp_path / "2").values() for file in files)
    assert blocks <= after
    check_holds(tmp_path / "2", tree)


def shortened(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flipped(file: Path) -> None:
    file.write_bytes(flip(file.read_bytes(), 5))


def written_later(file: Path) -> None:
    flipped(file)
    os.utime(file, ns=(time.time_ns() + 10**9,) * 2)


def symbolic(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


@pytest.mark.parametrize("damage", [shortened, written_later, Path.unlink, symbolic])
def test_a_file_of_the_base_that_changed_is_written(
    auto_mesh: Mesh, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """And with it its block; the other blocks are linked."""
    tree = {"frozen": cut(FROZEN, auto_mesh, P("x"))}
    checkpoint.save(tmp_path / "1", tree)
    damage(next(tmp_path.glob("1/data-*/*.frozen/c.6.0")))
    checkpoint.save(tmp_path / "2", tree, base=tmp_path / "1")
    files = {file.name: file.stat().st_nlink for file in tmp_path.glob("2/data-*/*.frozen/c*")}
    assert files.pop("c.6.0") == 1
    assert sum(links == 1 for links in files.values()) < len(files) / 2
    check_holds(tmp_path / "2", tree)


def test_damage_in_a_shared_file_shows_in_each_checkpoint_and_says_so(
    auto_mesh: Mesh, tmp_path: Path
) -> None:
    tree = {"frozen": cut(FROZEN, auto_mesh, P())}
    paths = [tmp_path / "1", tmp_path / "2", tmp_path / "3"]
    checkpoint.save(paths[0], tree)
    for base, path in itertools.pairwise(paths):
        checkpoint.save(path, tree, base=base)
    file = sorted(paths[2].glob("data-*/*.frozen/c*"))[0]
    flipped(file)
    for path in paths:
        with pytest.raises(CorruptionError, match="has 3 hard links, so verify what shares it too"):
            checkpoint.verify(path)
    name = re.escape(str(file))
    message = (
        rf"array frozen, chunk c\.\d+\.0: {name} is damaged: its CRC-32C is [0-9a-f]{{8}}, "
        r"not [0-9a-f]{8}; the file has 3 hard links, so verify what shares it too$"
    )
    with pytest.raises(CorruptionError, match=message):
        checkpoint.restore(paths[2])


def test_inspect_tells_own_and_shared_bytes(auto_mesh: Mesh, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "1", {"frozen": FROZEN, "trained": TRAINED})
    assert checkpoint.inspect(tmp_path / "1").shared_nbytes == 0
    after = {"frozen": FROZEN, "trained": TRAINED + 1}
    checkpoint.save(tmp_path / "2", after, base=tmp_path / "1")
    shared = checkpoint.inspect(tmp_path / "2")
    assert shared.shared_nbytes == sum(file.st_size for file in files_of(tmp_path / "2")["frozen"])
    assert shared.summary[0].startswith(
        "2 leaves, 2.5 KiB (2.1 KiB in files with several hard links); "
    )
    shutil.rmtree(tmp_path / "2")
    assert shared.shared_nbytes == 0


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices are accelerators to gda."""
    for module in (written_blocks, to_host):
        monkeypatch.setattr(module, "is_host", lambda device: False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("accelerators")
def test_an_accelerator_copies_only_what_changed(
    auto_mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the arrays may be deleted when the call returns."""
    copied: list[int] = []
    keep = saved_leaves._kept

    def counted(block: saved_leaves.Block) -> Any:
        copied.append(block.data.nbytes)
        return keep(block)

    monkeypatch.setattr(saved_leaves, "_kept", counted)
    frozen, trained = (cut(x, auto_mesh, P("x")) for x in (FROZEN, TRAINED))
    checkpoint.save(tmp_path / "1", {"frozen": frozen, "trained": trained})
    after = cut(TRAINED + 1, auto_mesh, P("x"))
    tree = {"frozen": frozen, "trained": after}
    pending = checkpoint.save_async(tmp_path / "2", tree, base=tmp_path / "1")
    frozen.array.delete()
    after.array.delete()
    pending.result()
    assert sum(copied) == TRAINED.nbytes
    assert linked_in(tmp_path / "2") == {"frozen"}
    check_holds(tmp_path / "2", {"frozen": FROZEN, "trained": TRAINED + 1})


@pytest.mark.usefixtures("accelerators")
def test_a_store_without_links_keeps_all_that_an_accelerator_has(
    auto_mesh: Mesh, tmp_path: Path
) -> None:
    frozen, path = cut(FROZEN, auto_mesh, P("x")), ts.KvStore.open({"driver": "memory"}).result()
    checkpoint.save(tmp_path, {"frozen": frozen})
    pending = checkpoint.save_async(path, {"frozen": frozen}, base=tmp_path)
    frozen.array.delete()
    pending.result()
    np.testing.assert_array_equal(checkpoint.restore(path)["frozen"], FROZEN)


@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.save_async])
def test_a_base_must_be_there(tmp_path: Path, save: Callable[..., Any]) -> None:
    message = re.escape(f"there is no checkpoint at {tmp_path / '1'}: no such directory")
    with pytest.raises(CheckpointNotFoundError, match=message):
        save(tmp_path / "2", {"w": FROZEN}, base=tmp_path / "1")
    assert not (tmp_path / "2").exists()


def test_an_object_store_gets_everything_written(tmp_path: Path) -> None:
    store = ts.KvStore.open({"driver": "memory"}).result()
    checkpoint.save(store / "1/", {"w": FROZEN})
    checkpoint.save(store / "2/", {"w": FROZEN}, base=store / "1/")
    checkpoint.save(tmp_path / "3", {"w": FROZEN}, base=store / "2/")
    checkpoint.save(store / "4/", {"w": FROZEN}, base=tmp_path / "3")
    for path in (store / "2/", tmp_path / "3", store / "4/"):
        np.testing.assert_array_equal(checkpoint.restore(path)["w"], FROZEN)
        checkpoint.verify(path)


class Dead(BaseException):
    """The file system of a process that has ended."""


@tried("a process ends at a step of a save with a base", sample=1)
def test_a_save_that_dies_leaves_its_base_whole(
    auto_mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: Trials
) -> None:
    tree = tree_at(1, auto_mesh)
    checkpoint.save(tmp_path / "1", tree)

    def dies(is_first: bool, name: str, arguments: Arguments) -> None:
        raise Dead

    def save(path: Path, disk: Disk) -> None:
        disk.install(monkeypatch.setattr)
        try:
            checkpoint.save(path, tree, base=tmp_path / "1", overwrite=True, max_workers=1)
        finally:
            Disk().install(monkeypatch.setattr)

    whole = Disk()
    save(tmp_path / "whole", whole)
    assert "link" in [name for name, _ in whole.steps]
    for at in trials.of(range(len(whole.steps))):
        path = tmp_path / f"at {at}"
        with pytest.raises(Dead):
            save(path, Disk(dies, at))
        trials.count("new" if (path / "manifest.json").exists() else "none")
        check_holds(tmp_path / "1", tree)
        save(path, Disk())
        assert linked_in(path) == LINKED | {"trained"}
        check_holds(path, tree)


# Several processes.


def save_twice(folder: Path, unlinkable: int | None) -> None:
    """Save with a base; one process cannot link."""
    with pytest.MonkeyPatch.context() as patch:
        limit_sizes(patch, 256, 128, 128)
        mesh = mesh_of({"x": 8})
        frozen = cut(FROZEN, mesh, P("x"))
        partly = FROZEN.copy()
        partly[-1, -1] += 1  # of the last process
        tree = {"frozen": frozen, "partly": frozen, "numpy": FROZEN}
        checkpoint.save(folder / "1", tree)
        if jax.process_index() == unlinkable:
            patch.setattr(directory.os, "link", _refuses)
        tree["partly"] = cut(partly, mesh, P("x"))
        checkpoint.save_async(folder / "2", tree, base=folder / "1").result()


def _refuses(source: str, path: str) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM), source, None, path)


@pytest.mark.parametrize("unlinkable", [None, 1])
def test_processes_decide_alike_and_one_that_cannot_link_writes_its_own(
    tmp_path: Path, process_pool: Callable[..., Pool], unlinkable: int | None
) -> None:
    process_pool(2, devices=4).run(save_twice, tmp_path, unlinkable)
    links = {
        name: [file.st_nlink for file in files] for name, files in files_of(tmp_path / "2").items()
    }
    assert set(links["partly"]) == {1}
    assert set(links["numpy"]) == {2 if unlinkable is None else 1}  # process 1 writes it
    assert links["frozen"].count(1) == (0 if unlinkable is None else len(links["frozen"]) / 2)
    partly = FROZEN.copy()
    partly[-1, -1] += 1
    check_holds(tmp_path / "2", {"frozen": FROZEN, "partly": partly, "numpy": FROZEN})
    check_holds(tmp_path / "1", {"frozen": FROZEN, "partly": FROZEN, "numpy": FROZEN})


@pytest.mark.processes(2, devices=4)
def test_another_base_in_one_process_is_an_error_in_all(shared_tmp_path: Path) -> None:
    checkpoint.save(shared_tmp_path / "1", {"w": FROZEN})
    base = shared_tmp_path / f"{jax.process_index() + 1}"
    with pytest.raises(gda.DisagreementError, match="base"):
        checkpoint.save(shared_tmp_path / "3", {"w": FROZEN}, base=base)
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.save(shared_tmp_path / "3", {"w": FROZEN}, base=shared_tmp_path / "2")
    assert not (shared_tmp_path / "3").exists()
