"""Runs that older releases of Orbax write, each installed into an environment of its own.

They need Python 3.11 or 3.12, as ``nox -s torture`` has: JAX of their time has no other wheels.
"""

import subprocess
import venv
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import batch, mesh_of

import gda

# Without the features of newer releases: this is the common part of all of them.
WRITER = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
folder = sys.argv[1]
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
w = np.arange(64, dtype=np.float32).reshape(8, 8)
put = lambda value, spec: jax.device_put(value, NamedSharding(mesh, spec))
tree = {
    "w": put(w, P("x", "y")), "zeros": put(0 * w, P("x")),
    "layers": [{"k": put(w, P())}, (3, None)],
    "half": put(w.astype(jax.numpy.bfloat16), P("y")), "rate": 0.5, "empty": {"d": {}, "l": []},
}
kinds = {"files": {"use_ocdbt": False}, "ocdbt": {}, "zarr3": {"use_zarr3": True}}
for name, options in kinds.items():
    handler = ocp.PyTreeCheckpointHandler(**options)
    ocp.Checkpointer(handler).save(f"{folder}/{name}", tree | {"name": "run 7"})
manager = ocp.CheckpointManager(f"{folder}/manager")
manager.save(1, args=ocp.args.StandardSave(tree))
manager.wait_until_finished()
manager.close()
"""

# Orbax, and the JAX of its time.
RELEASES = {"0.5.20": "0.4.30", "0.6.4": "0.4.35", "0.11.20": "0.8.0"}


@pytest.mark.torture
@pytest.mark.parametrize("release", RELEASES)
def test_a_run_of_an_older_release_is_read(release: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python, version = tmp_path / "venv" / "bin" / "python", RELEASES[release]
    packages = [f"orbax-checkpoint=={release}", f"jax=={version}", f"jaxlib=={version}"]
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    folder = tmp_path / "runs"
    folder.mkdir()
    subprocess.run([python, "-c", WRITER, folder], check=True, capture_output=True)
    w, mesh = batch(8, 8), mesh_of({"x": 8})
    expected = {"w": w, "zeros": 0 * w, "layers": [{"k": w}, [3, None]], "rate": 0.5}
    expected |= {"half": w.astype(jax.numpy.bfloat16), "empty": {"d": {}, "l": []}}
    for name in ("files", "ocdbt", "zarr3", "manager/1"):
        found = gda.load_tree(gda.storage.open_orbax(folder / name), mesh, P(None, "x"), plain=True)
        assert found.pop("name", "run 7") == "run 7"
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
