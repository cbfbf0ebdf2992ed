"""The collectives of a program as a whole: totals, tables and sentences."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, overload

from gda.compiled.hlo.program import Collective
from gda.layout.boundary import set_module
from gda.layout.tables import table
from gda.layout.text import counted, format_bytes, typed_shape

Axes = tuple[str, ...]
NumberT = TypeVar("NumberT", int, float)


@set_module("gda")
class Traffic(NamedTuple):
    """The communication over some mesh axes in one call; ``Collectives.by_axis`` returns them.

    Attributes:
      executions: number of collectives executed; None if the length of a loop is unknown.
      nbytes: bytes of their operands on one device; None in the same case.

    >>> import gda
    >>> reduction = gda.Collective('all-reduce', ('x',), ((4,),), ('int32',), ((4,),), ('int32',),
    ...                            nbytes=16, nbytes_output=16, count=3)
    >>> gda.Collectives((reduction,), {'x': 2}).by_axis()
    {('x',): Traffic(executions=3, nbytes=48)}
    """

    executions: int | None
    nbytes: int | None


@set_module("gda")
@dataclass(frozen=True, repr=False)
class Collectives(Sequence[Collective]):
    """The collectives of a compiled function, in program order.

    A sequence of ``Collective``, printed as a table.

    Attributes:
      found: the collectives.
      mesh_shape: sizes of the axes by name, in mesh order; empty if no mesh is known.

    >>> import gda
    >>> print(gda.Collectives((), {'x': 2}))
    no collectives on the mesh {'x': 2}
    """

    found: tuple[Collective, ...]
    mesh_shape: dict[str, int] = field(hash=False)  # a dict has no hash

    def __len__(self) -> int:
        return len(self.found)

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Collective, ...]: ...
    def __getitem__(self, index: int | slice) -> Collective | tuple[Collective, ...]:
        return self.found[index]

    @property
    def nbytes_total(self) -> int | None:
        """Bytes of all operands on one device in one call; None if a loop's length is unknown.

        Collectives in branches count as if they were executed.
        """
        return summed(collective.nbytes_total for collective in self)

    def by_axis(self) -> dict[Axes | None, Traffic]:
        """Return the total for each set of mesh axes.

        A collective over two axes counts for the pair only. The key None is for groups that no axes
        form. Collectives in branches count as if they were executed.
        """
        totals: dict[Axes | None, Traffic] = {}
        for collective in self:
            so_far = totals.get(collective.axes, Traffic(0, 0))
            totals[collective.axes] = Traffic(
                summed((so_far.executions, collective.count)),
                summed((so_far.nbytes, collective.nbytes_total)),
            )
        return totals

    def __repr__(self) -> str:
        lines = table(self._rows()) if self else []
        return "\n".join([self._headline(), *(f"  {line}" for line in lines)])

    def _headline(self) -> str:
        mesh = f"the mesh {self.mesh_shape}" if self.mesh_shape else "an unknown mesh"
        some = (
            f"{counted(len(self), 'collective')} on {mesh}; bytes are of the operands on one device"
        )
        return some if self else f"no collectives on {mesh}"

    def _rows(self) -> list[list[str]]:
        header = ["collective", "over", "operands", "times", "bytes", "from"]
        totals = [
            ["total", format_axes(axes), "", _format_count(executions), format_size(nbytes), ""]
            for axes, (executions, nbytes) in self.by_axis().items()
        ]
        return [header, *map(_row, self), *totals]


def summed(numbers: Iterable[NumberT | None]) -> NumberT | None:
    """Return the sum; None if one of them is unknown."""
    total: Any = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _row(collective: Collective) -> list[str]:
    count = _format_count(collective.count)
    return [
        collective.kind,
        format_axes(collective.axes),
        _format_operands(collective),
        f"<={count}" if collective.is_conditional else count,
        format_size(collective.nbytes_total),
        format_source(collective),
    ]


def format_axes(axes: Axes | None) -> str:
    """Return the names of the axes, or words for none."""
    return "other groups" if axes is None else ", ".join(map(str, axes)) or "no axes"


def _format_operands(collective: Collective) -> str:
    operands = [*map(typed_shape, collective.operand_dtypes, collective.operand_shapes)]
    if not operands:
        return "none"
    same = operands.count(operands[0])
    more = len(operands) - same
    first = operands[0] if same == 1 else f"{same} x {operands[0]}"
    return f"{first} and {more} more" if more else first


def format_source(of: Any) -> str:
    """Return file and line of a collective, a step or a temporary, or its place in the trace."""
    return of.op_name if of.source_file is None else format_line(of.source_file, of.source_line)


def format_line(file: str, line: int | None) -> str:
    """Return a line of a file, relative to the current folder if that is shorter."""
    if re.search(r"[\\/]ipykernel_\d+[\\/]\d+\.py$", file):
        file = "cell"  # the number in its name is a hash of the cell
    elif os.path.splitdrive(file)[0] == os.path.splitdrive(os.getcwd())[0]:
        file = min(file, os.path.relpath(file), key=len)
    return f"{file}:{line}"


def _format_count(count: int | None) -> str:
    return "?" if count is None else str(count)


def format_size(nbytes: int | None) -> str:
    """Return a size in words, or a question mark for an unknown one."""
    return "?" if nbytes is None else format_bytes(nbytes)
