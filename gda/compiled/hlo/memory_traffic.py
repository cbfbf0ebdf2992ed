"""The bytes that a kernel reads and writes in the memory of its device."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping

from gda.compiled.hlo.instructions import Computation, Instruction, leaves
from gda.compiled.hlo.loops import trip_count
from gda.compiled.hlo.products import product_of

_SLICES = ("dynamic-slice", "slice", "gather")
# The operand that has the new elements of an array which is updated in place.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_KEEPS_ELEMENTS = ("bitcast", "convert", "copy", "reshape", "transpose")


class MemoryTraffic:
    """The accesses of the instructions of a program.

    An array that is only sliced counts as its slices, and one that is updated in place as the
    update. Memory on the chip, which has a number in the layout, does not count.
    """

    def __init__(self, computations: Mapping[str, Computation], fused: Mapping[str, Instruction]):
        self.computations, self.fused = computations, fused
        self._users_in = functools.cache(self._find_users)
        self._parameters_of = functools.cache(self._find_parameters)

    def of(self, computation: Computation, name: str) -> tuple[int, ...]:
        """Return the bytes of each array that an instruction reads or writes."""
        instruction = computation.instruction(name)
        assert instruction is not None
        found = []
        for position, operand in enumerate(instruction.operand_names):
            if operand in instruction.operand_names[:position]:
                continue
            if whole := self._in_memory(computation, operand):
                found.append(self._read(computation, name, position, whole))
        written = self._written(computation, name)
        arrays = leaves(instruction.type)
        if instruction.opcode.endswith("-start"):
            # The type of a beginning is (operands, results, context).
            arrays = arrays[len(instruction.operand_names) :][:1]
            if instruction.opcode == "copy-start":
                arrays = leaves(instruction.type)[:1]
        elif '"__cu' in instruction.attributes.get("custom_call_target", ""):
            arrays = arrays[:1]  # the others are its workspace
        for nbytes, array in zip(written, arrays, strict=False):
            found += [nbytes] if array.space == 0 else []
        return tuple(int(each) for each in found if each)

    def of_argument(self, computation: Computation, name: str) -> int:
        """Return the bytes of an argument that are read, each element once."""
        return int(self._accessed(computation, name))

    # Reads.

    def _in_memory(self, computation: Computation, name: str) -> int:
        instruction = computation.instruction(name)
        if instruction is None or instruction.opcode in ("constant", "iota", "partition-id"):
            return 0
        return sum(array.nbytes for array in leaves(instruction.type) if array.space == 0)

    def _nbytes(self, computation: Computation, name: str) -> int:
        instruction = computation.instruction(name)
        return 0 if instruction is None else sum(each.nbytes for each in leaves(instruction.type))

    def _read(self, computation: Computation, user: str, position: int, whole: float) -> float:
        """Return the bytes of one operand that an instruction reads."""
        instruction = computation.instruction(user)
        if instruction is None:
            return whole
        opcode = instruction.opcode.removesuffix("-start")
        if position == 0 and opcode in _SLICES:
            return min(whole, self._nbytes(computation, user))
        if (position == 0 and opcode in _UPDATES) or opcode == "conditional":
            return 0  # the branch that runs may read nothing
        if opcode in ("fusion", "call", "async") and (called := instruction.called()):
            names = self._parameters_of(called[0])
            if position in names:
                return self._accessed(self.computations[called[0]], names[position])
        return whole

    def _accessed(self, computation: Computation, name: str) -> float:
        """Return the bytes of a value that all users in a computation read, at most all."""
        whole = self._nbytes(computation, name)
        if name == computation.root:
            return whole
        keeping = _KEEPS_ELEMENTS if computation.name in self.fused else ("bitcast",)
        total = 0.0
        for user, position in self._users_in(computation.name).get(name, ()):
            instruction = computation.instruction(user)
            opcode = "" if instruction is None else instruction.opcode
            if opcode in keeping:
                size = self._nbytes(computation, user) or 1
                total += whole * self._accessed(computation, user) / size
            elif (product := product_of(computation, user)) is not None and product.kernel:
                continue  # one that is not known may read a part, as attention over pages does
            elif opcode == "tuple":
                total += self._accessed_in_tuple(computation, user, position)
            else:
                total += self._read(computation, user, position, whole)
        return min(total, whole)

    def _accessed_in_tuple(self, computation: Computation, name: str, index: int) -> float:
        """Return the bytes of an element of a carried tuple that loops read."""
        total = 0.0
        for user, _ in self._users_in(computation.name).get(name, ()):
            instruction = computation.instruction(user)
            if instruction is None or instruction.opcode != "while":
                continue
            body = self.computations[instruction.called("body")[0]]
            times = trip_count(instruction, computation, self.computations) or 0
            parameter = self._parameters_of(body.name)[0]
            root = body.instruction(body.root)
            for element, _ in self._users_in(body.name).get(parameter, ()):
                found = body.instruction(element)
                if found is None or found.attributes.get("index") != str(index):
                    continue
                is_kept = root is not None and root.operand_names[index : index + 1] == [element]
                total += self._accessed(body, element) * (times if is_kept else min(times, 1))
        return total

    # Writes.

    def _written(self, computation: Computation, name: str) -> list[float]:
        """Return the bytes of each result that an instruction writes."""
        instruction = computation.instruction(name)
        if instruction is None:
            return []
        opcode = instruction.opcode.removesuffix("-start")
        names = instruction.operand_names
        if opcode in ("fusion", "call", "async") and (called := instruction.called()):
            return self._written(self.computations[called[0]], self.computations[called[0]].root)
        if opcode == "tuple":
            return [sum(self._written(computation, each)) for each in names]
        if opcode == "bitcast" and computation.name in self.fused:
            return self._written(computation, names[0])
        if opcode in _UPDATES and self._is_given(computation, names[0]):
            return [self._nbytes(computation, names[_UPDATES[opcode]])]
        return [float(each.nbytes) for each in leaves(instruction.type)]

    def _is_given(self, computation: Computation, name: str) -> bool:
        """Return True for an array that the computation takes, which it can update in place."""
        instruction = computation.instruction(name)
        if instruction is not None and instruction.opcode in ("bitcast", "get-tuple-element"):
            return self._is_given(computation, instruction.operand_names[0])
        is_top = computation.name not in self.fused
        return instruction is not None and (is_top or instruction.opcode == "parameter")

    # The lines of a computation.

    def _find_users(self, name: str) -> dict[str, list[tuple[str, int]]]:
        computation = self.computations[name]
        users: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for user in computation.lines:
            if (instruction := computation.instruction(user)) is None:
                continue
            if instruction.opcode not in ("parameter", "constant"):
                for position, operand in enumerate(instruction.operand_names):
                    users[operand].append((user, position))
        return users

    def _find_parameters(self, name: str) -> dict[int, str]:
        computation = self.computations[name]
        read = ((each, computation.instruction(each)) for each in computation.lines)
        return {
            int(found.operands[0]): each
            for each, found in read
            if found is not None and found.opcode == "parameter"
        }
