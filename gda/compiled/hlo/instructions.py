"""The text of a program: its computations, their instructions and types, read line by line."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from gda.compiled.hlo.groups import numbers

Shape = tuple[int, ...]

# All operations of these forms are reported, even unknown kinds.
COLLECTIVE = r"(?:all-|collective-|reduce-scatter|ragged-all-|send)[\w\-]*"
_CALLS = (
    "calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
    "|called_computations"
)
# Most lines compute; only those that can communicate or call are read in full.
_OF_INTEREST = re.compile(rf"\s{COLLECTIVE}\(|\b(?:{_CALLS})=")
_BETWEEN_SLICES = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "REDUCE_SCATTER": "reduce-scatter",
    "ONE_TO_ONE": "collective-permute",
}
_BEGINS = 'custom_call_target="AsyncCollectiveStart"'


# Types.


class ArrayType(NamedTuple):
    """One array of a type, on one device; ``space`` is 0 for the memory of the device."""

    dtype: str
    shape: Shape
    nbytes: int
    space: int = 0


_LEAF = re.compile(r"([a-z]+?)(\d*)((?<=\d)[a-z]\w*)?\[([^\]]*)\](\{[^}]*\})?")
_LETTERS = {"s": "int", "u": "uint", "f": "float", "c": "complex", "bf": "bfloat"}


def leaves(type_text: str) -> list[ArrayType]:
    """Return the arrays of a type in order, without tokens."""
    found = _LEAF.findall(type_text)
    return [_leaf(*parts) for parts in found if parts[0] not in ("token", "opaque")]


def _leaf(letters: str, digits: str, form: str, dims: str, layout: str) -> ArrayType:
    shape = numbers(dims)  # a dynamic dimension is printed as its bound, <=8
    found = re.search(r"S\((\d+)\)", layout)
    space = int(found[1]) if found else 0
    if letters == "pred":
        return ArrayType("bool", shape, math.prod(shape), space)
    if not digits:
        raise unreadable(f"{letters}[{dims}]")
    dtype = f"{_LETTERS.get(letters, letters)}{digits}" + (f"_{form}" if form else "")
    # Elements below a byte take a whole one, unless the layout packs them: E(4).
    bits = int(digits) if f"E({digits})" in layout else max(8, int(digits))
    return ArrayType(dtype, shape, -(-math.prod(shape) * bits // 8), space)


# Instructions and computations.

_DEFINITION = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
# A group of thousands of devices is one token.
_TOKEN = re.compile(rf"{_STRING}|'[^']*'|\{{[\d,]*\}}|[()\[\]{{}},]")  # names of axes are in '
_QUOTED = re.compile(rf"{_STRING}|'[^']*'")
_NAME = re.compile(r"%([\w.\-]+)")
_MOST_SHOWN = 500  # characters of a line in a message
_STRING_OR_COMMENT = re.compile(rf"({_STRING})|/\*.*?\*/")


class Instruction(NamedTuple):
    """``type opcode(operands), attributes``."""

    type: str
    opcode: str
    operands: list[str]
    attributes: dict[str, str]

    @property
    def kind(self) -> str | None:
        """The kind of collective that it is or begins; None for others, and for the end of one."""
        kind = self.opcode.removesuffix("-start")
        if not re.fullmatch(COLLECTIVE, kind) or kind.endswith(("-done", "-update")):
            return None
        if "calls" in self.attributes:  # it is read in the computation
            return None
        if "is_host_transfer" in self.attributes:
            transfer = re.search(r'megascale_transfer_type="(\w+)"', self.frontend_attributes)
            return _BETWEEN_SLICES.get(transfer[1], "send") if transfer else None
        return kind

    @property
    def is_between_slices(self) -> bool:
        """It goes over the network between slices of TPUs, by way of the hosts."""
        return "megascale_transfer_type" in self.frontend_attributes

    @property
    def frontend_attributes(self) -> str:
        return self.attributes.get("frontend_attributes", "")

    @property
    def target(self) -> str:
        """The target of a custom call; empty for other instructions."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def operand_names(self) -> list[str]:
        return [operand.split()[-1].lstrip("%") for operand in self.operands]

    def called(self, *attributes: str) -> list[str]:
        """The computations that these attributes name; without any, those of all attributes."""
        of_each = [self.attributes.get(key, "") for key in attributes or _CALLS.split("|")]
        return re.findall(r"[\w.\-]+", " ".join(of_each))


def parse_instruction(text: str) -> Instruction | None:
    """Return the instruction right of an equals sign; None if it is none."""
    if "/*" in text:
        text = _STRING_OR_COMMENT.sub(r"\1", text)
    end = _end_of_bracket(text, 0) if text.startswith("(") else text.find(" ")
    opcode = re.match(r"\s*([a-z][\w\-]*)\(", text[end:]) if end > 0 else None
    if opcode is None:
        return None
    start = end + opcode.end() - 1
    close = _end_of_bracket(text, start)
    if close < 0:
        return None
    operands = split_at_commas(text[start + 1 : close - 1])
    return Instruction(text[:end], opcode[1], operands, _attributes(text[close:]))


def _attributes(text: str) -> dict[str, str]:
    pieces = _with_whole_meshes(split_at_commas(text))
    pairs = [piece.partition("=") for piece in pieces]
    return {key: value for key, equals, value in pairs if equals}


