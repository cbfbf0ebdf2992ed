"""The moves of an array and of a model, compared with the definition on their elements."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trials import rarely

from gda import ReshardPlan, ShardGrid
from gda.layout.processes import Processes
from gda.planning import moves as planned_moves
from gda.planning.model import in_order_of, plan_model
from gda.planning.moves import ListedMoves, ModelMoves
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.model_file import ModelText

pytestmark = pytest.mark.no_jax

LLAMA = Path(__file__).parents[2] / "examples" / "transformer_7b.json"


# One array.


def plan_of(shape: tuple[int, ...], *layouts: Any, devices_per_process: int) -> ReshardPlan:
    """Return the plan of an array of four bytes an element, from one mesh and spec to another."""
    grids = []
    for mesh, spec in layouts:
        processes = Processes(np.arange(math.prod(mesh.values())) // devices_per_process)
        grids.append(ShardGrid(shape, mesh, spec, process_of=processes))
    return ReshardPlan(*grids, itemsize=4)


def test_the_document_of_an_array() -> None:
    mesh = {"x": 4, "y": 2}
    plan = plan_of((64, 64), (mesh, ("x", "y")), (mesh, ("x",)), devices_per_process=4)
    assert ListedMoves(plan, plan.num_moves).document() == {
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


def test_links_that_are_too_many_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = ({"x": 8}, ("x",)), ({"x": 8}, (None, "x"))
    plan = plan_of((64, 64), rows, columns, devices_per_process=2)
    monkeypatch.setattr(planned_moves, "MOST_MOVES", 63)
    document = ListedMoves(plan, plan.num_moves).document()
    assert (document["num_links"], document["links"]) == (None, None)
    assert document["notes"] == ["links are omitted: 64 pieces are too many to list"]
    assert document["largest_sender"] == {"device": 0, "nbytes": 1792}
    monkeypatch.setattr(planned_moves, "MOST_MOVES", 64)
    monkeypatch.setattr(planned_moves, "LISTED", 11)
    document = ListedMoves(plan, plan.num_moves).document()
    assert (document["num_links"], len(document["links"])) == (12, 11)


def test_bytes_sent_in_too_many_moves_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two holders of each block, and pieces of 1, 2 and 3 rows.
    fewer, more = ({"x": 3, "y": 2}, ("x",)), ({"x": 4, "y": 2}, ("x",))
    plan = plan_of((12, 4), fewer, more, devices_per_process=2)
    whole = ListedMoves(plan, plan.num_moves).document()
    monkeypatch.setattr(planned_moves, "MOST_MOVES", plan.num_moves - 1)
    for name in ("sent_by_device", "sent_by_process", "largest_sender"):
        monkeypatch.delattr(ReshardPlan, name)  # and so is a look at all moves
    document = ListedMoves(plan, plan.num_moves).document()
    unknown = ("sent_by_device", "sent_by_process", "largest_sender", "num_links", "links")
    message = f"links and bytes sent are omitted: {plan.num_moves} pieces are too many to list"
    assert document == {**whole, **dict.fromkeys(unknown), "notes": [message]}


# A model.

Model = dict[str, tuple[list[int], list[Any]]]  # shapes and specs by name

MESHES = [{"x": 4, "y": 2}, {"x": 3, "y": 2}, {"y": 2, "x": 1}, {"x": 2, "y": 5}]
SPECS: list[list[Any]] = [
    *([], ["x"], ["y"], [None, "x"], ["y", "x"], [["x", "y"]], [None, ["y", "x"]]),
]
SHAPES = [[8, 12], [7, 10], [5, 3], [0, 4]]


def document_of(
    model: Model, mesh: dict[str, int], to: dict[str, int], size: int, dtype: str = "f16"
) -> dict[str, Any]:
    """Return the document of the moves of a model, with ``size`` devices per process."""
    parameters = {name: {"shape": shape, "spec": spec} for name, (shape, spec) in model.items()}
    file = ModelText(
        "model.json", json.dumps({"dtype": dtype, "mesh": {}, "parameters": parameters})
    )
    moves = ModelMoves(*(plan_model(file, each, size, pad=True) for each in (mesh, to)))
    return moves.document(ListedMoves(moves, moves.num_listed))


def elements(shape: list[int], mesh: dict[str, int], spec: list[Any]) -> list[set[int]]:
    """Return the elements that each device holds."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    indices = ShardGrid(shape, mesh, spec, pad=True).indices()
    return [set(whole[index].ravel().tolist()) for index in indices]


