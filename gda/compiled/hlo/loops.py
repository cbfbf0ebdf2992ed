"""The number of times that a loop runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gda.compiled.hlo.instructions import Computation, Instruction, leaves

_MAX_DEPTH = 8  # of calls and operations


class _Element(NamedTuple):
    """An element of the values that a loop carries, plus a number."""

    position: int
    plus: int


class _Test(NamedTuple):
    """The test that an element is below a number."""

    element: _Element
    stop: int


def trip_count(
    loop: Instruction, caller: Computation, computations: Mapping[str, Computation]
) -> int | None:
    """Return the trips of a loop, from XLA or, on TPUs, from its counter; None if unknown."""
    known = re.search(r"known_trip_count\W*n\W*(\d+)", loop.attributes.get("backend_config", ""))
    if known:
        return int(known[1])
    names = loop.called("condition", "body")
    if len(names) != 2:
        return None
    condition, body = computations[names[0]], computations[names[1]]
    carried = caller.instruction(loop.operand_names[0])
    update = body.instruction(body.root)
    test = _value(condition, condition.root, None, computations)
    if not isinstance(test, _Test) or carried is None or update is None:
        return None
    if carried.opcode != "tuple" or update.opcode != "tuple":
        return None
    index = test.element.position
    first = _value(caller, carried.operand_names[index], None, computations)
    after = _value(body, update.operand_names[index], None, computations)
    if not isinstance(first, int) or not isinstance(after, _Element):
        return None
    if after.position != index or after.plus < 1:
        return None
    return max(0, -(-(test.stop - test.element.plus - first) // after.plus))


_Value = int | _Element | _Test | None


def _value(
    computation: Computation,
    name: str,
    arguments: list[_Value] | None,
    computations: Mapping[str, Computation],
    depth: int = 0,
) -> _Value:
    """Return an integer of a loop, by default of its parameter; None if it is hard to find."""
    instruction = computation.instruction(name)
    if instruction is None or depth > _MAX_DEPTH:
        return None
    if instruction.opcode == "constant":
        number = re.fullmatch(r"-?\d+", "".join(instruction.operands))
        return int(number[0]) if number else None
    if instruction.opcode == "parameter":
        return arguments[int(instruction.operands[0])] if arguments else None
    names = instruction.operand_names
    if instruction.opcode == "get-tuple-element":
        carried = computation.instruction(names[0])
        is_carried = arguments is None and carried is not None and carried.opcode == "parameter"
        return _Element(int(instruction.attributes["index"]), 0) if is_carried else None
    if instruction.opcode not in ("copy", "convert", "add", "compare", "fusion", "call"):
        return None
    operands = [_value(computation, each, arguments, computations, depth + 1) for each in names]
    if instruction.opcode not in ("fusion", "call"):
        return _computed(instruction, computation, operands)
    callees = [computations[name] for name in instruction.called()]
    if len(callees) != 1:
        return None
    return _value(callees[0], callees[0].root, operands, computations, depth + 1)


def _computed(instruction: Instruction, computation: Computation, operands: list[_Value]) -> _Value:
    direction = instruction.attributes.get("direction")
    match instruction.opcode, operands:
        case "copy", [value]:
            return value
        case "convert", [value]:
            source = computation.instruction(instruction.operand_names[0])
            return value if source and _keeps_values(source.type, instruction.type) else None
        case "add", [int(a), int(b)]:
            return a + b
        case "add", [_Element(position, plus), int(more)] | [int(more), _Element(position, plus)]:
            return _Element(position, plus + more)
        case "compare", [_Element() as tested, int(stop)] if direction in ("LT", "LE"):
            return _Test(tested, stop + (direction == "LE"))
        case "compare", [int(stop), _Element() as tested] if direction in ("GT", "GE"):
            return _Test(tested, stop + (direction == "GE"))
    return None


def _keeps_values(source: str, target: str) -> bool:
    """Return True if the target type has every number of the source type, an integer type."""
    (before, *_), (after, *_) = leaves(source), leaves(target)
    are_integers = re.fullmatch(r"(u?int(8|16|32|64)){2}", before.dtype + after.dtype)
    return bool(are_integers) and np.can_cast(before.dtype, after.dtype)
