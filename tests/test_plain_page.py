"""The table of docs/plain.md: every function that takes arrays, called with plain ones.

After a change of the calls or of the results, write it again with
``XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/test_plain_page.py``.
"""

import contextlib
import inspect
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of

import gda

pytestmark = pytest.mark.docs

PAGE = Path(__file__).parents[1] / "docs" / "plain.md"
BEGIN, END = "<!-- Written by tests/test_plain_page.py. -->\n\n", "\n<!-- The end. -->"

# Each is called with an array, or with a tree of arrays, as x.
CALLS = [
    "gda.load_tree(x, mesh, P('x'))", "gda.load_tree(x, NamedSharding(mesh, P('x')))",
    "gda.prefetch([x], mesh, P('x'))", "gda.prefetch([x], NamedSharding(mesh, P('x')))",
    "gda.checkpoint.restore(saved(x), x)", "gda.checkpoint.restore(saved(x), x, plain=True)",
    "gda.checkpoint.restore(saved(x), mesh=mesh, specs=P('x'))",
    "gda.checkpoint.restore(saved(x), mesh=mesh, specs=P('x'), plain=True)",
    "gda.checkpoint.restore(saved(x))",
    "gda.checkpoint.save(folder, x)", "gda.checkpoint.save_async(folder, x).result()",
    "gda.checkpoint.diff(saved(x), x)",
    "gda.offer(x)", "gda.pull(offered(x), mesh, P('x'))",
    "gda.pull(offered(x), mesh, P('x'), plain=True)",
    "gda.to_jax(x)", "gda.to_numpy(x)", "gda.fingerprint(x)", "gda.check_replicas_agree(x)",
    "gda.check_processes_agree(x)", "gda.memory(x=x)",
    "gda.layouts(x)", "gda.assert_sharded(x)",
    "gda.reshard_tree(x, mesh, P('y'))", "gda.constrain(x, P('y'))",
    "gda.jit(f)(x)", "gda.collectives(f, x)", "gda.assert_collectives(f, x, allow={})",
    "gda.rehearse(f, x)", "gda.assert_fits(f, x, max_peak_bytes=2**20)",
    "gda.abstract(x, mesh, P())",
    "gda.store(x, targets)",
    "gda.storage.save_safetensors(file, x)",
    "gda.storage.lazy(x)", "gda.storage.stack([x])", "gda.storage.concatenate([x])",
    "gda.show(x)", "gda.show.text(x)", "gda.show.svg(x)", "gda.show.html(x)",
    "gda.GlobalArray.from_array(x)", "gda.PaddedArray.from_source(x, mesh, P('x'))",
    "gda.GlobalArray.from_source(x, mesh, P('x'))",
    "gda.compat.host_local_array_to_global_array(x, mesh, P())",
    "gda.compat.global_array_to_host_local_array(x, mesh, P())",
    "gda.compat.host_to_global_device_array(x, mesh=mesh)",
    "gda.compat.global_to_host_array(x)",
    "gda.compat.with_sharding_constraint(x, P('y'), mesh=mesh)",
]  # fmt: skip

# Functions of shapes, paths and settings.
WITHOUT_ARRAYS = {
    "gda.checking_agreement",
    "gda.aligned_empty", "gda.get_shard_shape", "gda.local_rows",
    "gda.get_shard_indices", "gda.get_shard_indices_replica_ids", "gda.rehearsal_mesh",
    "gda.checkpoint.inspect", "gda.checkpoint.open", "gda.checkpoint.follow",
    "gda.checkpoint.verify",
    "gda.storage.open_orbax", "gda.storage.open_safetensors",
}  # fmt: skip

MESH = mesh_of({"x": 4, "y": 2})
DATA = batch(8, 4)


def rows() -> list[str]:
    """Return the rows of the table, with the results that are found now."""
    contained = cut(DATA, MESH, P("x"))
    x = contained.array
    found = []
    for call in CALLS:
        one, tree, containers = cell(call, x), cell(call, {"w": x}), cell(call, {"w": contained})
        if tree == "no":
            cells = [one, "no", cell(call, contained), ""]
        else:
            cells = [one, tree, containers, beside_numbers(call, x)]
        found.append(f"| `{call}` | {' | '.join(cells)} |")
    return found


def called(call: str, x: Any, set_mesh: Mesh = MESH) -> Any:
    """Return the result of a call under a mesh, of an iterator its first element."""
    with (
        tempfile.TemporaryDirectory() as folder,
        jax.set_mesh(set_mesh),
        contextlib.ExitStack() as offers,
    ):
        names = {
            "gda": gda,
            "NamedSharding": NamedSharding,
            "P": P,
            "mesh": MESH,
            "x": x,
            "f": lambda x: jax.tree.map(lambda leaf: leaf * 2, x),
            "folder": folder,
            "file": f"{folder}/model.safetensors",
            "saved": partial(saved, f"{folder}/saved"),
            "offered": lambda x: offers.enter_context(gda.offer(x)).address,
            "targets": dict.fromkeys(x, np.empty_like(DATA))
            if isinstance(x, dict)
            else DATA.copy(),
        }
        result = eval(call, names)
        if isinstance(result, gda.Offer):
            result.close()
        return next(result) if isinstance(result, gda.Prefetched) else result


def saved(folder: str, x: Any) -> str:
    gda.checkpoint.save(folder, x)
    return folder


def cell(call: str, x: Any) -> str:
    """Return the kind of the result; ``no`` if the function does not take ``x``."""
    try:
        result = called(call, x)
    except (TypeError, ValueError, AttributeError):
        return "no"
    if isinstance(x, dict) and not isinstance(result, dict):
        return kind_of(result)
    return kind_of(result["w"] if isinstance(x, dict) else result)


def kind_of(value: Any) -> str:
    kinds = {
        gda.GlobalArray: "`GlobalArray`",
        gda.PaddedArray: "`PaddedArray`",
        jax.Array: "`jax.Array`",
        np.ndarray: "NumPy",
        str: "text",
        type(None): "nothing",
        jax.ShapeDtypeStruct: "shape",
    }
    for kind, text in kinds.items():
        if isinstance(value, kind):
            return text
    name = type(value).__name__
    return "a context manager" if name.startswith("_") else f"`{name}`"


def beside_numbers(call: str, x: jax.Array) -> str:
    """Return what becomes of a number beside the array in a tree."""
    try:
        result = called(call, {"w": x, "step": 3})
    except (TypeError, ValueError, AttributeError):
        return "no"
    if not isinstance(result, dict):
        return "yes"
    return "stays" if type(result["step"]) is int else kind_of(result["step"])


def functions() -> set[str]:
    """Return the public functions of gda, but those that show pictures."""
    return {
        f"{module.__name__}.{name}"
        for module in (gda, gda.checkpoint, gda.storage, gda.show)
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }


def test_table_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    assert shown == rows(), "write it again: python tests/test_plain_page.py"


def test_table_has_every_function() -> None:
    called = {re.match(r"[\w.]+", call)[0] for call in CALLS}  # pyright: ignore
    assert functions() <= called | WITHOUT_ARRAYS


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    head, after = rest.splitlines()[:2], rest.partition(END)[2]
    table = "\n".join([*head, *rows()])
    PAGE.write_text(f"{before}{BEGIN}{table}\n{END}{after}", encoding="utf-8")
