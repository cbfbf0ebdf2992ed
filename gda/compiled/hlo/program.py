"""The modules of a program, each parsed once, and their collectives with operands and axes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gda.compiled.hlo.groups import (
    Groups,
    Pairs,
    axes_of_groups,
    axes_of_pairs,
    numbers,
    parse_groups,
)
from gda.compiled.hlo.instructions import (
    ArrayType,
    Computation,
    Instruction,
    Shape,
    leaves,
    parse_computations,
    split_at_commas,
    unreadable,
)
from gda.compiled.hlo.source_lines import Sources, metadata_of
from gda.layout.boundary import set_module

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
)


@set_module("gda")
@dataclass(frozen=True)
class Collective:
    """One communication of a compiled program, as ``gda.collectives`` lists them.

    Attributes:
      kind: as XLA names it: ``'all-reduce'``, ``'all-gather'``, ``'reduce-scatter'``,
        ``'all-to-all'``, ``'ragged-all-to-all'``, ``'collective-permute'``,
        ``'collective-broadcast'`` or ``'send'``. An asynchronous operation is one.
      axes: the mesh axes that it communicates over, in mesh order: the devices of a group
        differ in these coordinates only. Axes of size 1 are omitted. For a permutation, the axes
        along which data moves. ``()`` if every device is alone; None if no axes of the mesh form
        these groups.
      operand_shapes, operand_dtypes: the input of each device: one array, or several if XLA has
        combined collectives or sends one array to each peer.
      output_shapes, output_dtypes: the output of each device.
      nbytes: bytes of the operands on one device, in one execution, in the type in which this kind
        of device sends them: CPUs send bfloat16 as float32, in twice the bytes. The traffic on
        the wires depends on the kind and the algorithm: a ring sends nearly twice this for an
        all-reduce.
      nbytes_output: bytes of the outputs on one device, in one execution.
      count: number of executions in one call of the program: more than one in loops, None in a loop
        of unknown length.
      is_conditional: it is in a branch that may not be taken; ``count`` assumes that it is.
      op_name: place in the traced function, such as ``'jit(step)/dot_general'``; may be empty.
      source_file, source_line: the innermost line of user code that caused it: outside installed
        code or, if there is none, outside JAX and gda. None if XLA does not tell, as for a layout
        that no line asked for.
      groups: positions in device order that communicate with each other; empty for a permutation.
      pairs: source and target positions of a permutation.
      is_between_slices: it is the part of a collective that goes over the network between slices of
        TPUs. The part within each slice is a collective of its own.

    >>> import gda
    >>> gda.Collective('all-reduce', ('x',), ((4,),), ('int32',), ((4,),), ('int32',),
    ...                nbytes=16, nbytes_output=16, count=3).nbytes_total
    48
    """

    kind: str
    axes: tuple[str, ...] | None
    operand_shapes: tuple[Shape, ...]
    operand_dtypes: tuple[str, ...]
    output_shapes: tuple[Shape, ...]
    output_dtypes: tuple[str, ...]
    nbytes: int
    nbytes_output: int
    count: int | None = 1
    is_conditional: bool = False
    op_name: str = ""
    source_file: str | None = None
    source_line: int | None = None
    groups: Groups = field(default=(), repr=False)
    pairs: Pairs = field(default=(), repr=False)
    is_between_slices: bool = False

    @property
    def nbytes_total(self) -> int | None:
        """``nbytes`` of all executions; None if their number is unknown."""
        return None if self.count is None else self.nbytes * self.count


@dataclass(frozen=True)
class ProgramMesh:
    """The mesh of a program.

    Attributes:
      shape: sizes of its axes by name; empty if it is unknown.
      slices: the number of slices of TPUs along each axis that goes over several.
      device_ids: those of its devices, in its order, if there are several slices.
    """

    shape: Mapping[str, int] = field(default_factory=dict)
    slices: Mapping[str, int] = field(default_factory=dict)
    device_ids: Sequence[int] = ()


UNKNOWN_MESH = ProgramMesh()


def modules_of(text: str, mesh: ProgramMesh = UNKNOWN_MESH) -> list[Module]:
    """Parse the text of a program; ``ValueError`` if it is none, or is not whole."""
    parts = re.split(r"^(?=HloModule )", text, flags=re.MULTILINE)
    return [Module(part, mesh) for part in parts if part.strip()] or [Module(text, mesh)]


def num_devices(text: str) -> int:
    """Return the number of devices that a program was compiled for."""
    header = text.lstrip().split("\n", 1)[0]
    partitions = re.search(r"\bnum_partitions=(\d+)", header)
    return int(partitions[1]) if partitions else 1


class Module:
    """The computations of a module, and its collectives."""

    def __init__(self, text: str, mesh: ProgramMesh) -> None:
        self.mesh = mesh
        # The program of a slice numbers the devices of its own.
        self.mesh_shape = {name: n // mesh.slices.get(name, 1) for name, n in mesh.shape.items()}
        self.position_of = {device_id: at for at, device_id in enumerate(mesh.device_ids)}
        self.computations, self.entry = parse_computations(text)
        self.fusions: dict[str, Instruction] = {}
        for computation in self.computations.values():
            for instruction in computation.of_interest.values():
                called = instruction.called()
                if instruction.opcode == "fusion":
                    self.fusions |= dict.fromkeys(called, instruction)
        # A collective of another kind may have the same channel.
        self.channels_of_parts = {
            (instruction.kind, instruction.attributes.get("channel_id", "none"))
            for computation in self.computations.values()
            for name, instruction in computation.of_interest.items()
            if name in computation.ended_elsewhere
        }
        self.partitions = num_devices(text)
        self.sources = Sources(text)
        self.collective = functools.cache(self._collective)

    def was_begun(self, instruction: Instruction) -> bool:
        """Return True if this continues or ends a collective that began elsewhere."""
        channel = instruction.kind, instruction.attributes.get("channel_id")
        return channel in self.channels_of_parts and not instruction.is_between_slices

    def _collective(self, computation: Computation, name: str) -> Collective:
        """Return a collective for one execution of it, the same object each time."""
        instruction = computation.of_interest[name]
        kind = instruction.kind or ""
        operands, outputs = self._operands_and_outputs(computation, instruction)
        groups, pairs = self._groups(instruction), _pairs(instruction)
        if instruction.is_between_slices:
            groups, pairs, axes = (), (), self._axes_between_slices(instruction)
        elif kind in ("collective-permute", "send"):
            axes = None if pairs is None else axes_of_pairs(pairs, self.mesh_shape)
        else:
            axes = axes_of_groups(groups, self.mesh_shape) if groups else None
        if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
            # A TPU has this fusion for a reduce-scatter: each device keeps a part of the sum.
            root = computation.instruction(computation.root)
            kind, outputs = "reduce-scatter", [] if root is None else leaves(root.type)
        metadata = metadata_of(instruction)
        if not metadata and computation.name in self.fusions:
            metadata = metadata_of(self.fusions[computation.name])
        source_file, source_line = self.sources.line(metadata)
        return Collective(
            kind=kind,
            axes=axes,
            operand_shapes=tuple(leaf.shape for leaf in operands),
            operand_dtypes=tuple(leaf.dtype for leaf in operands),
            output_shapes=tuple(leaf.shape for leaf in outputs),
            output_dtypes=tuple(leaf.dtype for leaf in outputs),
            nbytes=sum(leaf.nbytes for leaf in operands),
            nbytes_output=sum(leaf.nbytes for leaf in outputs),
            op_name=metadata.get("op_name", ""),
            source_file=source_file,
            source_line=source_line,
            groups=groups or (),
            pairs=pairs or (),
            is_between_slices=instruction.is_between_slices,
        )

    def _axes_between_slices(self, instruction: Instruction) -> tuple[str, ...] | None:
        """Return the axes along which the devices differ that communicate between slices.

        Their ids are written in groups, ``{{100000,200000},…}``, or in pairs,
        ``{{100003->200000},…}``. ``{1,2}x{0:3}`` means all slices.
        """
        target = re.search(
            r"megascale_target=(\{\{[\d,{}>-]+\}\})", instruction.frontend_attributes
        )
        if target is None:
            return tuple(self.mesh.slices) or None
        groups = [numbers(group) for group in re.findall(r"\{([\d,>-]+)\}", target[1])]
        positions = [[self.position_of.get(each, -1) for each in group] for group in groups]
        pairs = tuple((first, other) for first, *others in positions for other in others)
        return axes_of_pairs(pairs, self.mesh.shape)

    def _operands_and_outputs(
        self, computation: Computation, instruction: Instruction
    ) -> tuple[list[ArrayType], list[ArrayType]]:
        kind, operands = instruction.kind, []
        names = instruction.operand_names
        # Later operands place the parts of the first, or order the operation.
        is_send = instruction.opcode.startswith("send")
        if is_send or kind == "ragged-all-to-all" or "slice_sizes" in instruction.attributes:
            names = names[:1]
        for name in names:
            operand = computation.instruction(name)
            if operand is None:
                raise unreadable(f"{instruction.type} {instruction.opcode}({name})")
            operands += leaves(operand.type)
        if is_send:
            return operands, []
        outputs = leaves(instruction.type)
        parts = split_at_commas(instruction.type[1:-1]) if instruction.type.startswith("(") else []
        if instruction.opcode.endswith("-start") and len(parts) > 1 and outputs != operands:
            # The type of a beginning is (operands, outputs, context for the end).
            outputs = leaves(parts[1])
        return operands, outputs

    def _groups(self, instruction: Instruction) -> Groups | None:
        if instruction.kind in ("collective-permute", "send"):
            return ()
        if instruction.kind not in KINDS and "replica_groups" not in instruction.attributes:
            return None
        groups = parse_groups(instruction.attributes.get("replica_groups", "{}"))
        if groups == ():
            known = self.partitions > 1
            devices = self.partitions if known else math.prod(self.mesh_shape.values())
            return (tuple(range(devices)),)
        if groups == ((0,),):  # the number of the only replica, which has all partitions
            partitions = range(self.partitions)
            is_together = "channel_id" in instruction.attributes
            return (tuple(partitions),) if is_together else tuple((each,) for each in partitions)
        return groups


def _pairs(instruction: Instruction) -> Pairs | None:
    """Return source and target positions of a permutation; None if the program omits them."""
    text = instruction.attributes.get("source_target_pairs")
    if text is None:
        return None
    ends = numbers(text)
    return tuple(zip(ends[::2], ends[1::2], strict=True))