def _with_whole_meshes(pieces: list[str]) -> list[str]:
    """Join the pieces of a mesh: ``replica_groups=mesh[…], device_ids=(…) {axes}``."""
    joined: list[str] = []
    for piece in pieces:
        is_begun = joined and re.match(r"replica_groups=@?mesh", joined[-1])
        if is_begun and not joined[-1].endswith("}"):
            joined[-1] += f", {piece}"
        else:
            joined.append(piece)
    return joined


def _end_of_bracket(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at ``start``; -1 if none does."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0 and token[0] in ")]}":
            return token.end()
    return -1


def split_at_commas(text: str) -> list[str]:
    """Return the parts between the commas outside brackets."""
    depth, start, parts = 0, 0, []
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0 and token[0] == ",":
            parts.append(text[start : token.start()])
            start = token.end()
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


@dataclass(eq=False)
class Computation:
    """The lines of a computation by the name that each defines, read on demand."""

    name: str
    lines: dict[str, str] = field(default_factory=dict)
    root: str = ""
    read: dict[str, Instruction | None] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)  # each name, and a line that uses it

    def instruction(self, name: str) -> Instruction | None:
        if name not in self.read:
            # The files that XLA writes name an element of a tuple ``%name#index``.
            whole, _, index = name.partition("#")
            found = parse_instruction(self.lines.get(whole, ""))
            if found is None and whole in self.lines:
                raise unreadable(self.lines[whole])
            if found and index:
                element = split_at_commas(found.type[1:-1])[int(index)]
                found = Instruction(element, "get-tuple-element", [whole], {"index": index})
            self.read[name] = found
        return self.read[name]

    @cached_property
    def of_interest(self) -> dict[str, Instruction]:
        """The instructions that communicate or call, by name."""
        found = {}
        for name, text in self.lines.items():
            if not _OF_INTEREST.search(f" {text}"):
                continue
            instruction = self.instruction(name)
            assert instruction is not None  # it would have raised
            found[name] = instruction
        return found

    @cached_property
    def ended_elsewhere(self) -> set[str]:
        """The names of collectives that a TPU begins here and ends in another computation."""
        lines = [name for name, text in self.lines.items() if _BEGINS in text]
        read = filter(None, map(self.instruction, lines))
        return {operand for instruction in read for operand in instruction.operand_names}

    def check(self, computations: Mapping[str, Computation]) -> None:
        """Raise ``ValueError`` if there is no ROOT, or a name that a line uses is not defined."""
        if not self.root:
            raise unreadable(f"%{self.name}", "the computation has no ROOT")
        for name, user in self.used.items():
            if name not in self.lines and name not in computations:
                raise unreadable(self.lines[user], f"%{name} is not defined")


def parse_computations(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of a module by name, and the name of its entry.

    Raises ``ValueError`` for incomplete text, which would be lost in silence: a statement or a
    computation without its end, a computation without a ROOT, or a name that is not defined.
    """
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry = ""
    # Of one statement: its lines, the names in it, and the brackets that are open.
    lines: list[str] = []
    names: list[str] = []
    depths = [0, 0, 0]
    # Not splitlines(): a string may have the other separators that it knows.
    for line in text.split("\n"):
        if not lines and line.lstrip().startswith("}") and current is not None:
            current = None
            continue
        bare = _QUOTED.sub("", line)
        lines.append(line.strip())
        names += _NAME.findall(bare)
        depths = [*map(operator.add, depths, _depths(bare, line))]
        if min(depths) < 0:
            raise unreadable(lines[0], "its brackets do not match")
        begins = current is None and line.rstrip().endswith("{")
        # The raw JSON of a kernel's metadata has lines of its own, which may begin with anything.
        if sum(depths) > begins or line.endswith(","):
            continue
        statement, used = " ".join(lines), names
        lines, names, depths = [], [], [0, 0, 0]
        if current is None:
            if header := _HEADER.match(statement):
                current = computations[header[2]] = Computation(header[2])
                entry = header[2] if header[1] else entry
        elif definition := _DEFINITION.match(statement):
            current.lines[definition[2]] = definition[3]
            current.used |= dict.fromkeys(used, definition[2])
            current.root = definition[2] if definition[1] else current.root
        elif statement:
            raise unreadable(statement)
    if not entry:
        raise ValueError(
            "this is not the text of a compiled program, which has an ENTRY: "
            f"{text.strip()[:60]!r}; pass the result of compiled.as_text()"
        )
    if lines:
        raise unreadable(lines[0], "its brackets do not match")
    if current is not None:
        raise unreadable(f"%{current.name}", "the computation has no end")
    for computation in computations.values():
        computation.check(computations)
    return computations, entry


def _depths(bare: str, line: str) -> list[int]:
    """Return the brackets of each kind that a line opens, less those that it closes."""
    if '"' in bare:
        raise unreadable(line, "a quote has no end")
    return [bare.count(opening) - bare.count(closing) for opening, closing in ("()", "[]", "{}")]


def unreadable(line: str, reason: str = "") -> ValueError:
    because = f", because {reason}" if reason else ""
    return ValueError(
        "a line of the compiled program may communicate or compute, and gda cannot read it"
        f"{because}: {line.strip()[:_MOST_SHOWN]!r}; please report it, with the version of JAX"
    )
