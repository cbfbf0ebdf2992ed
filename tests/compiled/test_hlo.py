"""Texts of compiled programs from CPUs, GPUs and TPUs, and the collectives read from them."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gda.compiled.hlo import (
    Collective,
    ProgramMesh,
    modules_of,
    num_devices,
    read_collectives,
    source_lines,
)
from gda.compiled.hlo.groups import Groups, axes_of_groups, axes_of_pairs, parse_groups
from gda.testing.strategies import mesh_shapes

MESH = ProgramMesh({"x": 2, "y": 4})
REDUCER = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def module(body: str, *, before: str = "", header: str = ", num_partitions=8") -> str:
    """Return a program whose entry has these lines; the last is the root if none is."""
    lines = [line.strip(" ") for line in body.strip().split("\n")]
    if not any(line.startswith("ROOT ") for line in lines):
        last = max(at for at, line in enumerate(lines) if line.startswith("%"))
        lines[last] = f"ROOT {lines[last]}"
    text = "\n".join(f"  {line}" for line in lines)
    entry = f"ENTRY %main () -> f32[] {{\n{text}\n}}\n"
    return f"HloModule jit_f, is_scheduled=true{header}\n{REDUCER}{before}\n{entry}"


def read(body: str, *, before: str = "", header: str = ", num_partitions=8") -> list[Collective]:
    return list(read_collectives(modules_of(module(body, before=before, header=header), MESH)))


def only(body: str, *, before: str = "", header: str = ", num_partitions=8") -> Collective:
    (collective,) = read(body, before=before, header=header)
    return collective


def reduction(more: str, element: str = "f32[8]{0}") -> str:
    """Return the lines of one all-reduce with these attributes."""
    return f"%p = {element} parameter(0)\n%r = {element} all-reduce(%p), to_apply=%add, {more}"


# One instruction of each kind.


@pytest.mark.parametrize(
    ("element", "dtype", "nbytes"),
    [
        ("pred[10]{0}", "bool", 10),
        ("u8[10]{0}", "uint8", 10),
        ("c64[10]{0}", "complex64", 80),
        ("f8e4m3fn[10]{0}", "float8_e4m3fn", 10),
        ("s4[10]{0}", "int4", 10),
        ("s4[10]{0:E(4)}", "int4", 5),
        ("bf16[10]{0:T(8,128)(2,1)S(1)}", "bfloat16", 20),
        ("f64[<=10]{0}", "float64", 80),
        ("f64[]", "float64", 8),
        ("f32[0,4]{1,0}", "float32", 0),
    ],
)
def test_types(element: str, dtype: str, nbytes: int) -> None:
    found = only(reduction("replica_groups={}", element))
    assert (found.operand_dtypes, found.nbytes) == ((dtype,), nbytes)
    with pytest.raises(ValueError, match=r"gda cannot read it: 'odd\[3\]'"):
        only(reduction("replica_groups={}", "odd[3]{0}"))


# Asynchronous forms, as GPUs and TPUs have them.


@pytest.mark.parametrize(
    ("opcode", "type_", "more"),
    [
        ("all-gather", "(f32[4,8]{1,0}, f32[16,8]{1,0})", "replica_groups=[2,4]<=[8]"),
        ("all-gather", "((f32[4,8]{1,0}), (f32[16,8]{1,0}))", "replica_groups=[2,4]<=[8]"),
        ("reduce-scatter", "((f32[4,8]{1,0}), f32[16,8]{1,0})", "replica_groups=[2,4]<=[8]"),
        ("collective-broadcast", "((f32[4,8]), f32[16,8], s32[])", "replica_groups=[2,4]<=[8]"),
        (
            "collective-permute",
            "(f32[4,8]{1,0:T(4,128)}, f32[16,8]{1,0}, u32[]{:S(2)}, u32[]{:S(2)})",
            "source_target_pairs={{0,1},{1,2}}",
        ),
    ],
)
def test_the_type_of_a_beginning_has_operands_outputs_and_contexts(
    opcode: str, type_: str, more: str
) -> None:
    found = only(
        f"""
        %p = f32[4,8]{{1,0}} parameter(0)
        %s = {type_} {opcode}-start(%p), channel_id=1, {more}
        %u = {type_} {opcode}-update(%s)
        %d = f32[16,8]{{1,0}} {opcode}-done(%u)
        """
    )
    assert (found.kind, found.axes) == (opcode, ("y",))
    assert (found.operand_shapes, found.output_shapes) == (((4, 8),), ((16, 8),))
    assert (found.nbytes, found.nbytes_output) == (128, 512)


@pytest.mark.parametrize(
    ("line", "kind", "shapes", "nbytes", "nbytes_output"),
    [
        (
            "f32[4]{0} all-reduce-start(%b), channel_id=1, Y,"
            ' use_global_device_ids=true, to_apply=%add, backend_config={"is_sync":false}',
            *("all-reduce", ((4,),), 16, 16),
        ),
        (
            "((bf16[2]{0}, f32[4]{0}), (bf16[8]{0}, f32[16]{0})) all-gather-start(%a, %b),"
            " channel_id=1, Y, dimensions={0}",
            *("all-gather", ((2,), (4,)), 20, 80),
        ),
        (
            "(bf16[2]{0}, f32[4]{0}) all-reduce(%a, /*index=1*/%b), channel_id=1, Y,"
            " use_global_device_ids=true, to_apply=%add",
            *("all-reduce", ((2,), (4,)), 20, 20),
        ),
        (  # an array for each peer
            "(f32[4], f32[4], f32[4], f32[4]) all-to-all(%b, %b, %b, %b), channel_id=1, Y",
            *("all-to-all", ((4,),) * 4, 64, 64),
        ),
        (  # its data, and not its offsets
            "bf16[8]{0} ragged-all-to-all(%a, %d, %o, %o, %o, %o), channel_id=3, Y",
            *("ragged-all-to-all", ((2,),), 4, 16),
        ),
        (  # an element of a tuple in the files that XLA writes
            "f32[4] all-reduce(%t#1), Y, to_apply=%add",
            *("all-reduce", ((4,),), 16, 16),
        ),
    ],
)
def test_operands_and_outputs(
    line: str, kind: str, shapes: tuple[Any, ...], nbytes: int, nbytes_output: int
) -> None:
    found = only(
        f"""
        %a = bf16[2]{{0}} parameter(0)
        %b = f32[4]{{0}} parameter(1)
        %o = s64[4]{{0}} parameter(2)
        %t = (s32[2], f32[4]) custom-call(), custom_call_target="two"
        %s = {line.replace("Y", "replica_groups={{0,1,2,3},{4,5,6,7}}")}
        ROOT %d = f32[4]{{0}} all-reduce-done(%s)
        """
    )
    assert (found.kind, found.axes, found.operand_shapes) == (kind, ("y",), shapes)
    assert (found.nbytes, found.nbytes_output) == (nbytes, nbytes_output)


def test_a_wrapped_collective_counts_once() -> None:
    wrapped = """
