"""The temporaries of a program, from the files that XLA writes."""

import pytest

from gda.compiled.hlo import modules_of, source_lines
from gda.compiled.hlo.allocations import Temporary, read_temporaries

PROGRAM = """HloModule jit_step

ENTRY %main () -> f32[] {
  %scores = bf16[8,64]{1,0} dot(), metadata={op_name="a" source_file="/my/m.py" source_line=7}
  %masked = bf16[8,64]{1,0} select(), metadata={op_name="b" source_file="/my/m.py" source_line=8}
  ROOT %sum = f32[8]{0} add(), metadata={op_name="c" source_file="/lib/l.py" source_line=9}
}
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, page 0, parameter 0, shape |f32[1024]| at ShapeIndex {}:
 value: <0 p @0> (size=4096,offset=0): f32[1024]{0:T(1024)}
allocation 1: size 1600, preallocated-temp:
 value: <1 loop{0} (phi) @0> (size=1024,offset=0): bf16[8,64]{1,0}
 value: <2 scores @0> (size=1024,offset=0): bf16[8,64]{1,0}
 value: <3 masked{} @0> (size=512,offset=512): bf16[8,64]{1,0}
 value: <4 sum @0> (size=32,offset=1024): f32[8]{0}
 value: <5 both{} @0> (size=512,offset=1056): (f32[8]{0}, f32[8]{0})
 value: <7 one{} @0> (size=8,offset=1568): (f32[8]{0})
allocation 2: size 2048, color 1, page 0, preallocated-temp:
 value: <6 near @1> (size=2048,offset=0): f32[512]{0:T(1024)S(1)}
"""


def test_the_largest_of_each_part_of_the_memory_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_lines, "LIBRARY", ("/lib/",))
    # The carry of the loop is not a value of the program, "masked" shares the memory of "scores",
    # "both" and "one" are tables of addresses, and "near" is on the chip.
    assert read_temporaries(ASSIGNMENT, modules_of(PROGRAM)) == [
        Temporary("bfloat16", (8, 64), 1024, "a", "/my/m.py", 7, opcode="dot"),
        Temporary("float32", (8,), 32, "c", None, None, opcode="add"),
    ]
    many = "\n".join(
        f" value: <{n} v{n} @0> (size=32,offset={2048 + 32 * n}): f32[8]{{0}}" for n in range(20)
    )
    in_program_memory, on_chip = ASSIGNMENT.split("allocation 2")
    more = f"{in_program_memory}{many}\nallocation 2{on_chip}"
    assert len(read_temporaries(more, modules_of(PROGRAM))) == 10


def test_the_blocks_of_a_temporary_without_elements_are_not_counted() -> None:
    of_eight = Temporary("float32", (2, 8), 64, "", None, None, whole_shape=(16, 8))
    assert of_eight.num_blocks == 8
    assert of_eight._replace(shape=(0, 8), whole_shape=(0, 64)).num_blocks is None


SEVERAL = """HloModule jit_step

%body () -> (f32[8], f32[4]) {
  %a = f32[8]{0} add(), metadata={source_file="/m" source_line=1}
  %b = f32[4]{0} add(), metadata={source_file="/m" source_line=2}
  ROOT %both = (f32[8]{0}, f32[4]{0}) tuple(%a, %b)
}

%half () -> f32[4] {
  %c = f32[4]{0} dot()
  ROOT %narrow = f32[4]{0} bitcast(%c)
}

ENTRY %main () -> f32[] {
  %x = f32[8]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %fused = (f32[8]{0}, f32[4]{0}) fusion(), calls=%body, metadata={source_line=3}
  %combined = (f32[8]{0}, f32[4]{0}) all-reduce(%x, %y), metadata={source_file="/m" source_line=4}
  %product = f32[4]{0} fusion(), calls=%half, metadata={source_file="/m" source_line=6}
  ROOT %loop = (f32[8]{0}, f32[4]{0}) while(%x), metadata={source_file="/m" source_line=5}
}
"""


def test_line_and_opcode_of_one_of_several_results_are_its_own() -> None:
    values = [
        f" value: <{n} {name} @0> (size=16,offset={16 * n}): f32[4]{{0}}"
        for n, name in enumerate(("fused{0}", "fused{1}", "combined{0}", "loop{1}", "product"))
    ]
    assignment = "\n".join(["allocation 1: size 64, preallocated-temp:", *values])
    found = read_temporaries(assignment, modules_of(SEVERAL))
    assert [each.source_line for each in found] == [1, 2, None, 5, 6]
    assert [each.opcode for each in found] == ["add", "add", "", "while", "dot"]
