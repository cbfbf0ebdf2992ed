"""``gda reshard --tree``: the moves of a whole model to other devices."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run, document_of
from hypothesis import given
from hypothesis import strategies as st
from trials import rarely

from gda import ShardGrid
from gda.cli.layout_options import read_text
from gda.planning import moves as planned_moves
from gda.planning.model import plan_model
from gda.planning.moves import ModelMoves

pytestmark = pytest.mark.no_jax

LLAMA = Path(__file__).parents[2] / "examples" / "transformer_7b.json"

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


def moved(path: Path, *args: str) -> dict[str, Any]:
    """Return what a command says with --json."""
    return document_of("reshard", "--tree", str(path), *args)


def test_fewer_hosts(run: Run, write: Callable[..., Path]) -> None:
    path = write(MODEL)
    code, out, err = run("reshard", "--tree", path, *FEWER)
    assert (code, err) == (0, "")
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


def test_nothing_moves(run: Run, write: Callable[..., Path]) -> None:
    code, out, err = run("reshard", "--tree", write(MODEL), "--to-mesh", "data=4,model=2")
    assert (code, err) == (0, "")
    assert "\nheld twice    0 B\n" in out
    assert "\n\nlinks         none: no process sends to another\n" in out
    assert "moves within" not in out


def test_padding_that_was_asked_for(run: Run, write: Callable[..., Path]) -> None:
    args = ("reshard", "--tree", write(MODEL), *FEWER)
    without, out = run(*args)[1], run(*args, "--pad")[1]
    head = "\ndo not divide 3 parameters; gda.PaddedArray takes such sizes, padded as below\n"
    assert without.replace(head, "\npadded        3 parameters\n") == out


def test_a_sampler_with_its_own_specs(
    run: Run, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {
        name: {"shape": MODEL["parameters"][name]["shape"], "spec": ["tp"]}
        for name in reversed(MODEL["parameters"])
    }
    sampler = {"mesh": {"tp": 2}, "dtype": "f32", "parameters": parameters}
    to = ("--to-tree", str(write(sampler, "sampler.json")))
    document = moved(write(MODEL), *to, "--devices-per-process", "2")
    assert document["target"]["mesh"] == {"tp": 2}
    (embed,) = (row for row in document["parameters"] if row["name"] == "embed")
    assert (embed["before"]["spec"], embed["after"]["spec"]) == (["model", "data"], ["tp"])
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = run("reshard", "--tree", write(MODEL), *to)
    assert code == 0
    assert "P('model', 'data') to P('tp')" in out
    # --to-mesh overrides the mesh of that file.
    document = moved(write(MODEL), *to, "--to-mesh", "tp=4")
    assert document["target"]["num_devices"] == 4


def test_more_than_are_shown(run: Run) -> None:
    args = ("--to-mesh", "data=12,model=4", "--devices-per-process", "1")
    code, out, err = run("reshard", "--tree", LLAMA, *args)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "\n… 56 more processes; --json lists them\n" in out
    document = moved(LLAMA, *args)
    assert len(document["processes"]) == 64


def test_too_many_moves(
    run: Run, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(MODEL)
    whole = moved(path, *FEWER)
    monkeypatch.setattr(planned_moves, "MOST_MOVES", 1)
    code, out, _ = run("reshard", "--tree", path, *FEWER)
    assert code == 0
    assert "\nnote          links " in out
    document = moved(path, *FEWER)
    assert (document["links"], document["num_links"]) == (None, None)
    assert document["nbytes_moved"] == whole["nbytes_moved"]


def test_equal_parameters_are_planned_once() -> None:
    file = read_text("--tree", str(LLAMA))
    plans = [plan_model(file, mesh, 8, pad=True) for mesh in (None, {"data": 12, "model": 4})]
    moves = ModelMoves(*plans)
    assert len(moves.source.parameters) == 291
    assert len(moves.plans) == 6


# Properties: the definition, on the elements of the whole arrays.

MESHES = [{"x": 4, "y": 2}, {"x": 3, "y": 2}, {"y": 2, "x": 1}, {"x": 2, "y": 5}]
SPECS: list[list[Any]] = [
    [],
    ["x"],
    ["y"],
    [None, "x"],
    ["y", "x"],
    [["x", "y"]],
    [None, ["y", "x"]],
]
SHAPES = [[8, 12], [7, 10], [5, 3], [0, 4]]


def elements(shape: list[int], mesh: dict[str, int], spec: list[Any]) -> list[set[int]]:
    """Return the elements that each device holds."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    indices = ShardGrid(shape, mesh, spec, pad=True).indices()
    return [set(whole[index].ravel().tolist()) for index in indices]


