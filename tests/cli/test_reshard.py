"""``gda reshard`` as a user runs it; ``tests/planning/test_moves.py`` has the numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from running import Run, document_of

pytestmark = pytest.mark.no_jax

LLAMA = Path(__file__).parents[2] / "examples" / "transformer_7b.json"
ROWS = ("--shape", "64x64", "--dtype", "f32", "--mesh", "x=8", "--spec", "x")

MODEL = {
    "mesh": {"data": 4, "model": 2},
    "dtype": "float32",
    "parameters": {
        "embed": {"shape": [50257, 16], "spec": ["model", "data"]},
        "h.0.up": {"shape": [16, 64], "spec": ["data", "model"]},
        "h.1.up": {"shape": [16, 64], "spec": ["data", "model"]},
        "norm": {"shape": [16]},
    },
}
FEWER = ("--to-mesh", "data=3,model=2", "--devices-per-process", "2")


def test_rows_to_columns(run: Run) -> None:
    args = (*ROWS, "--to-spec", "_,x", "--devices-per-process", "2", "--no-picture")
    assert run.printed("reshard", *args) == (
        "array         float32[64,64], 16.0 KiB\n"
        "from          P('x') on x=8\n"
        "              8 devices in 4 processes of 2, blocks of (8, 64)\n"
        "to            P(None, 'x') on x=8\n"
        "              8 devices in 4 processes of 2, blocks of (64, 8)\n"
        "\n"
        "kept             2.0 KiB   12.5 %  on its device already\n"
        "moved            2.0 KiB   12.5 %  within processes\n"
        "                12.0 KiB   75.0 %  between processes\n"
        "all blocks      16.0 KiB  100.0 %  in 64 pieces of 256 B on average\n"
        "extra memory     2.0 KiB  at most on a device\n"
        "\n"
        "A piece is the part of a new block that one device sends or keeps.\n"
        "\n"
        "each               on average  at most\n"
        "device   sends        1.8 KiB  1.8 KiB\n"
        "         receives     1.8 KiB  1.8 KiB\n"
        "process  sends        3.0 KiB  3.0 KiB\n"
        "         receives     3.0 KiB  3.0 KiB\n"
        "\n"
        "busiest links     bytes\n"
        "process 0 to 1  1.0 KiB\n"
        "process 0 to 2  1.0 KiB\n"
        "process 0 to 3  1.0 KiB\n"
        "process 1 to 0  1.0 KiB\n"
        "process 1 to 2  1.0 KiB\n"
        "… 7 more links; --json lists them\n"
    )
    document = document_of("reshard", *args, "--to-devices-per-process", "1")
    assert document["source"]["num_processes"] == 4
    assert document["target"]["shard_shape"] == [64, 8]
    assert (document["target"]["num_processes"], document["num_moves"]) == (8, 64)


def test_padding_before_and_after(run: Run) -> None:
    args = ("--shape", "10x4", "--dtype", "int4", "--mesh", "x=4,y=2", "--spec", "x")
    args = (*args, "--to-mesh", "x=3,y=2", "--no-picture")
    out = run.printed("reshard", *args, "--pad")
    assert out.count("\n              padded to (12, 4): 16 B, 20 % more on all devices\n") == 2
    assert out.count("note  ") == 1
    assert "links         none: no process sends to another\n" in out
    assert "process  sends" not in out
    err = run.refusal("reshard", *args)
    assert err.endswith("; or give --pad: padded to (12, 4), 20 % more\n")


def test_pictures_of_before_and_after(run: Run) -> None:
    out = run.printed("reshard", *ROWS, "--to-mesh", "x=4")
    lines = out.splitlines()
    assert lines.index("before") < lines.index("after")
    assert "│ 0:8, :     device 0 │" in lines
    assert "│ 0:16, :    device 0 │" in lines


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--to-mesh and --to-spec are missing; give one or both"),
        (("--to-spec", "z"), "after the reshard, spec P('z') shards dimension 0 by mesh axis 'z'"),
        (("--to-spec", "(x)"), "if both shard one dimension\n  (x)\n  ^"),
        (("--to-mesh", "x=3"), "after the reshard, global shape (64, 64) cannot be sharded by P('"),
        (("--to-spec", "x", "--spec", "z"), "gda: spec P('z') shards dimension 0"),
        (("--to-spec", "x", "--to-tree", "m"), "gda: --to-tree is for a model; give --tree too\n"),
    ],
)
def test_mistakes(run: Run, args: tuple[str, ...], message: str) -> None:
    err = run.refusal("reshard", *ROWS, *args)
    assert err.startswith("gda: ")
    assert message in err
    assert err.count("\n") <= 3


# A model.


def test_fewer_hosts(run: Run, write: Callable[..., Path]) -> None:
    path = write(MODEL)
    out = run.printed("reshard", "--tree", path, *FEWER)
    assert out == (
        "model         4 parameters, 3.1 MiB\n"
        "from          data=4,model=2: 8 devices in 4 processes of 2\n"
        "to            data=3,model=2: 6 devices in 3 processes of 2\n"
        "\n"
        "kept             1.2 MiB   37.5 %  on its device already\n"
        "moved                0 B    0.0 %  within processes\n"
        "                 1.9 MiB   62.5 %  between processes\n"
        "all blocks       3.1 MiB  100.0 %  in 36 pieces of 87.5 KiB on average\n"
        "\n"
        "per device    393.7 KiB before, 590.5 KiB after\n"
        "held twice    590.5 KiB per device: 984.2 KiB at peak, 1.9 MiB per process\n"
        "              982.7 KiB at peak if each parameter is freed once it has moved\n"
        "padding       64 B, <0.01 % before; 393.7 KiB, 13 % after; on all devices\n"
        "\n"
        "process      keeps  moves within   receives      sends\n"
        "      0  787.4 KiB           0 B  393.6 KiB        0 B\n"
        "      1  393.8 KiB           0 B  787.3 KiB  393.6 KiB\n"
        "      2      128 B           0 B  787.3 KiB  787.3 KiB\n"
        "      3        0 B           0 B        0 B  787.3 KiB\n"
        "\n"
        "busiest links       bytes\n"
        "process 2 to 1  787.3 KiB\n"
        "process 3 to 2  787.3 KiB\n"
        "process 1 to 0  393.6 KiB\n"
        "\n"
        "do not divide 3 parameters; gda.PaddedArray takes such sizes, padded as below\n"
        "\n"
        "  padding after  parameter\n"
        "            array              spec                before       after\n"
        "392.7 KiB, 13 %  embed\n"
        "            float32[50257,16]  P('model', 'data')  (50258, 16)  (50258, 18)\n"
        "  1.0 KiB, 12 %  h.0-1.up (x2)\n"
        "            float32[16,64]     P('data', 'model')  divides      (18, 64)\n"
    )
    head = "\ndo not divide 3 parameters; gda.PaddedArray takes such sizes, padded as below\n"
    padded = out.replace(head, "\npadded        3 parameters\n")
    assert run("reshard", "--tree", path, *FEWER, "--pad") == (0, padded, "")


def test_a_sampler_with_its_own_specs(
    run: Run, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {
        name: {"shape": MODEL["parameters"][name]["shape"], "spec": ["tp"]}
        for name in reversed(MODEL["parameters"])
    }
    sampler = {"mesh": {"tp": 2}, "dtype": "f32", "parameters": parameters}
    both = ("reshard", "--tree", str(write(MODEL)), "--to-tree", str(write(sampler, "s.json")))
    monkeypatch.setenv("COLUMNS", "120")
    out = run.printed(*both)
    assert "P('model', 'data') to P('tp')" in out
    # --to-mesh overrides the mesh of that file.
    for more, devices in ((), 2), (("--to-mesh", "tp=4"), 4):
        document = document_of(*both, *more)
        assert document["target"]["num_devices"] == devices
    (embed,) = (row for row in document["parameters"] if row["name"] == "embed")
    assert (embed["before"]["spec"], embed["after"]["spec"]) == (["model", "data"], ["tp"])


def test_more_than_are_shown(run: Run) -> None:
    args = ("--to-mesh", "data=12,model=4", "--devices-per-process", "1")
    out = run.printed("reshard", "--tree", LLAMA, *args)
    assert max(map(len, out.splitlines())) <= 80
    assert "\n… 56 more processes; --json lists them\n" in out
    out = run.printed("reshard", "--tree", LLAMA, "--to-mesh", "data=16,model=4")
    assert "\nheld twice    0 B\n" in out
    assert "\n\nlinks         none: no process sends to another\n" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--to-mesh", "x=3"), "after the reshard, --to-mesh: x=3 has no axis 'model', which sh"),
        (("--to-mesh", "data=2,model=2", "--to-spec", "x"), "--to-spec cannot be used with --tree"),
        (("--to-tree", ""), "--to-tree: the path of a file was expected, or - for stdin\n"),
    ],
)
def test_mistakes_of_a_model(
    run: Run, write: Callable[..., Path], args: tuple[str, ...], message: str
) -> None:
    err = run.refusal("reshard", "--tree", write(MODEL), *args)
    assert err.startswith(f"gda: {message}")
