"""Modules and commands that need no JAX, in one process that cannot import it."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

PROGRAM = """
import contextlib, importlib, io, pkgutil, sys, traceback

sys.modules["jax"] = sys.modules["jaxlib"] = None
import gda, gda.testing
from gda.cli import main

def check(heavy, *commands, code=0):
    for command in commands:
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(command.split()) == code, command
    assert not heavy & set(sys.modules), heavy & set(sys.modules)

HEAVY = {"tensorstore", "gda.checkpoint", "hypothesis"}
with contextlib.redirect_stdout(io.StringIO()):
    main([])
check({*HEAVY, "rich", "numpy"})

ARRAY = "--shape 64x8 --dtype bf16 --mesh data=8,model=4 --spec data"
check({*HEAVY, "rich"}, f"show {ARRAY} --devices-per-process 8")

gda.ShardGrid((8,), {"x": 4}, ("x",)).starts
assert gda.show.text((8,), {"x": 4}, ("x",), dtype="bfloat16").startswith("plan (8,) bfloat16\\n")
try:
    gda.ShardGrid((6,), {"x": 4}, ("z",))
except ValueError as error:
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames == ["<module>", "__init__"], frames
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for below in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
        importlib.import_module(below.name)
"""


def test_modules_and_commands_without_jax() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (modules,) = (
        contract["source_modules"]
        for contract in contracts["contracts"]
        if "jax" in contract.get("forbidden_modules", ())
    )
    command = [sys.executable, "-W", "error", "-c", PROGRAM, *modules]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