%wrapped (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  ROOT %r = f32[2]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8], to_apply=%add
}, execution_thread="main"
"""
    found = only(
        """
        %q = f32[8]{0} parameter(0)
        %s = ((f32[8]{0}), f32[2]{0}, u32[]) async-start(%q), calls=%wrapped
        %u = ((f32[8]{0}), f32[2]{0}, u32[]) async-update(%s), calls=%wrapped
        ROOT %d = f32[2]{0} async-done(%u), calls=%wrapped
        """,
        before=wrapped,
    )
    assert (found.kind, found.count) == ("reduce-scatter", 1)
    assert (found.nbytes, found.nbytes_output) == (32, 8)


BESIDE = """
%begin (p: f32[4]) -> (f32[4], f32[16], u32[]) {
  %p = f32[4]{0} parameter(0)
  %g = f32[16]{0} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %s = (f32[4], f32[16], u32[]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}
%go_on (p.1: f32[4]) -> f32[16] {
  %p.1 = f32[4]{0} parameter(0)
  ROOT %g.1 = f32[16]{0} all-gather(%p.1), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}
}
%end (p.2: f32[4]) -> f32[16] {
  %p.2 = f32[4]{0} parameter(0)
  %g.2 = f32[16]{0} all-gather(%p.2), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %d = f32[16]{0} custom-call(%p.2, %g.2), custom_call_target="AsyncCollectiveDone"
}
%k (q.1: f32[4]) -> pred[] {
  ROOT %c.1 = pred[] constant(true)
}
"""


def test_collective_overlapped_on_a_tpu_counts_once() -> None:
    body = """
        %q = f32[4]{0} parameter(0)
        %s = (f32[4], f32[16], u32[]) fusion(%q), kind=kCustom, calls=%begin
        %w = f32[4]{0} while(%q), condition=%k, body=%go_on,
          backend_config={"known_trip_count":{"n":"6"}}
        %d = f32[16]{0} fusion(%w), kind=kCustom, calls=%end
        """
    found = only(body, before=BESIDE)
    assert (found.kind, found.axes, found.nbytes, found.count) == ("all-gather", ("y",), 16, 1)
    # Of another channel they are other collectives.
    begun, *more = read(body, before=BESIDE.replace("channel_id=7", "channel_id=8", 1))
    assert begun.count == 1
    assert sorted(each.count or 0 for each in more) == [1, 6]
    # So is one of another kind, even of the same channel, as in a program of several slices.
    reduced = reduction("channel_id=7, replica_groups=[2,4]<=[8]").replace("%p", "%p.9")
    both = read(f"{body}\n{reduced}", before=BESIDE)
    assert [each.kind for each in both] == ["all-gather", "all-reduce"]


SCATTERED = """
%all-reduce-scatter.1 (p.1: f32[16,4]) -> f32[4,4] {
  %p.1 = f32[16,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %r = f32[16,4]{1,0} all-reduce(%p.1), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %s = f32[4,4]{1,0} dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={4,4}
}
"""


def test_reduce_scatter_written_by_a_tpu_as_an_all_reduce() -> None:
    found = only(
        """
        %p = f32[16,4]{1,0} parameter(0)
        ROOT %f = f32[4,4]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1, \
metadata={op_name="jit(f)/dot_general" source_file="/home/me/f.py" source_line=7}
        """,
        before=SCATTERED,
    )
    assert (found.kind, found.axes) == ("reduce-scatter", ("y",))
    assert (found.operand_shapes, found.output_shapes) == (((16, 4),), ((4, 4),))
    assert (found.nbytes, found.nbytes_output) == (256, 64)
    assert (found.op_name, found.source_file) == ("jit(f)/dot_general", "/home/me/f.py")


# Between slices of TPUs, in programs that each slice runs.


def between_slices(transfer: str, target: str, mesh: dict[str, int]) -> list[Collective]:
    """Return the collectives of a send from two slices of two devices to the others, or of four."""
    attributes = (
        "channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="
        f'"runtime",_xla_megascale_target={target},_xla_megascale_transfer_type="{transfer}"}}'
    )
    text = module(
        f"""
        %p = f32[16,128]{{1,0}} parameter(0)
        %t = token[] after-all()
        %s = (f32[16,128]{{1,0}}, u32[]{{:S(2)}}, token[]) send(%p, %t), {attributes}
        %r = (f32[16,128]{{1,0}}, u32[]{{:S(2)}}, token[]) recv(%t), {attributes}
        %d = token[] send-done(%s), {attributes}
        %e = (f32[16,128]{{1,0}}, token[]) recv-done(%r), {attributes}
        %w = f32[16,128]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={{{{0,1}}}},
          use_global_device_ids=true, to_apply=%add
        """,
        header=", num_partitions=2",
    )
    slices = {name: size for name, size in mesh.items() if name != "z"}
    ids = [
        100000 * number + i for number in range(1, math.prod(slices.values()) + 1) for i in (0, 1)
    ]
    return list(read_collectives(modules_of(text, ProgramMesh(mesh, slices, ids))))


@pytest.mark.parametrize(
    ("transfer", "target", "kind"),
    [
        ("ALL_REDUCE", '"{1,2}x{0:1}"', "all-reduce"),
        ("ALL_GATHER", '"{1,2}x{0:1}"', "all-gather"),
        ("REDUCE_SCATTER", "{{100000,200000},{100001,200001}}", "reduce-scatter"),
        ("ALL_TO_ALL", "{{100000,200000},{100001,200001}}", "all-to-all"),
        ("ONE_TO_ONE", "{{100000->200000},{200000->100000}}", "collective-permute"),
        ("ANOTHER", '"{1,2}x{0:1}"', "send"),
    ],
)
def test_a_collective_between_slices_and_one_within(transfer: str, target: str, kind: str) -> None:
    across, within = between_slices(transfer, target, {"x": 2, "z": 2})
    assert (across.kind, across.axes, across.nbytes) == (kind, ("x",), 16 * 128 * 4)
    assert (across.is_between_slices, across.groups, across.pairs) == (True, (), ())
    # The positions of a slice are its own.
    assert (within.kind, within.axes) == ("all-reduce", ("z",))
    assert (within.is_between_slices, within.groups) == (False, ((0, 1),))


@pytest.mark.parametrize(
    ("target", "axes"),
    [
        ('"{1,2,3,4}x{0:1}"', ("x", "y")),
        ("{{100000,200000},{300000,400000},{100001,200001},{300001,400001}}", ("y",)),
        ("{{100000,300000},{200000,400000},{100001,300001},{200001,400001}}", ("x",)),
        ("{{100000,100001,300000,300001},{200000,200001,400000,400001}}", ("x", "z")),
        ("{{100001->200000},{200001->100000}}", ("y", "z")),
        ("{{700000,800000}}", None),
    ],
)
def test_axes_over_slices(target: str, axes: object) -> None:
    across, _ = between_slices("ALL_REDUCE", target, {"x": 2, "y": 2, "z": 2})
    assert across.axes == axes


# Groups of devices.


def test_numbers_are_those_of_partitions() -> None:
    def groups(attributes: str) -> Groups:
        return only(reduction(f"replica_groups={attributes}"), header=", num_partitions=2").groups

    assert groups("{{0}}") == ((0,), (1,))
    assert groups("{{0}}, channel_id=1") == ((0, 1),)
    assert groups("{}") == ((0, 1),)
    text = module("%p = f32[] parameter(0)\n%r = f32[] all-reduce(%p), replica_groups={}")
    assert num_devices(text) == 8
    assert len(read_collectives(modules_of(text + "\n\n" + text, MESH))) == 2


def test_groups_without_axes_are_kept() -> None:
    for groups in ("{{0,5},{1,4},{2,6},{3,7}}", "{{0,1},{2,3,4,5,6,7}}", "{{0,1}}", "[2,8]<=[16]"):
        found = only(reduction(f"replica_groups={groups}"))
        assert found.axes is None
        assert found.groups == parse_groups(groups)
    (found,) = read_collectives(
        modules_of(module(reduction("replica_groups=[2,4]<=[8]")))
    )  # of no mesh
    assert (found.axes, found.groups) == (None, ((0, 1, 2, 3), (4, 5, 6, 7)))
    alone = "{{0},{1},{2},{3},{4},{5},{6},{7}}"
    assert only(reduction(f"replica_groups={alone}")).axes == ()
    assert parse_groups("{}") == parse_groups("{{}}") == ()


ALONG_X = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0, 4}, {1, 5}, {2, 6}, {3, 7}}", ALONG_X),
        ("mesh['a'=8] {'a':(1)2}", ALONG_X),
        ("@mesh<x=2,y=4> {x}", ALONG_X),
        ("@mesh<a=8>, device_ids=([8]) {a:(1)2}", ALONG_X),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['x'=8] {'x':(4)2,'x':(1)2}", [[0, 4, 1, 5], [2, 6, 3, 7]]),
        (
            "mesh['x'=2,'y'=2,'z'=2], device_ids=([2,2,2]T(2,0,1)) {'y':(1)2}",
            [[0, 4], [2, 6], [1, 5], [3, 7]],
        ),
        ("mesh['x'=4], device_ids=(3,0,2,1) {'x':(2)2}", [[3, 0], [2, 1]]),
        ("mesh['c,d'=2,'{e}]'=2] {'c,d','{e}]'}", [[0, 1, 2, 3]]),
        ("mesh['<a> (b'=4] {'<a> (b':(2)2}", [[0, 1], [2, 3]]),
    ],
)
def test_forms_of_groups(text: str, expected: list[list[int]]) -> None:
    groups = tuple(map(tuple, expected))
    assert parse_groups(text) == groups
    found = only(reduction(f"replica_groups={text}, channel_id=1"))
    assert found.groups == groups
    if expected is ALONG_X:
        assert found.axes == ("x",)


@pytest.mark.parametrize("text", ["torus[2]", "mesh['x'=2] {'z'}", "mesh['x'=6] {'x':(4)2}"])
def test_a_form_that_is_not_known_gives_no_axes(text: str) -> None:
    assert parse_groups(text) is None
    found = only(reduction(f"replica_groups={text}"))
    assert (found.kind, found.axes, found.groups) == ("all-reduce", None, ())


def _by_hand(sizes: Sequence[int], along: Sequence[int]) -> set[frozenset[int]]:
    """Return the groups along some axes, one device after the other."""
    groups: dict[tuple[int, ...], set[int]] = {}
    for position, coordinates in enumerate(itertools.product(*map(range, sizes))):
        rest = tuple(c for axis, c in enumerate(coordinates) if axis not in along)
        groups.setdefault(rest, set()).add(position)
    return {frozenset(group) for group in groups.values()}


@st.composite
def _grouped_meshes(draw: st.DrawFn) -> tuple[dict[str, int], list[int]]:
    mesh = draw(mesh_shapes(max_devices=64, axis_names=("x", "y", "z", "w")))
    along = draw(st.sets(st.integers(0, len(mesh) - 1), min_size=1))
    return mesh, sorted(along)


@given(_grouped_meshes(), st.randoms(use_true_random=False))
def test_groups_in_every_form_have_the_axes_that_made_them(
    case: tuple[dict[str, int], list[int]], random: Random
) -> None:
    mesh, along = case
    names, sizes = list(mesh), list(mesh.values())
    expected = tuple(names[axis] for axis in along if sizes[axis] > 1)
    groups = [list(group) for group in _by_hand(sizes, along)]
    for group in groups:
        random.shuffle(group)
    random.shuffle(groups)
    rest = [axis for axis in range(len(sizes)) if axis not in along]
    inside = random.sample(along, len(along))
    named = ",".join(f"'{name}'={size}" for name, size in mesh.items())
    dims = ",".join(map(str, sizes))
    order = ",".join(map(str, rest + inside))
    forms = [
        "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}",
        f"[{len(groups)},{len(groups[0])}]<=[{dims}]T({order})",
        f"mesh[{named}] {{{','.join(repr(names[axis]) for axis in inside)}}}",
    ]
    for form in forms:
        read = parse_groups(form)
        assert read is not None
        assert set(map(frozenset, read)) == _by_hand(sizes, along)
        assert axes_of_groups(read, mesh) == expected


@given(mesh_shapes(max_devices=32), st.data())
def test_permutation_moves_along_axes_on_which_its_ends_differ(
    mesh: dict[str, int], data: st.DataObject
) -> None:
    sizes = tuple(mesh.values())
    ends = st.tuples(*(st.integers(0, size - 1) for size in sizes))
    pairs = data.draw(st.lists(st.tuples(ends, ends), max_size=5))
    flat = tuple(tuple(int(np.ravel_multi_index(end, sizes)) for end in pair) for pair in pairs)
    differing = {i for a, b in pairs for i in range(len(sizes)) if a[i] != b[i]}
    assert axes_of_pairs(flat, mesh) == tuple(n for i, n in enumerate(mesh) if i in differing)
    assert axes_of_pairs((*flat, (0, math.prod(sizes))), mesh) is None


# Numbers of executions.

BODY = """
%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %v = f32[8]{0} get-tuple-element(%c), index=1
  %step = s32[] constant(STEP)
  %next = s32[] add(%step, %i)
  %r = f32[8]{0} all-reduce(%v), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %r)
}

