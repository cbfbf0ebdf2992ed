"""The text of a program: its computations, their instructions and types, read line by line."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from gda.compiled.hlo.groups import numbers

Shape = tuple[int, ...]

# Anything of these forms is reported, even of an unknown kind.
COLLECTIVE = r"(?:all-|collective-|reduce-scatter|ragged-all-|send)[\w\-]*"
_CALLS = (
    "calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
    "|called_computations"
)
# Most lines compute; only those that can communicate or call are read in full.
_OF_INTEREST = re.compile(rf"\s{COLLECTIVE}\(|\b(?:{_CALLS})=")
_COMMUNICATES = re.compile(rf"\s{COLLECTIVE}\(")
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
_STRING = r'"(?:\\.|[^"\\])*"'
# A group of thousands of devices is one token.
_TOKEN = re.compile(rf"{_STRING}|'[^']*'|\{{[\d,]*\}}|[()\[\]{{}},]")  # names of axes are in '
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

    def instruction(self, name: str) -> Instruction | None:
        if name not in self.read:
            # The files that XLA writes name an element of a tuple ``%name#index``.
            whole, _, index = name.partition("#")
            found = parse_instruction(self.lines.get(whole, ""))
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
            if instruction is None:
                raise unreadable(text)
            found[name] = instruction
        return found

    @cached_property
    def ended_elsewhere(self) -> set[str]:
        """The names of the collectives that a TPU begins here and ends in another computation."""
        lines = [name for name, text in self.lines.items() if _BEGINS in text]
        read = filter(None, map(self.instruction, lines))
        return {operand for instruction in read for operand in instruction.operand_names}


def parse_computations(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of a module by name, and the name of its entry."""
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry = ""
    for line in re.sub(r",\n\s+", ", ", text).splitlines():
        if current is None:
            if header := _HEADER.match(line):
                current = computations[header[2]] = Computation(header[2])
                entry = header[2] if header[1] else entry
        elif definition := _DEFINITION.match(line):
            current.lines[definition[2]] = definition[3]
            current.root = definition[2] if definition[1] else current.root
        elif line.startswith("}") or line.strip() == "}":
            current = None
        elif _COMMUNICATES.search(line):
            raise unreadable(line)
    if not entry:
        raise ValueError(
            "this is not the text of a compiled program, which has an ENTRY: "
            f"{text.strip()[:60]!r}; pass the result of compiled.as_text()"
        )
    return computations, entry


def unreadable(line: str) -> ValueError:
    return ValueError(
        "this line of the compiled program may communicate, and gda cannot read it: "
        f"{line.strip()!r}; please report it, with the version of JAX"
    )
