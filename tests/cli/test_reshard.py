"""``gda reshard`` as a user runs it."""

import re
import sys
from typing import Any

import pytest
from commands import Run, document_of

from gda import ReshardPlan
from gda.cli import facts
from gda.planning import moves as planned_moves

pytestmark = pytest.mark.no_jax

ARRAY = ("--shape", "64x64", "--dtype", "f32")


def reshard(*args: str) -> dict[str, Any]:
    return document_of("reshard", *args)


def test_rows_to_columns(run: Run) -> None:
    args = (*ARRAY, "--mesh", "x=8", "--spec", "x", "--to-spec", "_,x")
    code, out, err = run("reshard", *args, "--devices-per-process", "2", "--no-picture")
    assert (code, err) == (0, "")
    assert out == (
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


def test_fewer_devices(run: Run) -> None:
    args = (*ARRAY, "--mesh", "x=8", "--spec", "x", "--to-mesh", "x=4", "--no-picture")
    code, out, err = run("reshard", *args)
    assert (code, err) == (0, "")
    assert "to            P('x') on x=4\n              4 devices, blocks of (16, 64)\n" in out
    assert "links         none: no process sends to another\n" in out
    assert "process  sends" not in out
    document = reshard(*args, "--devices-per-process", "4", "--to-devices-per-process", "2")
    assert document["source"]["num_processes"] == document["target"]["num_processes"] == 2


def test_padding_before_and_after(run: Run) -> None:
    args = ("--shape", "10x4", "--dtype", "f32", "--mesh", "x=4,y=2", "--spec", "x")
    args = (*args, "--to-mesh", "x=3,y=2", "--no-picture")
    code, out, err = run("reshard", *args, "--pad")
    assert (code, err) == (0, "")
    assert out.startswith(
        "array         float32[10,4], 160 B\n"
        "from          P('x') on x=4,y=2\n"
        "              8 devices, blocks of (3, 4)\n"
        "              padded to (12, 4): 64 B, 20 % more on all devices\n"
        "to            P('x') on x=3,y=2\n"
        "              6 devices, blocks of (4, 4)\n"
        "              padded to (12, 4): 64 B, 20 % more on all devices\n"
        "\n"
        "kept               192 B   60.0 %  on its device already\n"
    )
    assert "all blocks         320 B  100.0 %" in out
    code, out, err = run("reshard", *args)
    assert (code, out) == (2, "")
    assert err.endswith("; or give --pad: padded to (12, 4), 20 % more\n")


def test_nothing_moves(run: Run) -> None:
    args = (*ARRAY, "--mesh", "x=4,y=2", "--spec", "x", "--to-spec", "x", "--no-picture")
    code, out, _ = run("reshard", *args)
    assert code == 0
    assert "kept            32.0 KiB  100.0 %" in out
    assert "extra memory         0 B" in out
    code, out, _ = run("reshard", "--shape", "0", *args[2:])
    assert code == 0
    assert "all blocks           0 B    0.0 %  in 0 pieces\n" in out


def test_for_programs() -> None:
    document = reshard(
        *(*ARRAY, "--mesh", "x=4,y=2", "--spec", "x,y", "--to-spec", "x"),
        *("--devices-per-process", "4"),
    )
    assert document.pop("source")["shard_shape"] == [16, 32]
    assert document.pop("target")["shard_shape"] == [16, 64]
    assert document == {
        "notes": [],
        "nbytes_kept": 16384,
        "nbytes_within_processes": 16384,
        "nbytes_between_processes": 0,
        "nbytes_moved": 16384,
        "num_moves": 16,
        "received_by_device": {"largest": 2048, "mean": 2048.0},
        "sent_by_device": {"largest": 2048, "mean": 2048.0},
        "received_by_process": {"largest": 0, "mean": 0.0},
        "sent_by_process": {"largest": 0, "mean": 0.0},
        "largest_sender": {"device": 0, "nbytes": 2048},
        "largest_receiver": {"device": 0, "nbytes": 2048},
        "nbytes_peak_extra": 4096,
        "num_links": 0,
        "links": [],
    }


def test_too_many_moves_for_links(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    args = (*ARRAY, "--mesh", "x=8", "--spec", "x", "--to-spec", "_,x", "--no-picture")
    monkeypatch.setattr(planned_moves, "MOST_MOVES", 63)
    said = "links are omitted: 64 pieces are too many to list"
    code, out, _ = run("reshard", *args, "--devices-per-process", "2")
    assert code == 0
    assert "device   sends        1.8 KiB" in out
    assert out.endswith(f"\nnote          {said}\n")
    document = reshard(*args, "--devices-per-process", "2")
    assert (document["num_links"], document["links"]) == (None, None)
    assert document["notes"] == [said]
    assert document["largest_sender"] == {"device": 0, "nbytes": 1792}


def test_too_many_moves_to_count_sent_bytes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two holders of each block, and pieces of 1, 2 and 3 rows.
    args = ("--shape", "12x4", "--dtype", "f32", "--mesh", "x=3,y=2", "--spec", "x")
    args = (*args, "--to-mesh", "x=4,y=2", "--devices-per-process", "2")
    whole = reshard(*args)
    monkeypatch.setattr(planned_moves, "MOST_MOVES", whole["num_moves"] - 1)
    for name in ("sent_by_device", "sent_by_process", "largest_sender"):
        monkeypatch.delattr(ReshardPlan, name)  # and so is a look at all moves
    said = f"links and bytes sent are omitted: {whole['num_moves']} pieces are too many to list"
    code, out, err = run("reshard", *args, "--no-picture")
    assert (code, err) == (0, "")
    assert "sends  " not in out
    assert "\ndevice   receives" in out
    assert "\nprocess  receives" in out
    assert " ".join(said.split()) in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    document = reshard(*args)
    unknown = ("sent_by_device", "sent_by_process", "largest_sender", "num_links", "links")
    assert document == {**whole, **dict.fromkeys(unknown), "notes": [said]}


def test_more_links_than_are_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    args = (*ARRAY, "--mesh", "x=8", "--spec", "x", "--to-spec", "_,x", "--no-picture")
    args = (*args, "--devices-per-process", "2")
    for module in (facts, planned_moves):
        monkeypatch.setattr(module, "LISTED", 11)
    assert "… 7 more links; --json lists 11\n" in run("reshard", *args)[1]
    document = reshard(*args)
    assert (document["num_links"], len(document["links"])) == (12, 11)


def test_notes(run: Run) -> None:
    args = ("--shape", "8x8", "--dtype", "int4", "--mesh", "x=2,y=2", "--spec", "x")
    args = (*args, "--to-spec", "x+y", "--no-picture")
    code, out, err = run("reshard", *args)
    assert (code, err) == (0, "")
    assert out.count("note  ") == 1
    small = "an element counts as one byte, as in NumPy; devices may pack several in one"
    document = reshard(*args)
    assert document["source"]["notes"] == document["target"]["notes"] == [small]


# Pictures.


def test_before_and_after(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    args = (*ARRAY, "--mesh", "x=4", "--spec", "x", "--to-spec", "_,x")
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run("reshard", *args)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines.index("before") < lines.index("after")
    assert "│ 0:16, :    device 0 │" in lines

    monkeypatch.setenv("COLUMNS", "140")
    code, out, err = run("reshard", *args)
    lines = out.splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.startswith("before"))
    at = lines[head].index("after")
    assert lines[head].split() == ["before", "after"]
    left = [line[:at].rstrip() for line in lines[head + 1 :]]
    right = [line[at:] for line in lines[head + 1 :]]
    assert "│ 0:16, :    device 0 │" in left
    assert any("device 3" in line for line in right)
    assert {line[at - 3 : at] for line in lines[head:] if len(line) > at} == {"   "}

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, colored, _ = run("reshard", *args)
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == out


# Bad inputs.


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "--to-mesh and --to-spec are missing; give one or both"),
        (("--to-spec", "z"), "after the reshard, spec P('z') shards dimension 0 by mesh axis 'z'"),
        (("--to-spec", "q,zz"), "\nspec P('q', 'zz') shards dimension 1 by mesh axis 'zz', but "),
        (("--to-spec", "(x)"), "if both shard one dimension\n  (x)\n  ^"),
        (("--to-mesh", "x=3"), "after the reshard, global shape (8, 64) cannot be sharded by P('x"),
        (("--to-mesh", "x=4", "--devices-per-process", "8"), "after the reshard, 8 devices per "),
        (("--to-mesh", f"x={2**40}"), "after the reshard, the mesh x=1099511627776 has"),
        (("--to-spec", "x", "--to-devices-per-process", "-1"), "this number must be 0 or more"),
        (("--to-spec", "x", "--spec", "z"), "gda: spec P('z') shards dimension 0"),
    ],
)
def test_bad_input(run: Run, args: tuple[str, ...], said: str) -> None:
    array = ("--shape", "8x64", "--dtype", "f32", "--mesh", "x=8", "--spec", "x")
    code, out, err = run("reshard", *array, *args)
    assert (code, out) == (2, "")
    assert err.startswith("gda: ")
    assert said in err
    assert err.count("\n") <= 3


def test_missing_options_are_named(run: Run) -> None:
    code, out, err = run("reshard", "--shape", "8", "--to-spec", "x")
    assert (code, out) == (2, "")
    assert err == (
        "gda: --dtype, --mesh and --spec are missing; give --shape, --dtype, --mesh and --spec, "
        "and --to-mesh, --to-spec or both; or --tree FILE for a model\n"
    )
