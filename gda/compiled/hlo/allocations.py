"""The largest temporaries of a program, from the files that XLA writes for it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gda.compiled.hlo.instructions import Computation, Instruction, Shape, leaves
from gda.compiled.hlo.program import Module
from gda.compiled.hlo.source_lines import metadata_of
from gda.layout.boundary import set_module

_MOST = 10  # temporaries that are named
_ALLOCATION = re.compile(
    r"allocation \d+: size \d+, (color \d+, )?(?:page \d+, )?preallocated-temp"
)
_FORMS = {"bitcast", "convert", "copy", "reshape", "transpose"}
_VALUE = re.compile(
    r" value: <\d+ ([\w.\-]+)(?:\{(\d*)[\d,]*\})?(?: \(phi\))? @\d+> "
    r"\(size=(\d+),offset=(\d+)\): (.*)"
)


@set_module("gda")
class Temporary(NamedTuple):
    """An array that a program holds while it runs, as ``gda.Rehearsal.temporaries`` has them.

    Attributes:
      dtype, shape: of the array on one device.
      nbytes: bytes on one device, in its layout.
      op_name: place in the traced function; may be empty.
      source_file, source_line: the innermost line of user code that made it; None if XLA does not
        tell.
      whole_shape: of the array that it is a block of, from the trace, without dimensions of 1; None
        unless the arrays of its line that fit have one shape.
      opcode: XLA's operation that makes it, such as ``'dot'`` or ``'all-gather'``, of a fusion the
        last that computes; may be empty.

    >>> import gda
    >>> gda.Temporary('float32', (16, 8), 512, 'jit(f)/dot_general', 'model.py', 7).nbytes
    512
    """

    dtype: str
    shape: Shape
    nbytes: int
    op_name: str
    source_file: str | None
    source_line: int | None
    whole_shape: Shape | None = None
    opcode: str = ""

    @property
    def num_blocks(self) -> int | None:
        """The number of different blocks: 1 if each device holds all; None if it is unknown."""
        whole, size = self.whole_shape, math.prod(self.shape)
        return math.prod(whole) // size if whole is not None and size else None


def read_temporaries(assignment: str, modules: Sequence[Module]) -> list[Temporary]:
    """Return the largest temporaries of a program, the largest first.

    Temporaries that are not needed at the same time share memory. Only the largest of each part of
    the memory is returned, so that all may be there together. ``assignment`` is the text of XLA's
    file ``…-buffer-assignment.txt``.
    """
    makers = makers_of(modules)
    # Of equal ones, a value of the program comes before one that a loop carries.
    values = sorted(values_of(assignment), key=lambda each: (-each.nbytes, each.name not in makers))
    return largest_of(values, makers)


Makers = dict[str, tuple[Module, Computation]]


def makers_of(modules: Sequence[Module]) -> Makers:
    """Return the module and the computation of each instruction."""
    return {
        name: (module, computation)
        for module in modules
        for computation in module.computations.values()
        for name in computation.lines
    }


def largest_of(values: Iterable[TemporaryValue], makers: Makers) -> list[Temporary]:
    """Return the first of these values that have memory of their own, as arrays."""
    taken: list[TemporaryValue] = []
    found = []
    for value in values:
        if len(found) == _MOST:
            break
        if any(value.start < each.stop and each.start < value.stop for each in taken):
            continue
        arrays = leaves(value.type)
        if value.type.startswith("(") or not arrays:  # a table of addresses, or no array
            continue
        taken.append(value)
        array = Temporary(arrays[0].dtype, arrays[0].shape, value.nbytes, "", None, None)
        if value.name in makers:
            module, computation = makers[value.name]
            instruction = _instruction_of(value, computation, module.computations)
            metadata = {} if instruction is None else metadata_of(instruction)
            file, line = module.sources.line(metadata)
            array = array._replace(
                op_name=metadata.get("op_name", ""),
                source_file=file,
                source_line=line,
                opcode=_opcode_of(instruction, module.computations),
            )
        found.append(array)
    return found


class TemporaryValue(NamedTuple):
    """A value in the temporary memory, as XLA's assignment of buffers has it."""

    name: str
    element: str  # the position in a tuple, or empty
    nbytes: int
    start: int
    type: str

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


def values_of(assignment: str) -> Iterator[TemporaryValue]:
    """Yield the values in the temporary memory of the device."""
    is_temporary = False
    for line in assignment.splitlines():
        if line.startswith("allocation "):
            allocation = _ALLOCATION.match(line)
            # Memory of another color is on the chip.
            is_temporary = allocation is not None and allocation[1] is None
        elif is_temporary and (value := _VALUE.match(line)):
            yield TemporaryValue(value[1], value[2] or "", int(value[3]), int(value[4]), value[5])


def _instruction_of(
    value: TemporaryValue, maker: Computation, computations: Mapping[str, Computation]
) -> Instruction | None:
    """Return the instruction that made a value; None if it is unknown.

    The values of a fusion, or of a collective that XLA combined, may be of several lines.
    """
    instruction = maker.instruction(value.name)
    if instruction is None or not value.element:
        return instruction
    if instruction.opcode == "fusion":
        body = computations[instruction.called("calls")[0]]
        root = body.instruction(body.root)
        if root is not None and root.opcode == "tuple":
            return body.instruction(root.operand_names[int(value.element)])
    return None if instruction.kind and len(instruction.operands) > 1 else instruction


def _opcode_of(instruction: Instruction | None, computations: Mapping[str, Computation]) -> str:
    """Return the operation; of a fusion, the one before changes of type and form."""
    body = None
    while instruction is not None:
        if instruction.opcode == "fusion":
            body = computations[instruction.called("calls")[0]]
            instruction = body.instruction(body.root)
        elif body is not None and instruction.opcode in _FORMS:
            instruction = body.instruction(instruction.operand_names[0])
        else:
            return instruction.opcode
    return ""
