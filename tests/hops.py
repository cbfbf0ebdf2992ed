"""The length of the way through the package: `python tests/hops.py`.

For each call, it counts the modules of gda that run, and the steps back up. A step back is a pair
of modules: the first calls a function of the second, which it does not import, directly or through
others, so the function was handed to it. Decorators that call what they decorate are no steps.
`-v` lists the modules and the steps.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import ast
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import gda

_DECORATORS = {"gda.arrays.liveness", "gda.layout.boundary", "gda.multihost.agreement"}
_OFFER = (
    "import gda, numpy as np; print(gda.offer({'w': np.ones((8, 8))}).address, flush=True); input()"
)


@cache
def _imports(module: str) -> set[str]:
    """Return the modules that a module imports, also inside its functions, and those of these."""
    if (path := Path(*module.split(".")).with_suffix(".py")).exists():
        nodes = ast.walk(ast.parse(path.read_text()))
        direct = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        named = {f"{node.module}.{each.name}" for node in direct for each in node.names}
        named |= {node.module for node in direct if node.module}
        found = {each for each in named if each.startswith("gda.")}
        return found.union(*map(_imports, found))
    return set()


def hops(call: Callable[[], Any]) -> tuple[set[str], set[tuple[str, str]]]:
    """Return the modules that run in a call, and its steps back: the lower and the higher one."""
    entered: set[str] = set()
    back: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith("gda.") or "<module>" in frame.f_code.co_name:
            return
        entered.add(module)
        caller = frame.f_back
        while caller and not caller.f_globals.get("__name__", "").startswith("gda."):
            caller = caller.f_back
        below = caller.f_globals["__name__"] if caller else module
        if below not in {module, *_DECORATORS} and module not in _imports(below):
            back.add((below, module))

    call()  # the first call also makes what later ones find
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return entered, back


def calls(folder: str, address: str) -> dict[str, Callable[[], Any]]:
    """Return the calls whose ways are counted; a program offers a tree at the address."""
    mesh, other = jax.make_mesh((8,), ("x",)), jax.make_mesh((4, 2), ("a", "b"))
    host = {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "step": 3}
    tree = gda.load_tree(host, mesh, P("x"))
    save, restore = gda.checkpoint.save, gda.checkpoint.restore
    return {
        "checkpoint.save": lambda: save(f"{folder}/a", tree, overwrite=True),
        "checkpoint.restore": lambda: restore(f"{folder}/a", mesh=mesh, specs=P("x")),
        "pull": lambda: gda.pull(address, mesh=mesh, specs=P("x")),
        "reshard_tree": lambda: gda.reshard_tree(tree, other, P("b")),
        "load_tree": lambda: gda.load_tree(host, mesh, P("x")),
        "from_callback": lambda: gda.GlobalArray.from_callback(
            (8, 8), mesh, P("x"), lambda index: host["w"][index]
        ),
    }


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([sys.executable, "-c", _OFFER], **pipes) as program,
    ):
        assert program.stdout
        print("| call | modules entered | steps back |\n|---|---|---|")
        for name, call in calls(folder, program.stdout.readline().strip()).items():
            entered, back = hops(call)
            print(f"| `{name}` | {len(entered)} | {len(back)} |")
            if "-v" in sys.argv:
                print(*sorted(entered), *sorted(map(" calls ".join, back)), sep="\n    ")
        program.communicate("\n")
