"""How often a loop runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gda.hlo.text import Computation, Instruction

_MAX_DEPTH = 8  # of what is still plain


@dataclass(frozen=True)
class _Element:
    """An element of what a loop carries, plus a number."""

    index: int
    plus: int


@dataclass(frozen=True)
class _Test:
    """Whether an element is below a number."""

    element: _Element
    stop: int


def trip_count(
    loop: Instruction, caller: Computation, computations: Mapping[str, Computation]
) -> int | None:
    """Return how often a loop runs: as XLA says, or where it plainly counts up to a number."""
    known = re.search(r"known_trip_count\W*n\W*(\d+)", loop.attributes.get("backend_config", ""))
    if known:
        return int(known[1])
    condition = computations[loop.called("condition")[0]]
    body = computations[loop.called("body")[0]]
    carried = caller.instruction(loop.operand_names[0])
    update = body.instruction(body.root)
    test = _value(condition, condition.root, None, computations)
    if not isinstance(test, _Test) or carried is None or update is None:
        return None
    if carried.opcode != "tuple" or update.opcode != "tuple":
        return None
    index = test.element.index
    first = _value(caller, carried.operand_names[index], None, computations)
    after = _value(body, update.operand_names[index], None, computations)
    if not isinstance(first, int) or not isinstance(after, _Element):
        return None
    if after.index != index or after.plus < 1:
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
    """Return an integer of a loop as far as it is plain; None where it is not.

    Without ``arguments`` the only parameter is what the loop carries.
    """
    instruction = computation.instruction(name)
    if instruction is None or depth > _MAX_DEPTH:
        return None
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode == "constant":
        number = re.fullmatch(r"-?\d+", "".join(instruction.operands))
        return int(number[0]) if number else None
    if opcode == "parameter":
        return arguments[int(instruction.operands[0])] if arguments else None
    if opcode == "get-tuple-element":
        carried = computation.instruction(instruction.operand_names[0])
        is_carried = arguments is None and carried is not None and carried.opcode == "parameter"
        return _Element(int(attributes["index"]), 0) if is_carried else None
    if opcode not in ("copy", "convert", "add", "compare", "fusion", "call"):
        return None
    given = [
        _value(computation, operand, arguments, computations, depth + 1)
        for operand in instruction.operand_names
    ]
    if opcode in ("copy", "convert"):
        return given[0]
    if opcode == "add":
        return _sum(*given)
    if opcode == "compare":
        return _comparison(given, attributes.get("direction", ""))
    callee = computations[(instruction.called("calls") or instruction.called("to_apply"))[0]]
    return _value(callee, callee.root, given, computations, depth + 1)


def _sum(a: _Value, b: _Value) -> _Value:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if isinstance(a, int):
        a, b = b, a
    if isinstance(a, _Element) and isinstance(b, int):
        return _Element(a.index, a.plus + b)
    return None


def _comparison(given: list[_Value], direction: str) -> _Value:
    a, b = given
    if isinstance(a, int):
        mirrored = {"GT": "LT", "GE": "LE"}
        a, b, direction = b, a, mirrored.get(direction, "")
    if isinstance(a, _Element) and isinstance(b, int) and direction in ("LT", "LE"):
        return _Test(a, b + (direction == "LE"))
    return None