%wrapped_compare (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%condition (c.1: (s32[], f32[8])) -> pred[] {
  %c.1 = (s32[], f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%c.1), index=0
  %stop = s32[] constant(STOP)
  ROOT %test = TEST
}
"""
WRAPPED = "pred[] fusion(%i.1, %stop), kind=kLoop, calls=%wrapped_compare"
LOOP = """
  %z = s32[] constant(START)
  %zero = s32[] copy(%z)
  %v0 = f32[8]{0} parameter(0)
  %t0 = (s32[], f32[8]{0}) tuple(%zero, %v0)
  ROOT %w = (s32[], f32[8]{0}) while(%t0), condition=%condition, body=%body
"""


def loop(start: object, stop: object, step: object, test: str, more: str = "") -> int | None:
    before = BODY.replace("STEP", str(step)).replace("STOP", str(stop)).replace("TEST", test)
    return only(LOOP.replace("START", str(start)).rstrip() + more, before=before).count


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(1, 7), st.booleans())
def test_the_length_of_a_loop_is_that_of_the_range(
    start: int, stop: int, step: int, includes_stop: bool
) -> None:
    direction = "LE" if includes_stop else "LT"
    test = f"pred[] compare(%i.1, %stop), direction={direction}"
    length = len(range(start, stop + includes_stop, step))
    assert loop(start, stop, step, test) == length
    mirrored = f"pred[] compare(%stop, %i.1), direction={direction.replace('L', 'G')}"
    assert loop(start, stop, step, mirrored) == length
    if not includes_stop:
        assert loop(start, stop, step, WRAPPED) == length


@pytest.mark.parametrize(
    ("step", "test"),
    [
        (1, "pred[] compare(%i.1, %stop), direction=NE"),
        (0, "pred[] compare(%i.1, %stop), direction=LT"),
        (-1, "pred[] compare(%i.1, %stop), direction=LT"),
        (1, "pred[] custom-call(%i.1, %stop)"),
    ],
)
def test_a_loop_that_does_not_count_plainly_has_no_length(step: int, test: str) -> None:
    assert loop(0, 7, step, test) is None
    for config in (
        '{"known_trip_count":{"n":"11"},"known_init_step":{"init":"0","step":"1"}}',
        r'"{\"known_trip_count\":{\"n\":\"11\"}}"',
    ):
        assert loop(0, 7, step, test, f", backend_config={config}") == 11  # unless XLA tells it


@pytest.mark.parametrize(
    ("source", "target", "count"),
    [
        ("u8", "s32", 7),
        ("s32", "s64", 7),
        ("s32", "u8", None),  # 256 is 0 there
        ("u32", "s32", None),
    ],
)
def test_a_loop_counts_plainly_where_conversions_keep_every_number(
    source: str, target: str, count: int | None
) -> None:
    test = f"{target}[] convert(%i.1)\n  ROOT %u = pred[] compare(%test, %stop), direction=LT"
    before = BODY.replace("STEP", "1").replace("STOP", "7").replace("ROOT %test =", "%test =")
    before = before.replace("TEST", test).replace("%i.1 = s32[]", f"%i.1 = {source}[]")
    assert only(LOOP.replace("START", "0"), before=before).count == count


def test_loops_in_loops_multiply_and_tests_run_once_more() -> None:
    before = """
%inner (a.1: f32[8]) -> f32[8] {
  %a.1 = f32[8]{0} parameter(0)
  ROOT %r.1 = f32[8]{0} all-reduce(%a.1), replica_groups=[2,4]<=[8], to_apply=%add
}
%never (a.2: f32[8]) -> pred[] {
  %a.2 = f32[8]{0} parameter(0)
  %g.2 = f32[16]{0} all-gather(%a.2), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  ROOT %c.2 = pred[] constant(false)
}
%outer (a.3: f32[8]) -> f32[8] {
  %a.3 = f32[8]{0} parameter(0)
  ROOT %w.3 = f32[8]{0} while(%a.3), condition=%never, body=%inner,
    backend_config={"known_trip_count":{"n":"3"}}
}
"""
    body = """
        %p = f32[8]{0} parameter(0)
        %w = f32[8]{0} while(%p), condition=%never, body=%outer,
          backend_config={"known_trip_count":{"n":"5"}}
        """
    found = {each.kind: each.count for each in read(body, before=before)}
    assert found == {"all-reduce": 15, "all-gather": 5 * (3 + 1) + (5 + 1)}


CALLED = """
%called (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%q), replica_groups=[2,4]<=[8], to_apply=%add
}
%k (q.1: f32[8]) -> pred[] {
  ROOT %c.1 = pred[] constant(true)
}
"""


@pytest.mark.parametrize(
    ("line", "count", "is_conditional"),
    [
        ("call(%p), to_apply=%called", 1, False),
        ("call-start(%p), to_apply=%called", 1, False),
        ("conditional(%c, %p, %p), branch_computations={%called, %k}", 1, True),
        ("conditional(%c, %p, %p), true_computation=%k, false_computation=%called", 1, True),
        ('custom-call(%p), custom_call_target="f", called_computations={%called}', None, False),
        ("while(%p), condition=%called, body=%k", None, False),
        ("while(%p), body=%called", None, False),
        (
            "call(%p), to_apply=%called\n%b = f32[8]{0} call(%d), to_apply=%called\n"
            "%w = f32[8]{0} while(%b), condition=%k, body=%called,"
            ' backend_config={"known_trip_count":{"n":"4"}}',
            *(6, False),
        ),
    ],
)
def test_computations_that_are_called(line: str, count: int | None, is_conditional: bool) -> None:
    body = f"%p = f32[8]{{0}} parameter(0)\n%c = pred[] parameter(1)\n%d = f32[8]{{0}} {line}"
    found = only(body, before=CALLED)
    assert (found.count, found.is_conditional) == (count, is_conditional)
    assert not read("%p = f32[8]{0} parameter(0)", before=CALLED)


# Lines of user code.


def test_innermost_line_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_lines, "LIBRARY", ("/lib/jax/",))
    monkeypatch.setattr(source_lines, "INSTALLED", ("/lib/",))
    jax, layer, model = ("/lib/jax/api.py", 1), ("/lib/layers/dense.py", 2), ("/home/me/m.py", 3)
    assert source_lines.user_line([jax, layer, model, ("/home/me/main.py", 4)]) == model
    assert source_lines.user_line([jax, layer]) == layer
    assert source_lines.user_line([jax]) == (None, None)
    metadata = 'metadata={op_name="f" source_file="/home/me/\\"b\\" \\303\\251.py" source_line=20}'
    found = only(reduction(f"replica_groups={{}}, {metadata}"))
    assert (found.source_file, found.source_line) == ('/home/me/"b" é.py', 20)


# Errors.


def test_a_kind_that_is_not_known_is_reported() -> None:
    found = only("%p = f32[8]{0} parameter(0)\n%a = f32[8]{0} all-scramble(%p), channel_id=1")
    assert (found.kind, found.axes, found.nbytes, found.groups) == ("all-scramble", None, 32, ())
    grouped = only(
        "%p = f32[8]{0} parameter(0)\n%a = f32[8]{0} all-mix(%p), replica_groups=[2,4]<=[8]"
    )
    assert (grouped.kind, grouped.axes) == ("all-mix", ("y",))
    # A permutation between unknown devices.
    moved = only("%p = f32[8]{0} parameter(0)\n%a = f32[8]{0} collective-permute(%p), channel_id=1")
    assert (moved.axes, moved.pairs) == (None, ())


@pytest.mark.parametrize(
    "line",
    [
        "%a = f32[8]{0} all-reduce(%p, replica_groups={}",
        "%a = (f32[8]{0} all-reduce(%p), replica_groups={}",
        "%a : f32[8]{0} all-reduce(%p), replica_groups={}",
        "%a = f32[8]{0} all-reduce(%unknown), replica_groups={}",
    ],
)
def test_a_line_that_looks_like_a_collective_and_cannot_be_read_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="gda cannot read it.*: .*all-reduce"):
        read(f"%p = f32[8]{{0}} parameter(0)\n{line}")


def escaped(text: str) -> str:
    """Return text as XLA writes it in a string: what is not plain ASCII in octal digits."""
    plain = {ord(c): c for c in map(chr, range(32, 127)) if c not in "\"'\\"}
    return "".join(plain.get(byte, f"\\{byte:03o}") for byte in text.encode())


def odd_program(name: str, payload: str, metadata: dict[str, str], indent: int | None) -> str:
    """Return a program whose gather follows a kernel; each line is used by a later one."""
    json_text = json.dumps(metadata, indent=indent, ensure_ascii=False)
    name, payload = escaped(name), escaped(payload)
    return module(
        f"""
        %p = f32[8]{{0}} parameter(0), metadata={{op_name="{name}"}}
        %k = f32[8]{{0}} custom-call(%p), custom_call_target="{name}", {kernel(json_text)},
          metadata={{op_name="{payload}"}}, backend_config="{payload}"
        %g = f32[16]{{0}} all-gather(%k), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={{0}}
        ROOT %r = f32[16]{{0}} all-reduce(%g), replica_groups=[2,4]<=[8], to_apply=%add
        """
    )


def kernel(json_text: str) -> str:
    # A kernel's metadata stands as it is, in lines of its own.
    return f"frontend_attributes={{kernel_metadata={json_text}}}"


# Brackets, quotes, and beginnings of other statements are what a reader could trip over.
odd_texts = st.text(st.sampled_from("{}()[]\"'\\,%= aé\n\x85\u2028")) | st.sampled_from(
    ["} ", "ROOT %x = f32[] add(", "HloModule m", "ENTRY %e () -> f32[] {", "%missing", "/* "]
)


@given(odd_texts, odd_texts, st.dictionaries(odd_texts, odd_texts, max_size=3), st.data())
def test_a_program_is_read_whole_whatever_its_kernels_say(
    name: str, payload: str, metadata: dict[str, str], data: st.DataObject
) -> None:
    text = odd_program(name, payload, metadata, data.draw(st.sampled_from([None, 0, 1])))
    gather, reduction = read_collectives(modules_of(text, MESH))
    assert (gather.kind, gather.axes, gather.nbytes) == ("all-gather", ("x",), 32)
    assert (reduction.kind, reduction.axes, reduction.nbytes) == ("all-reduce", ("y",), 64)
    cut = data.draw(st.integers(0, text.rindex("}")))
    with pytest.raises(ValueError, match="gda cannot read it|pass the result of compiled"):
        read_collectives(modules_of(text[:cut], MESH))


def test_a_program_that_lacks_a_line_is_an_error() -> None:
    lines = odd_program("k", "{", {"block": "8"}, indent=0).split("\n")
    for number, line in enumerate(lines):
        without = "\n".join(lines[:number] + lines[number + 1 :])
        if line and not line.strip().startswith(("HloModule", '"block"')):
            with pytest.raises(ValueError, match="gda cannot read it|pass the result of compiled"):
                read_collectives(modules_of(without, MESH))


@pytest.mark.parametrize("text", ["module {}", "", " \n"])
def test_a_text_that_is_no_program_is_an_error(text: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"which has an ENTRY: {text.strip()!r}; pass the result")
    ):
        read_collectives(modules_of(text, MESH))


def test_comment_in_a_string_is_none() -> None:
    name = 'op_name="jit(f)/*a*/dot"'
    found = only(reduction(f"/*index=5*/replica_groups={{}}, metadata={{{name}}}"))
    assert (found.axes, found.op_name) == (("x", "y"), "jit(f)/*a*/dot")


def test_names_in_strings_and_transfers_to_the_host_are_no_collectives() -> None:
    assert not read(
        """
        %p = f32[8]{0} parameter(0), metadata={op_name="x = f32[] all-reduce(y)"}
        %all-reduce.1 = f32[8]{0} custom-call(%p), custom_call_target="all-gather",
          backend_config="{ all-to-all( "
        %after = token[] after-all()
        %s = (f32[8], u32[], token[]) send(%p, %after), channel_id=2, is_host_transfer=true
        %e = token[] send-done(%s), channel_id=2, is_host_transfer=true
        """
    )
