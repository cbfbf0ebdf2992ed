"""The picture of a step: the clock's events, the live bytes, and the file, by its structure."""

import dataclasses
import json
import pickle
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from step_picture import PICTURE, drawing, trace_of_the_page, words_of

import gda
from gda.compiled.collective_times import Interconnect
from gda.compiled.device_clock import Timeline, TimelineEvent
from gda.compiled.devices.device_kinds import kind_named
from gda.compiled.hlo import ProgramMesh, modules_of, read_schedule
from gda.compiled.hlo.live_ranges import LiveRanges
from gda.compiled.seconds import StepSeconds, seconds_of

H100 = kind_named("h100")
MIB = 2**20
LAUNCH = 2e-6  # the start of a kernel is on no track
LOOP = """\
HloModule m, is_scheduled=true, num_partitions=4

%body (p: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %p = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[1024,1024]{1,0} get-tuple-element(%p), index=1
  %dot = bf16[1024,1024]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], bf16[1024,1024]{1,0}) tuple(%i, %dot)
}

%condition (q: (s32[], bf16[1024,1024])) -> pred[] {
  %q = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  ROOT %is_less = pred[] constant(true)
}

ENTRY %main {
  %a = bf16[1024,1024]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (bf16[1024,1024]{1,0}, bf16[4096,1024]{1,0}) all-gather-start(%a), channel_id=1, \
replica_groups=[1,4]<=[4], dimensions={0}, use_global_device_ids=true
  %first = bf16[1024,1024]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %carry = (s32[], bf16[1024,1024]{1,0}) tuple(%zero, %first)
  %loop = (s32[], bf16[1024,1024]{1,0}) while(%carry), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %last = bf16[1024,1024]{1,0} get-tuple-element(%loop), index=1
  %done = bf16[4096,1024]{1,0} all-gather-done(%start)
  ROOT %result = bf16[4096,1024]{1,0} dot(%done, %last), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}
"""
# %first and %dot share their memory with the carry of the loop, %gather has its own.
ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 2097152, page 0, parameter 0, shape |bf16[1024,1024]| at ShapeIndex {}:
 value: <0 a @0> (size=2097152,offset=0): bf16[1024,1024]{1,0}
allocation 1: size 14680064, page 0, preallocated-temp:
 value: <1 start{1} @0> (size=8388608,offset=0): bf16[4096,1024]{1,0}
 value: <2 first @0> (size=2097152,offset=8388608): bf16[1024,1024]{1,0}
 value: <3 dot @0> (size=2097152,offset=10485760): bf16[1024,1024]{1,0}
 value: <4 p{1} (phi) @0> (size=2097152,offset=8388608): bf16[1024,1024]{1,0}
 value: <5 loop{1} (phi) @0> (size=2097152,offset=8388608): bf16[1024,1024]{1,0}
"""


GATHERS = """\
HloModule m, is_scheduled=true, num_partitions=4