def count_moves(
    model: dict[str, Any], mesh: dict[str, int], to: dict[str, int], size: int
) -> Counter[Any]:
    """Return the bytes of a move, by kind, by process and by link."""
    counts: Counter[Any] = Counter()
    for shape, spec in model.values():
        before = elements(shape, mesh, spec)
        after = elements(shape, to, spec)
        at: dict[int, set[int]] = {}
        for device, held in enumerate(before):
            at.setdefault(device // size, set()).update(held)
        for device, needed in enumerate(after):
            process = device // size
            own = needed & (before[device] if device < len(before) else set())
            near = (needed & at.get(process, set())) - own
            far = needed - own - near
            counts["device", device] += 2 * len(needed - own)
            for kind, found in (("kept", own), ("within", near), ("received", far)):
                counts[kind] += 2 * len(found)
                counts[kind, process] += 2 * len(found)
            for sender, held in at.items():
                counts["link", sender, process] += 2 * len(far & held)
    return counts


def words(mesh: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items())


@rarely(2)
@given(
    st.dictionaries(
        st.from_regex(r"[ab]\.[0-9]{1,2}", fullmatch=True),
        st.tuples(st.sampled_from(SHAPES), st.sampled_from(SPECS)),
        max_size=5,
    ),
    st.sampled_from(MESHES),
    st.sampled_from(MESHES),
    st.sampled_from([1, 2]),
)
def test_totals_are_those_of_the_definition(
    tmp_path_factory: pytest.TempPathFactory,
    model: dict[str, tuple[list[int], list[Any]]],
    mesh: dict[str, int],
    to: dict[str, int],
    size: int,
) -> None:
    path = tmp_path_factory.mktemp("model") / "model.json"
    parameters = {name: {"shape": shape, "spec": spec} for name, (shape, spec) in model.items()}
    path.write_text(json.dumps({"mesh": mesh, "dtype": "f16", "parameters": parameters}))
    args = ("--to-mesh", words(to), "--devices-per-process", str(size))
    document = moved(path, *args)
    counts = count_moves(model, mesh, to, size)
    assert document["nbytes_kept"] == counts["kept"]
    assert document["nbytes_within_processes"] == counts["within"]
    assert document["nbytes_between_processes"] == counts["received"]
    for process in document["processes"]:
        for kind in ("kept", "within", "received"):
            assert process[f"nbytes_{kind}"] == counts[kind, process["process"]]
    devices = [counts["device", device] for device in range(math.prod(to.values()))]
    mean = sum(devices) / len(devices)
    assert document["received_by_device"] == {"largest": max(devices), "mean": mean}
    processes = [counts["received", process] for process in range(len(devices) // size)]
    assert document["received_by_process"]["largest"] == max(processes)
    sent, received = Counter(), Counter()
    for link in document["links"]:
        sent[link["source_process"]] += link["nbytes"]
        received[link["target_process"]] += link["nbytes"]
    for process in document["processes"]:
        assert process["nbytes_sent"] == sent[process["process"]]
        assert process["nbytes_received"] == received[process["process"]]

    # The rows add up to the whole, and have every parameter once.
    rows = document["parameters"]
    assert sorted(name for row in rows for name in row["names"]) == sorted(model)
    for kind in ("kept", "within_processes", "between_processes"):
        assert sum(row[f"nbytes_{kind}"] for row in rows) == document[f"nbytes_{kind}"]
    for side, layout in (("before", "source"), ("after", "target")):
        padding = sum(row[side]["nbytes_padding"] for row in rows)
        assert padding == document[layout]["nbytes_padding"]


def test_links_are_those_of_the_definition(write: Callable[..., Path]) -> None:
    # Each element is on one device, so nothing has a choice of senders.
    model = {"u": ([7, 10], ["y", "x"]), "v": ([8, 12], [["x", "y"]]), "w": ([5, 3], [["y", "x"]])}
    mesh, to = {"x": 4, "y": 2}, {"x": 3, "y": 2}
    parameters = {name: {"shape": shape, "spec": spec} for name, (shape, spec) in model.items()}
    path = write({"mesh": mesh, "dtype": "f16", "parameters": parameters})
    document = moved(path, "--to-mesh", words(to), "--devices-per-process", "2")
    counts = count_moves(model, mesh, to, 2)
    links = {("link", *list(link.values())[:2]): link["nbytes"] for link in document["links"]}
    assert links == {key: nbytes for key, nbytes in counts.items() if key[0] == "link" and nbytes}
    sizes = [link["nbytes"] for link in document["links"]]
    assert sizes == sorted(sizes, reverse=True)


def test_memory_is_that_of_the_definition(write: Callable[..., Path]) -> None:
    shapes = {"u": [64, 4], "v": [8, 8], "w": [4, 60], "same": [16]}
    parameters = {name: {"shape": shape, "spec": ["x"]} for name, shape in shapes.items()}
    parameters["same"]["spec"] = []
    path = write({"mesh": {"x": 8}, "dtype": "f32", "parameters": parameters})
    document = moved(path, "--to-mesh", "x=3", "--devices-per-process", "1")
    before = {name: 4 * -(-shape[0] // 8) * math.prod(shape[1:]) for name, shape in shapes.items()}
    after = {name: 4 * -(-shape[0] // 3) * math.prod(shape[1:]) for name, shape in shapes.items()}
    before["same"] = after["same"] = 64
    extra = sum(after.values()) - 64
    assert document["nbytes_peak_extra"] == extra
    assert document["nbytes_peak_per_device"] == sum(before.values()) + extra
    assert document["nbytes_peak_per_process"] == sum(before.values()) + extra
    held = peak = sum(before.values())
    for name in ("u", "v", "w"):
        peak = max(peak, held + after[name])
        held += after[name] - before[name]
    assert document["nbytes_peak_one_by_one"] == peak


# Bad inputs.


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "--to-mesh and --to-tree are missing; give one or both\n"),
        (("--to-mesh", "x=3"), "after the reshard, --to-mesh: x=3 has no axis 'model', which sh"),
        (("--to-mesh", "x"), "--to-mesh: the size of axis 'x' was expected"),
        (("--to-mesh", "data=2,model=2", "--to-spec", "x"), "--to-spec cannot be used with --tree"),
        (("--to-mesh", "x=3", "--shape", "8"), "--shape cannot be used with --tree"),
        (("--to-tree", ""), "--to-tree: the path of a file was expected, or - for stdin\n"),
        (
            ("--to-mesh", "data=3,model=2", "--devices-per-process", "4"),
            "after the reshard, 4 devices per process do not divide the 6 devices",
        ),
    ],
)
def test_bad_input(run: Run, write: Callable[..., Path], args: tuple[str, ...], said: str) -> None:
    code, out, err = run("reshard", "--tree", write(MODEL), *args)
    assert (code, out) == (2, "")
    assert err.startswith(f"gda: {said}")


def test_another_model(run: Run, write: Callable[..., Path]) -> None:
    parameters = {**MODEL["parameters"], "new": {"shape": [4]}, "norm": {"shape": [8]}}
    parameters.pop("h.0.up")
    other = write({**MODEL, "parameters": parameters}, "other.json")
    code, out, err = run("reshard", "--tree", write(MODEL), "--to-tree", other)
    assert (code, out) == (2, "")
    assert err == (
        f"gda: {other} has 3 mistakes:\n"
        "  h.0.up: it is missing; --tree has this parameter\n"
        "  norm: float32[8] here, float32[16] in --tree; a move keeps shape and dtype\n"
        "  new: --tree does not have this parameter\n"
    )
    code, _, err = run("reshard", "--to-tree", other, "--to-mesh", "x=2")
    assert (code, err) == (2, "gda: --to-tree is for a model; give --tree too\n")
