"""``gda plan`` of one array, as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import Run, exit_code

EXAMPLE = (
    *("plan", "--shape", "65536x8192", "--dtype", "bfloat16"),
    *("--mesh", "data=64,model=16", "--devices-per-process", "8"),
)


def test_one_array(run: Run) -> None:
    assert run.printed(*EXAMPLE, "--spec", "data,model", "--no-picture") == (
        "array         bfloat16[65536,8192], 1.0 GiB\n"
        "mesh          data=64,model=16: 1,024 devices in 128 processes of 8\n"
        "spec          P('data', 'model')\n"
        "\n"
        "shard shape   (1024, 512)\n"
        "blocks        1,024 distinct, each on 1 device\n"
        "per device    1.0 MiB\n"
        "per process   8.0 MiB in 8 blocks\n"
        "all devices   1.0 GiB: the array once\n"
    )


def test_padding(run: Run) -> None:
    args = ("plan", "--shape", "5x4", "--dtype", "int4", "--mesh", "x=4,y=2", "--spec", "x")
    args = (*args, "--devices-per-process", "4", "--no-picture")
    out = run.printed(*args, "--pad")
    for line in (
        "padding       to (8, 4): 12 B, 60 % more on all devices\n",
        "per process   16 B; 2 B to 8 B of it distinct (2 blocks)\n",
        "all devices   32 B: the array 2 times, and padding\n",
    ):
        assert line in out
    assert "5 is not divisible by 4" in run.refusal(*args)
    args = (*EXAMPLE, "--spec", "data,model", "--no-picture")
    assert run(*args, "--pad") == run(*args)  # where all divides


def test_many_axes_in_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    base = ("plan", "--shape", "1024x1024x4", "--dtype", "f32")
    mesh = ",".join(f"a_long_name_of_an_axis_{i}=2" for i in range(17))
    spec = "+".join(f"a_long_name_of_an_axis_{i}" for i in range(4))
    args = (*base, "--mesh", mesh, "--spec", f"_,{spec}")
    out = run.printed(*args, "--devices-per-process", "4")
    assert max(map(len, out.splitlines())) <= 80
    assert out.split("spec  ")[0].count("_axis_") == 17


# Pictures.


def test_a_picture_follows_the_words(run: Run) -> None:
    words = run.printed(*EXAMPLE, "--spec", "data,model", "--no-picture")
    plain = run.printed(*EXAMPLE, "--spec", "data,model")
    assert plain.startswith(f"{words}\n")
    assert max(map(len, plain.splitlines())) <= 80
    picture = plain.removeprefix(words)
    assert "│ 64512:65536, 7680:8192   device 1023   process 127 │" in picture
    assert "mesh" not in picture  # printed above


# Bad inputs.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"--spec": "dat"}, "; did you mean 'data'?"),
        ({"--shape": f"{2**62}x6"}, "this array takes 2**63 bytes or more on all devices"),
        ({"--mesh": "x=4194305"}, "a plan is for at most 4,194,304 devices"),
        ({"--spec": "x y"}, "--spec: the name of a mesh axis was expected, or _ for a dimension"),
        ({"--devices-per-process": "3"}, "3 devices per process do not divide the 8 devices of th"),
    ],
)
def test_mistakes(run: Run, args: dict[str, str], message: str) -> None:
    good = {"--shape": "8x6", "--dtype": "f32", "--mesh": "data=4,model=2", "--spec": "data,model"}
    words = [word for pair in {**good, **args}.items() for word in pair]
    err = run.refusal("plan", *words)
    assert message in err
    assert err.startswith("gda: ")
    assert err.count("\n") <= 3


def test_missing_options_are_named(run: Run) -> None:
    assert run.refusal("plan", "--shape", "8", "--mesh", "x=4") == (
        "gda: give --shape, --dtype, --mesh and --spec for one array, or --tree FILE for a model\n"
    )


WORDS = st.one_of(
    st.sampled_from(
        ["8x6", "()", "8", "0", "x=4,y=2", "x=6", "y=8", "x", "y", "x,y", "x+y", "_", "f32", "i4"]
    ),
    st.text("0123456789xy=,:()[]{}_+-'P .", max_size=12),
    st.text(max_size=6),
    st.integers(-(10**40), 10**40).map(str),
)
OPTIONS = ["--shape", "--dtype", "--mesh", "--spec", "--devices-per-process"]


@given(
    st.dictionaries(st.sampled_from(OPTIONS), WORDS),
    st.sampled_from([["--no-picture"], ["--pad"], []]),
    st.booleans(),
)
def test_any_words_give_an_answer_or_a_message(
    changes: dict[str, str], kind: list[str], is_joined: bool
) -> None:
    good = {"--shape": "8x6", "--dtype": "f32", "--mesh": "x=4,y=2", "--spec": "x"}
    pairs = {**good, **changes}.items()
    words = [f"{option}={value}" for option, value in pairs]
    if not is_joined:
        words = [word for pair in pairs for word in pair]
    assert exit_code("plan", *words, *kind) in (0, 2)


# As a program.


def test_the_installed_command() -> None:
    script = Path(sys.executable).parent / "gda"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    array = ["--shape", "64x8", "--dtype", "bf16", "--mesh", "x=8", "--spec", "x"]
    done = subprocess.run([script, "plan", *array], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"array         bfloat16[64,8], 1.0 KiB\n")
