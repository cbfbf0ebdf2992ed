"""The temporaries that a device holds at each instruction, from XLA's own assignment of buffers."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence

from gda.compiled.hlo.allocations import Temporary, TemporaryValue, largest_of, makers_of, values_of
from gda.compiled.hlo.instructions import Computation
from gda.compiled.hlo.program import Module

# Their results are the memory of their operands.
_SAME_MEMORY = ("bitcast", "opt-barrier", "while", "copy-done")


class LiveRanges:
    """The lives of the temporaries of a program, each from its instruction to the last user.

    XLA tells the memory of each value and the order of the instructions, and this follows values
    through tuples, loops and the ends of asynchronous operations. A value that another has
    overwritten counts once.
    """

    def __init__(self, assignment: str, modules: Sequence[Module]) -> None:
        self._makers = makers_of(modules)
        self._values: defaultdict[str, list[TemporaryValue]] = defaultdict(list)
        for value in values_of(assignment):
            if value.name in self._makers:
                _, computation = self._makers[value.name]
                self._values[computation.name].append(value)
        self._positions = functools.cache(self._find_positions)
        self._users = functools.cache(self._find_users)
        self._last = functools.cache(self._find_last)
        self._ranges = functools.cache(self._find_ranges)

    def at(self, names: Sequence[str]) -> list[TemporaryValue]:
        """Return the values at an instruction; before its name, those of the loops around it."""
        found = []
        for name in names:
            if name in self._makers:
                _, computation = self._makers[name]
                position = self._positions(computation)[name]
                ranges = self._ranges(computation)
                found += [each for each, start, stop in ranges if start <= position <= stop]
        return found

    def nbytes_at(self, names: Sequence[str]) -> int:
        """Return the bytes of memory that these values take."""
        total = end = 0
        for value in sorted(self.at(names), key=lambda each: each.start):
            total += max(0, value.stop - max(value.start, end))
            end = max(end, value.stop)
        return total

    def largest_at(self, names: Sequence[str]) -> list[Temporary]:
        """Return the largest of these values, as arrays."""
        return largest_of(sorted(self.at(names), key=lambda each: -each.nbytes), self._makers)

    def _find_positions(self, computation: Computation) -> dict[str, int]:
        return {name: at for at, name in enumerate(computation.lines)}

    def _find_users(self, computation: Computation) -> dict[str, list[tuple[str, int]]]:
        users: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for user in computation.lines:
            instruction = computation.instruction(user)
            if instruction is not None and instruction.opcode not in ("parameter", "constant"):
                for position, operand in enumerate(instruction.operand_names):
                    users[operand].append((user, position))
        return users

    def _find_ranges(self, computation: Computation) -> list[tuple[TemporaryValue, int, float]]:
        found = []
        for value in self._values[computation.name]:
            instruction = computation.instruction(value.name)
            is_given = instruction is not None and instruction.opcode == "parameter"
            start = 0 if is_given else self._positions(computation)[value.name]
            found.append((value, start, self._last(computation, value.name, value.element)))
        return found

    def _find_last(self, computation: Computation, name: str, element: str) -> float:
        """Return the position of the last user of a value, or of an element of a tuple."""
        if name == computation.root:
            return math.inf
        last: float = self._positions(computation)[name]
        for user, position in self._users(computation).get(name, ()):
            instruction = computation.instruction(user)
            assert instruction is not None
            opcode = instruction.opcode
            last = max(last, self._positions(computation)[user])
            follows: str | None = None
            if opcode == "get-tuple-element":
                follows = "" if element in ("", instruction.attributes["index"]) else None
            elif opcode == "tuple":
                follows = str(position)
            elif opcode in _SAME_MEMORY:
                follows = element
            elif opcode.endswith(("-done", "-update")):
                follows = ""
            elif opcode.endswith("-start"):  # it reads its operands until its end
                ends = (each for each, _ in self._users(computation).get(user, ()))
                last = max([last, *map(self._positions(computation).__getitem__, ends)])
            if follows is not None:
                last = max(last, self._last(computation, user, follows))
        return last
