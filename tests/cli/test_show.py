"""``gda show`` as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import Run, exit_code

import gda

EXAMPLE = (
    *("show", "--shape", "65536x8192", "--dtype", "bfloat16"),
    *("--mesh", "data=64,model=16", "--spec", "data,model", "--devices-per-process", "8"),
)


def test_a_plan_is_the_picture_of_its_grid(run: Run) -> None:
    mesh, process_of = {"data": 64, "model": 16}, np.arange(1024) // 8
    grid = gda.ShardGrid((65536, 8192), mesh, ("data", "model"), process_of=process_of)
    picture = gda.show.text(grid, dtype="bfloat16")
    assert run.printed(*EXAMPLE) == f"{picture.replace('ShardGrid', 'plan', 1)}\n"


def test_padding_and_packed_bytes(run: Run) -> None:
    args = ("show", "--shape", "5x4", "--dtype", "int4", "--mesh", "x=4,y=2", "--spec", "x")
    out = run.printed(*args, "--pad")
    assert "bytes   4 B per device, 32 B in all, 16 B without replicas\n" in out
    assert "padding 12 of 32 elements, 37.5 %\n" in out
    assert "5 is not divisible by 4" in run.refusal(*args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"--spec": "dat"}, "; did you mean 'data'?"),
        ({"--mesh": "x=4194305"}, "a picture is for at most 4,194,304 devices"),
        ({"--spec": "x y"}, "--spec: the name of a mesh axis was expected, or _ for a dimension"),
        ({"--devices-per-process": "3"}, "3 devices per process do not divide the 8 devices of th"),
    ],
)
def test_mistakes(run: Run, args: dict[str, str], message: str) -> None:
    good = {"--shape": "8x6", "--dtype": "f32", "--mesh": "data=4,model=2", "--spec": "data,model"}
    words = [word for pair in {**good, **args}.items() for word in pair]
    err = run.refusal("show", *words)
    assert message in err
    assert err.startswith("gda: ")
    assert err.count("\n") <= 3


WORDS = st.one_of(
    st.sampled_from(
        ["8x6", "()", "8", "0", "x=4,y=2", "x=6", "y=8", "x", "y", "x,y", "x+y", "_", "f32", "i4"]
    ),
    st.text("0123456789xy=,:()[]{}_+-'P .", max_size=12),
    st.text(max_size=6),
    st.integers(-(10**40), 10**40).map(str),
)
OPTIONS = ["--shape", "--dtype", "--mesh", "--spec", "--devices-per-process"]


@given(st.dictionaries(st.sampled_from(OPTIONS), WORDS), st.sampled_from([["--pad"], []]))
def test_any_words_give_an_answer_or_a_message(changes: dict[str, str], pad: list[str]) -> None:
    good = {"--shape": "8x6", "--dtype": "f32", "--mesh": "x=4,y=2", "--spec": "x"}
    words = [f"{option}={value}" for option, value in {**good, **changes}.items()]
    assert exit_code("show", *words, *pad) in (0, 2)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second in the locale C
def test_the_installed_command(errors: str) -> None:
    script = Path(sys.executable).parent / "gda"
    environment = {**os.environ, "PYTHONIOENCODING": f"ascii:{errors}"}
    array = ["--shape", "64x8", "--dtype", "bf16", "--mesh", "x=8", "--spec", "x"]
    done = subprocess.run([script, "show", *array], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"plan (64, 8) bfloat16\n")
