"""``gda inspect`` and ``gda verify`` as a user runs them."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of
from running import Run, exit_code

import gda
from gda import cli
from gda.storage.stores.directory import FileStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    mesh = mesh_of({"x": 4, "y": 2})
    tree = {
        "w": cut(batch(8, 4), mesh, P("x")),
        "[bold]": np.arange(3),
        "key": jax.random.key(0),
        "step": 7,
        "rate": float("inf"),
        "raw": b"\0\xff",
        "z": 1 + 2j,
        "name": "a\x1b[2J",
    }
    gda.checkpoint.save(tmp_path / "run", tree)
    return tmp_path / "run"


def test_inspect_prints_the_contents(run: Run, path: Path) -> None:
    out = run.printed("inspect", path)
    assert out == f"{gda.checkpoint.inspect(path)}\n"
    assert "w       float32[8,4]  128 B" in out
    assert "GlobalArray P('x') over {'x': 4, 'y': 2}" in out
    assert "8 leaves, " in out
    assert "\x1b" not in out


def test_inspect_of_an_empty_tree(run: Run, tmp_path: Path) -> None:
    gda.checkpoint.save(tmp_path / "run", {})
    out = run.printed("inspect", tmp_path / "run")
    assert out.startswith("0 leaves, 0 B; ")
    assert run("verify", tmp_path / "run")[0] == 0


def test_verify(run: Run, path: Path) -> None:
    assert run("verify", path) == (0, f"{path} is whole: 8 leaves, 160 B\n", "")
    chunks = sorted(path.glob("data-*/*/c.*"))
    assert len(chunks) == 3
    chunks[0].unlink()
    chunks[1].write_bytes(b"")
    code, out, err = run("verify", path)
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert len(lines) == 2
    assert f"array w, chunk c.0: {chunks[0]} is missing" in lines
    assert any(f"{chunks[1]} has 0 bytes, not " in line for line in lines)
    assert run("inspect", path)[0] == 0  # its manifest is whole
    (path / "manifest.json").write_text("{}")
    for command in ("verify", "inspect"):
        code, out, err = run(command, path)
        assert (code, out) == (1, "")
        assert err == f"{path}/manifest.json does not begin like a manifest of gda\n"


def test_no_checkpoint(run: Run, tmp_path: Path) -> None:
    for command in ("verify", "inspect"):
        message = f"gda: there is no checkpoint at {tmp_path}/x: no such directory\n"
        assert run(command, tmp_path / "x") == (2, "", message)
        code, out, err = run(command, tmp_path)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "it is empty" in err
        assert run(command, "")[0] == 2
        code, out, err = run(command, "nonsense://x/y")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("gda: ")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PermissionError(13, "Permission denied", "/x"), 2, "Permission denied: '/x'"),
        (RuntimeError("overwritten\x1b"), 2, r"gda: overwritten\x1b"),
        (ImportError("needs the extra checkpoint"), 2, "gda: needs the extra checkpoint"),
        (MemoryError(), 2, "gda: MemoryError"),
        (gda.checkpoint.CorruptionError("all", ["one\n", "two"]), 1, "one\\n\ntwo\n"),
    ],
)
def test_errors_are_lines(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, message: str
) -> None:
    def fail(path: Any, **_: Any) -> None:
        raise error

    monkeypatch.setattr("gda.checkpoint.inspect", fail)
    found, out, err = run("inspect", "x")
    assert (found, out) == (code, "")
    assert message in err


@pytest.mark.parametrize("kind", [AttributeError, NotImplementedError, RecursionError])
def test_a_mistake_in_gda_itself_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(path: Any, **_: Any) -> None:
        raise kind("a bug")

    monkeypatch.setattr("gda.checkpoint.inspect", fail)
    with pytest.raises(kind, match="a bug"):
        cli.main(["inspect", "x"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["wrong"], ": invalid choice: 'wrong' ("),
        (["show", "--shape", "8", "--mesh", "x=4"], "arguments are required: --dtype, --spec"),
        (["verify", "a", "--timeou", "3"], "arguments: --timeou 3; did you mean --timeout?"),
        (
            ["rehearse", "a.py:f", "--topology", "cpu:2", "--mesh", "x=2", "--price", "-1"],
            "argument --price: '-1' is not a price above 0; write 2.5 or v5p=4.2, say",
        ),
        (["inspect", "a", "--timeout", "soon"], "'soon' is not a number of seconds above 0; writ"),
    ],
)
def test_wrong_commands(run: Run, args: list[str], message: str) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert message in err


def test_help_and_version(run: Run) -> None:
    out = run.printed()
    assert "inspect" in out
    assert "verify" in out
    assert max(map(len, out.splitlines())) <= 80
    assert run("--help") == (0, out, "")
    assert run("--version") == (0, f"gda {gda.__version__}\n", "")
    words = {"show": "data+model", "inspect": "PATH", "verify": "PATH"}
    words |= {"diff": "exit code", "convert": "--map", "rehearse": "'data=8; data=4,model=2'"}
    words |= {"rollback": "STEP", "hold": "STEP"}
    for command, word in words.items():
        out = run.printed(command, "--help")
        assert word in out
        assert max(map(len, out.splitlines())) <= 80


def test_interrupted(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into = FileStore.read_into
    once = iter([signal.SIGINT])

    def interrupted(*args: Any) -> tuple[int, int]:
        for number in once:
            signal.raise_signal(number)
        return read_into(*args)

    monkeypatch.setattr(FileStore, "read_into", interrupted)
    before = {*threading.enumerate()}
    assert run("verify", path) == (130, "", "")
    assert {*threading.enumerate()} <= before


# As a program.


def test_a_server_that_does_not_answer(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/ck"
        code, out, err = run("inspect", "--timeout", "1", url)
    assert (code, out) == (2, "")
    assert (
        err == f"gda: [Errno 110] no answer within 1 s, retries included: '{url}/manifest.json'\n"
    )


@pytest.mark.parametrize("command", ["same", "other"])
def test_a_reader_that_is_gone_leaves_the_exit_code(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    gda.checkpoint.save(tmp_path / "other", {"step": 1})
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        code = exit_code("diff", path, path if command == "same" else tmp_path / "other")
    assert code == (command == "other")


@pytest.mark.parametrize("command", ["inspect", "--help"])
def test_output_that_is_lost_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        code = exit_code(command, *[path] * (command == "inspect"))
    line = "gda: the output cannot be written: [Errno 28] No space left on device\n"
    assert (code, capsys.readouterr().err) == (2, line)


# In a process of its own, because of a platform that is not there any use is an error.
WITHOUT_DEVICES = """
import sys
from gda.cli import main
assert [main([command, sys.argv[1]]) for command in ("inspect", "verify")] == [0, 0]
import jax
try:
    jax.devices()
except RuntimeError:
    print("no devices")
"""


def test_checkpoints_are_read_without_devices(path: Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "none-such"}
    words = [sys.executable, "-c", WITHOUT_DEVICES, str(path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    whole = f"{path} is whole: 8 leaves, 160 B"
    assert done.stdout == f"{gda.checkpoint.inspect(path)}\n{whole}\nno devices\n"
