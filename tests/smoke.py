"""Try gda as it is installed, with no or all extras: ``python -I tests/smoke.py [all]``.

``nox -s package`` runs it in an environment of each kind.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gda

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
MESH = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("x", "y"))
DATA = np.arange(16, dtype=np.float32).reshape(8, 2)


def core() -> None:
    package = Path(gda.__file__).parent
    assert not package.is_relative_to(ROOT) or ".nox" in package.parts, package
    assert gda.__version__ == version("jax-gda")
    assert (package / "py.typed").is_file()
    assert (package / "__init__.pyi").is_file()
    g = gda.GlobalArray.from_source(DATA, MESH, P("x", "y"))
    np.testing.assert_array_equal(gda.to_numpy(g.reshard(P("y"))), DATA)
    assert gda.show.svg(g).startswith("<svg")
    picture = "show --shape 64x64 --dtype f32 --mesh x=8 --spec x"
    assert b"8 devices" in output(BIN / "gda", *picture.split())
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text("import gda, jax; gda.launch.initialize(); print(jax.process_count())")
        assert b"[1] 2" in output(sys.executable, "-m", "gda.launch", "-n", "2", program)


def nothing() -> None:
    g = gda.GlobalArray.from_source(DATA, MESH, P("x", "y"))
    for extra, use in {
        "progress": lambda: gda.GlobalArray.from_source(DATA, MESH, P("x"), progress=True),
        "checkpoint": lambda: gda.checkpoint.save("unused", {"g": g}),
        "rehearse": lambda: gda.rehearsal_mesh("v5e:2x2", {"x": 4}),
    }.items():
        message = ""
        try:
            use()
        except ImportError as error:
            message = str(error)
        command = f"pip install 'jax-gda[{extra}]'"
        assert command in message, message or f"the extra {extra} is installed"


def checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        gda.checkpoint.save(folder, {"g": gda.GlobalArray.from_source(DATA, MESH, P("x"))})
        restored = gda.checkpoint.restore(folder, mesh=MESH, specs=P("y"))
        np.testing.assert_array_equal(gda.to_numpy(restored)["g"], DATA)


def progress() -> None:
    gda.GlobalArray.from_source(DATA, MESH, P("x"), progress=True)


def all_of_them() -> None:
    for each in (checkpoint, progress):
        each()
    installed("orbax", "importlinter", "nox", "pyright")
    installed("material", "mkdocs", "mkdocstrings_handlers")
    output(BIN / "ruff", "check", ROOT / "gda")


def installed(*modules: str) -> None:
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def output(*command: str | Path) -> bytes:
    folder = tempfile.gettempdir()
    return subprocess.run([*command], check=True, cwd=folder, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    core()
    all_of_them() if "all" in sys.argv else nothing()
