"""The part of a collective in the body of a loop: does each trip need it?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from gda.compiled.hlo.instructions import Computation, leaves

_MOVES = {"copy", "bitcast", "convert", "reshape", "transpose", "get-tuple-element", "tuple"}
_ADDS = _MOVES | {
    *("add", "multiply", "divide", "broadcast", "constant", "parameter", "all-reduce-done"),
}


def is_of_same_array(body: Computation, name: str) -> bool:
    """Return True if a collective has the same operands in each trip of a loop."""
    elements, after = _elements(body), _carried(body)
    seen, todo = set(), [*_operands(body, name)]
    while todo:
        each = todo.pop()
        if each in elements:
            if _source(body, after[elements[each]]) != each:
                return False
        elif each not in seen:
            instruction = body.instruction(each)
            if instruction is None or instruction.opcode in ("parameter", "rng", "infeed"):
                return False
            todo += _operands(body, each)
        seen.add(each)
    return bool(after)


def is_only_summed(body: Computation, name: str, computations: Mapping[str, Computation]) -> bool:
    """Return True if the results of an all-reduce are only added to values that a loop carries.

    Then one all-reduce of the sums after the loop does the same, in the same memory.
    """
    users: dict[str, list[str]] = defaultdict(list)
    for each in body.lines:
        for operand in _operands(body, each):
            users[operand].append(each)
    elements, after = _elements(body), _carried(body)
    reached, todo = {name}, [name]
    while todo:
        for user in users[todo.pop()]:
            if user == body.root or user in reached:
                continue
            if not _only_adds(body, user, computations):
                return False
            reached.add(user)
            todo.append(user)
    sums = [at for at, operand in enumerate(after) if operand in reached]
    read = {element for element, at in elements.items() if at in sums}
    if not sums or len(read) != len(sums):
        return False
    for each in read:
        todo = [each]
        while todo:
            for user in users[todo.pop()]:
                instruction = body.instruction(user)
                if user in reached:
                    continue
                if instruction is None or user == body.root or instruction.opcode not in _MOVES:
                    return False
                todo.append(user)
    return _nbytes(body, [after[at] for at in sums]) >= _nbytes(body, [name])


def _elements(body: Computation) -> dict[str, int]:
    """Return the values that the loop carries, with their positions, by name."""
    found = {}
    for name in body.lines:
        instruction = body.instruction(name)
        if instruction is not None and instruction.opcode == "get-tuple-element":
            source = body.instruction(instruction.operand_names[0])
            if source is not None and source.opcode == "parameter":
                found[name] = int(instruction.attributes["index"])
    return found


def _carried(body: Computation) -> list[str]:
    """Return the names of the values after a trip, by position."""
    root = body.instruction(body.root)
    return root.operand_names if root is not None and root.opcode == "tuple" else []


def _source(body: Computation, name: str) -> str:
    instruction = body.instruction(name)
    while instruction is not None and instruction.opcode in ("copy", "bitcast"):
        name = instruction.operand_names[0]
        instruction = body.instruction(name)
    return name


def _operands(body: Computation, name: str) -> list[str]:
    instruction = body.instruction(name)
    # A constant has its value where others have operands.
    names = [] if instruction is None else instruction.operand_names
    return [each for each in names if each in body.lines]


def _only_adds(body: Computation, name: str, computations: Mapping[str, Computation]) -> bool:
    instruction = body.instruction(name)
    if instruction is None or instruction.opcode not in ("fusion", "call"):
        return instruction is not None and instruction.opcode in _ADDS
    inner = [computations[each] for each in instruction.called()]
    return all(_only_adds(each, line, computations) for each in inner for line in each.lines)


def _nbytes(body: Computation, names: list[str]) -> int:
    found = filter(None, map(body.instruction, names))
    return sum(leaf.nbytes for each in found for leaf in leaves(each.type))
