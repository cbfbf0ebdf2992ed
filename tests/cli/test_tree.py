"""``gda plan --tree``: the printed tables of a whole model; ``tests/planning`` has its numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Run

pytestmark = pytest.mark.no_jax

SMALL = {
    "mesh": {"data": 4, "model": 2},
    "dtype": "bfloat16",
    "parameters": {
        "layers.0.up": {"shape": [8, 16], "spec": ["model", "data"]},
        "layers.1.up": {"shape": [8, 16], "spec": ["model", "data"]},
        "layers.0.down": {"shape": [16, 8], "spec": [["data", "model"], None]},
        "layers.1.down": {"shape": [16, 8], "spec": [["data", "model"]], "dtype": "f32"},
        "norm": {"shape": [8]},
    },
}


def test_a_small_model(run: Run, write: Callable[[Any], Path]) -> None:
    assert run.printed("plan", "--tree", write(SMALL), "--devices-per-process", "4") == (
        "model         5 arrays of 520 elements, 1.3 KiB\n"
        "mesh          data=4,model=2: 8 devices in 2 processes of 4\n"
        "\n"
        "per device    176 B\n"
        "per process   704 B\n"
        "all devices   1.4 KiB: 1.086 times the model\n"
        "\n"
        "per device  parameter           array and spec                       replicas\n"
        "      64 B  layers.0-1.up (x2)  bfloat16[8,16] P('model', 'data')           1\n"
        "      64 B  layers.1.down       float32[16,8] P(('data', 'model'))          1\n"
        "      32 B  layers.0.down       bfloat16[16,8] P(('data', 'model'))         1\n"
        "      16 B  norm                bfloat16[8] P()                             8\n"
        "\n"
        "Replicated, but could be sharded: this would save 14 B per device.\n"
        "\n"
        "per device  parameter  spec  better spec\n"
        "      14 B  norm       P()   P(('data', 'model'))\n"
    )


VOCABULARY = {
    "mesh": {"data": 4, "model": 2},
    "dtype": "bfloat16",
    "parameters": {
        "embed": {"shape": [50257, 8], "spec": ["data"]},
        "up.0": {"shape": [8, 31], "spec": [None, "model"]},
        "up.1": {"shape": [8, 31], "spec": [None, "model"]},
        "norm": {"shape": [8]},
    },
}


def test_padding(run: Run, write: Callable[[Any], Path]) -> None:
    path = write(VOCABULARY)
    assert "embed: global shape (50257, 8) cannot" in run.refusal("plan", "--tree", path)
    out = run.printed("plan", "--tree", path, "--pad", "--devices-per-process", "4")
    assert out.split("\n\nRepl")[0].endswith(
        "padding       224 B, 0.014 % more, in 3 parameters\n"
        "\n"
        "per device        padding  parameter    array and spec                  replicas\n"
        " 196.3 KiB  96 B, <0.01 %  embed        bfloat16[50257,8] P('data')            2\n"
        "     512 B   128 B, 3.2 %  up.0-1 (x2)  bfloat16[8,31] P(None,                 4\n"
        "                                        'model')\n"
        "      16 B                 norm         bfloat16[8] P()                        8"
    )


def test_models_of_nothing(run: Run, write: Callable[[Any], Path]) -> None:
    out = run.printed("plan", "--tree", write({"mesh": {"x": 2}, "parameters": {}}))
    assert "0 arrays of 0 elements, 0 B\n" in out
    empty = {"parameters": {"w": {"shape": [0, 4], "dtype": "f32", "spec": ["x"]}}}
    assert "Replicated" not in run.printed("plan", "--tree", write(empty), "--mesh", "x=2")


def test_a_model_or_an_array_is_planned(run: Run, write: Callable[[Any], Path]) -> None:
    assert run.refusal("plan", "--tree", write(SMALL), "--shape", "8") == (
        "gda: give --shape, --dtype, --mesh and --spec for one array, or --tree FILE for a model\n"
    )
    assert "No such file or directory: 'none'" in run.refusal("plan", "--tree", "none")