ENTRY %main {
  %a = bf16[1024,1024]{1,0} parameter(0)
  %start = (bf16[1024,1024]{1,0}, bf16[4096,1024]{1,0}) all-gather-start(%a), channel_id=1, \
replica_groups=[1,4]<=[4], dimensions={0}, use_global_device_ids=true
  %whole = bf16[4096,1024]{1,0} all-gather(%a), channel_id=2, replica_groups=[1,4]<=[4], \
dimensions={0}, use_global_device_ids=true
  %done = bf16[4096,1024]{1,0} all-gather-done(%start)
  ROOT %both = (bf16[4096,1024]{1,0}, bf16[4096,1024]{1,0}) tuple(%whole, %done)
}
"""


def seconds(text: str = LOOP) -> StepSeconds:
    modules = modules_of(text, ProgramMesh({"data": 4}))
    assert H100.speeds is not None
    links = Interconnect(H100.speeds, hosts=(0, 0, 0, 0))
    ranges = LiveRanges(ASSIGNMENT, modules)
    return seconds_of(read_schedule(modules), H100, links, 1, None, ranges)


def rehearsal(of: StepSeconds | None = None) -> gda.Rehearsal:
    found = gda.rehearse(lambda x: x + 1, np.zeros(8, np.float32))
    sizes = {"peak_bytes": 20 * MIB, "temporary_bytes": 14 * MIB}
    return dataclasses.replace(found, seconds=of or seconds(), **sizes)


def test_a_loop_is_one_turn_and_what_hides_behind_it_is_beside_it() -> None:
    found = seconds()
    (gather,) = [each for each in found.timeline.events if each.track == "over data"]
    (loop,) = [each for each in found.timeline.events if each.track == "loops"]
    products = [each for each in found.timeline.events if each.track == "compute"]
    assert (gather.opcode, gather.begin, gather.nbytes) == ("all-gather", 0.0, 2 * MIB)
    assert (loop.times, len(products)) == (5, 3)
    first, turn, _ = products
    assert first.flops == turn.flops == 2 * 1024**3
    assert first.begin == 0.0
    assert loop.begin == turn.begin >= first.seconds
    turns = 5 * (turn.seconds + LAUNCH)
    assert loop.takes == pytest.approx(turns)
    assert loop.seconds == pytest.approx(turns / 5)
    # The gather goes on after the loop, of which the picture has a turn.
    (wait,) = [each for each in found.timeline.events if each.track == "waits"]
    assert (
        wait.takes == wait.seconds == pytest.approx(gather.takes - turns - first.seconds - LAUNCH)
    )
    assert gather.seconds == pytest.approx(gather.takes - 4 * turns / 5)
    assert wait.begin + wait.seconds == pytest.approx(gather.seconds)
    assert found.estimate == pytest.approx(gather.takes + products[-1].seconds + LAUNCH)


def test_a_collective_begins_when_others_have_left_its_links() -> None:
    found = seconds(GATHERS)
    first, second = [each for each in found.timeline.events if each.track == "over data"]
    (wait,) = [each for each in found.timeline.events if each.track == "waits"]
    assert first.begin == wait.begin == 0.0
    assert first.seconds == wait.seconds == second.begin > 0
    assert found.estimate == pytest.approx(second.begin + second.seconds)


def test_live_bytes_follow_values_through_loops_and_asynchronous_operations() -> None:
    ranges = LiveRanges(ASSIGNMENT, modules_of(LOOP))
    assert ranges.nbytes_at(["a"]) == 0
    assert ranges.nbytes_at(["start"]) == 8 * MIB
    assert ranges.nbytes_at(["first"]) == ranges.nbytes_at(["loop"]) == 10 * MIB
    assert ranges.nbytes_at(["loop", "dot"]) == 12 * MIB
    assert ranges.nbytes_at(["result"]) == 10 * MIB
    found = seconds().timeline
    assert max(each.live_bytes or 0 for each in found.events) == 12 * MIB
    sizes = [each.nbytes for each in found.largest]
    assert sizes == [8 * MIB, 2 * MIB, 2 * MIB]


def test_the_file_has_the_form_of_chrome(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    rehearsal().save_trace(path)
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert any(
        "order inside a fusion is unknown" in each for each in document["otherData"]["not known"]
    )
    assert "14.0 MiB allocated, of which at most 12.0 MiB" in document["otherData"]["temporaries"]
    events = document["traceEvents"]
    check_events(events)
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert [*tracks.values()] == ["loops", "compute", "memory", "waits", "over data"]
    (loop,) = [each for each in events if each.get("cat") == "loops"]
    assert loop["name"].endswith(" x 5")
    assert loop["args"]["turns"] == 5
    counters = [each["args"]["temporaries"] for each in events if each["ph"] == "C"]
    assert max(counters) == 12 * MIB
    peak, about = [each for each in events if each["ph"] == "i"]
    assert peak["args"]["1"].startswith("bfloat16[4096,1024], 8.0 MiB")
    assert about["args"] == document["otherData"]  # which Perfetto does not show
    (gather,) = [each for each in events if each.get("cat") == "over data"]
    assert gather["name"].startswith("all-gather ")
    assert document["traceEvents"][0]["pid"] not in tracks  # or it is named the main thread


def test_events_of_a_track_end_in_the_nanosecond_in_which_the_next_begins(tmp_path: Path) -> None:
    # The first is from 3,493,372.5 to 3,506,135.2 ns: both rounded up, it would end in the second.
    first = TimelineEvent("copies", "a", 3493.372516224208e-6, 12.762707232506862e-6, 0.0)
    second = first._replace(name="b", begin=first.begin + first.seconds)
    scalar = second._replace(name="c", track="memory", seconds=5e-12, live_bytes=4)
    found = dataclasses.replace(seconds(), timeline=Timeline((first, second, scalar)))
    path = tmp_path / "step.json"
    rehearsal(found).save_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    check_events(events)
    times = [(each["name"], each["ts"], each["dur"]) for each in events if each["ph"] == "X"]
    assert times == [("a", 3493.373, 12.762), ("b", 3506.135, 12.763)]
    assert [each["args"]["temporaries"] for each in events if each["ph"] == "C"] == [4]


def check_events(events: list[dict[str, Any]]) -> None:
    """Check fields and types of the specification of the format, and that slices do not cross."""
    slices: dict[int, list[tuple[int, int]]] = {}
    for each in events:
        assert each["ph"] in ("M", "X", "C", "i")
        assert isinstance(each["name"], str)
        assert isinstance(each["pid"], int)
        if each["ph"] != "M":
            assert each["ts"] >= 0
        if each["ph"] == "X":
            begin, takes = (round(each[time] * 1000) for time in ("ts", "dur"))
            assert takes > 0
            assert (begin / 1000, takes / 1000) == (each["ts"], each["dur"])
            slices.setdefault(each["tid"], []).append((begin, begin + takes))
        if each["ph"] == "C":
            assert all(isinstance(value, int) for value in each["args"].values())
    for found in slices.values():
        open_ends: list[int] = []
        for begin, end in sorted(found, key=lambda pair: (pair[0], -pair[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_a_rehearsal_without_an_estimate_has_no_picture(tmp_path: Path) -> None:
    without = rehearsal(StepSeconds(not_counted=("the speeds of these devices are unknown",)))
    with pytest.raises(ValueError, match=r"no timeline to save: the speeds of these devices are"):
        without.save_trace(tmp_path / "step.json")
    assert "timeline" not in without.to_dict()["seconds"]


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v5e:2x2", marks=pytest.mark.topology),
        pytest.param("h100:4", marks=pytest.mark.topology("gpu")),
    ],
)
def test_a_scanned_step_of_a_topology(tmp_path: Path, topology: str) -> None:
    mesh = gda.rehearsal_mesh(topology, {"data": 2, "model": 2})

    def loss(ws: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w[0]) @ w[1], None

        return (jax.lax.scan(jax.checkpoint(layer), x, ws)[0].astype(jnp.float32) ** 2).mean()

    def step(ws: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, slope: w - slope, ws, jax.grad(loss)(ws, x))

    def shape(spec: P, *sizes: int) -> Any:
        return gda.abstract(jax.ShapeDtypeStruct(sizes, jnp.bfloat16), mesh, spec)

    ws = (
        shape(P(None, "data", "model"), 4, 512, 2048),
        shape(P(None, "model", "data"), 4, 2048, 512),
    )
    found = gda.rehearse(jax.jit(step, donate_argnums=0), ws, shape(P("data"), 2048, 512))
    path = tmp_path / "step.json"
    pickle.loads(pickle.dumps(found)).save_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    check_events(events)
    slices = [each for each in events if each["ph"] == "X"]
    tracks = {each["cat"] for each in slices}
    assert {"loops", "compute", "memory", "over data", "over model"} <= tracks
    assert {each["args"]["turns"] for each in slices if each["cat"] == "loops"} == {4}
    assert any("test_trace.py:" in each["name"] for each in slices if each["cat"] == "compute")
    assert found.temporary_bytes is not None
    assert max(each.live_bytes or 0 for each in found.seconds.timeline.events) > 0
    assert max(each.live_bytes or 0 for each in found.seconds.timeline.events) <= (
        found.temporary_bytes
    )


@pytest.mark.docs
@pytest.mark.topology
def test_the_picture_on_the_page_is_that_of_its_program() -> None:
    trace = trace_of_the_page()
    check_events(trace["traceEvents"])
    drawn = words_of(drawing(trace))
    assert drawn == words_of(PICTURE.read_text()), "run: python tests/step_picture.py"
    assert {"compute", "memory", "over data", "over model", "live bytes", "all-reduce"} <= {*drawn}
    page = PICTURE.parents[1] / "rehearsing.md"
    assert f"](pictures/{PICTURE.name})" in page.read_text()


def test_a_drawing_has_each_event_at_its_time(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    rehearsal().save_trace(path)
    trace = json.loads(path.read_text())
    slices = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    rects = re.findall(r'<rect x="([^"]*)" y="[^"]*" width="([^"]*)"', drawing(trace))
    assert len(rects) == len(slices)
    end = max(each["ts"] + each["dur"] for each in slices)
    times = sorted((92 + each["ts"] / end * 640, each["dur"] / end * 640) for each in slices)
    for drawn, (x, width) in zip(
        sorted((float(x), float(w)) for x, w in rects), times, strict=True
    ):
        assert drawn == pytest.approx((x, max(width, 0.6)), abs=0.02)