def count_moves(model: Model, mesh: dict[str, int], to: dict[str, int], size: int) -> Counter[Any]:
    """Return the bytes of a move, by kind, by process and by link."""
    counts: Counter[Any] = Counter()
    for shape, spec in model.values():
        before, after = elements(shape, mesh, spec), elements(shape, to, spec)
        at: dict[int, set[int]] = {}
        for device, held in enumerate(before):
            at.setdefault(device // size, set()).update(held)
        for device, needed in enumerate(after):
            process = device // size
            own = needed & before[device] if device < len(before) else set()
            near = (needed & at.get(process, set())) - own
            far = needed - own - near
            counts["device", device] += 2 * len(needed - own)
            for kind, found in (("kept", own), ("within", near), ("received", far)):
                counts[kind] += 2 * len(found)
                counts[kind, process] += 2 * len(found)
            for sender, held in at.items():
                counts["link", sender, process] += 2 * len(far & held)
    return counts


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
    model: Model, mesh: dict[str, int], to: dict[str, int], size: int
) -> None:
    document, counts = document_of(model, mesh, to, size), count_moves(model, mesh, to, size)
    assert document["nbytes_kept"] == counts["kept"]
    assert document["nbytes_within_processes"] == counts["within"]
    assert document["nbytes_between_processes"] == counts["received"]
    devices = [counts["device", device] for device in range(math.prod(to.values()))]
    mean = sum(devices) / len(devices)
    assert document["received_by_device"] == {"largest": max(devices), "mean": mean}
    processes = [counts["received", process] for process in range(len(devices) // size)]
    assert document["received_by_process"]["largest"] == max(processes)
    sent, received = Counter(), Counter()
    for link in document["links"]:
        sent[link["source_process"]] += link["nbytes"]
        received[link["target_process"]] += link["nbytes"]
    for each in document["processes"]:
        process = each["process"]
        for kind in ("kept", "within", "received"):
            assert each[f"nbytes_{kind}"] == counts[kind, process]
        assert (each["nbytes_sent"], each["nbytes_received"]) == (sent[process], received[process])

    # The rows add up to the whole, and have every parameter once.
    rows = document["parameters"]
    assert sorted(name for row in rows for name in row["names"]) == sorted(model)
    for kind in ("kept", "within_processes", "between_processes"):
        assert sum(row[f"nbytes_{kind}"] for row in rows) == document[f"nbytes_{kind}"]
    for side, layout in (("before", "source"), ("after", "target")):
        padding = sum(row[side]["nbytes_padding"] for row in rows)
        assert padding == document[layout]["nbytes_padding"]


def test_links_are_those_of_the_definition() -> None:
    # Each element is on one device, so nothing has a choice of senders.
    model: Model = {
        "u": ([7, 10], ["y", "x"]),
        "v": ([8, 12], [["x", "y"]]),
        "w": ([5, 3], [["y", "x"]]),
    }
    layouts = {"x": 4, "y": 2}, {"x": 3, "y": 2}, 2
    found = document_of(model, *layouts)["links"]
    counts = count_moves(model, *layouts)
    links = {("link", *list(link.values())[:2]): link["nbytes"] for link in found}
    assert links == {key: nbytes for key, nbytes in counts.items() if key[0] == "link" and nbytes}
    sizes = [link["nbytes"] for link in found]
    assert sizes == sorted(sizes, reverse=True)


def test_memory_is_that_of_the_definition() -> None:
    model: Model = {"u": ([64, 4], ["x"]), "v": ([8, 8], ["x"]), "w": ([4, 60], ["x"])}
    document = document_of({**model, "same": ([16], [])}, {"x": 8}, {"x": 3}, 1, "f32")

    def nbytes(ways: int) -> dict[str, int]:
        return {
            name: 4 * -(-shape[0] // ways) * math.prod(shape[1:])
            for name, (shape, _) in model.items()
        }

    before, after = nbytes(8), nbytes(3)
    held = peak = sum(before.values()) + 64
    extra = sum(after.values())
    assert document["nbytes_peak_extra"] == extra
    assert document["nbytes_peak_per_device"] == held + extra
    assert document["nbytes_peak_per_process"] == held + extra
    for name in model:
        peak = max(peak, held + after[name])
        held += after[name] - before[name]
    assert document["nbytes_peak_one_by_one"] == peak


def test_equal_parameters_are_planned_once() -> None:
    file = ModelText(str(LLAMA), LLAMA.read_text())
    moves = ModelMoves(
        *(plan_model(file, mesh, 8, pad=True) for mesh in (None, {"data": 12, "model": 4}))
    )
    assert len(moves.source.parameters) == 291
    assert len(moves.plans) == 6


def test_a_target_of_other_parameters_is_refused() -> None:
    def planned(**shapes: list[int]) -> Any:
        parameters = {name: {"shape": shape, "dtype": "f32"} for name, shape in shapes.items()}
        return plan_model(ModelText("m", json.dumps(parameters)), {"x": 2}, None, pad=True)

    source = planned(a=[4], b=[16], c=[2])
    turned = in_order_of(source, planned(c=[2], b=[16], a=[4]), "other.json")
    assert [each.name for each in turned.parameters] == ["a", "b", "c"]
    with pytest.raises(MistakesError) as caught:
        in_order_of(source, planned(b=[8], c=[2], new=[4]), "other.json")
    assert caught.value.lines == (
        "other.json has 3 mistakes:",
        "  a: it is missing; --tree has this parameter",
        "  b: float32[8] here, float32[16] in --tree; a move keeps shape and dtype",
        "  new: --tree does not have this parameter",
    )
