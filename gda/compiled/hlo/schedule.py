"""The steps of a program in the order in which a device takes them, with the work of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gda.compiled.hlo.instructions import Computation, Instruction
from gda.compiled.hlo.listing import summed
from gda.compiled.hlo.loops import trip_count
from gda.compiled.hlo.memory_traffic import MemoryTraffic
from gda.compiled.hlo.products import Product, product_of
from gda.compiled.hlo.program import (
    UNKNOWN_MESH,
    Collective,
    Module,
    ProgramMesh,
    modules_of,
)
from gda.compiled.hlo.source_lines import metadata_of

_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
_TAKES_NO_TIME = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency"),
}
_GIVES_NAMES = re.compile(r'custom_call_target="(AllocateBuffer|ConcatBitcast)"')
_ENDS = 'custom_call_target="AsyncCollectiveDone"'
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)".*?"cost_model_type":"COST_MODEL_TYPE_CLASSIC"')


class Step(NamedTuple):
    """An instruction that takes time, of one device.

    Attributes:
      products: its products.
      arrays: the bytes of each array that it reads or writes in the memory of the device.
      cycles: the estimate of a TPU's compiler for its products; None without.
      collective: a communication, for one execution of it.
      begins: the name of the asynchronous operation that it begins; empty if it is none.
      ends: the name of one for which it waits.
      bodies: the steps of each computation that it calls.
      times: the executions of a loop's body; None if they are unknown.
      is_branch: one of its bodies runs.
      op_name, source_file, source_line: as of a collective.
    """

    products: tuple[Product, ...] = ()
    arrays: tuple[int, ...] = ()
    cycles: int | None = None
    collective: Collective | None = None
    begins: str = ""
    ends: str = ""
    bodies: tuple[tuple[Step, ...], ...] = ()
    times: int | None = 1
    is_branch: bool = False
    op_name: str = ""
    source_file: str | None = None
    source_line: int | None = None


class Schedule(NamedTuple):
    """The steps of a program, and the bytes that it reads of its arguments, each element once."""

    steps: tuple[Step, ...]
    argument_bytes: int

    @property
    def flops(self) -> float | None:
        """The operations of all products, with those of the most expensive branches.

        None if products are in a kernel that is not known, or in a loop of unknown length.
        """
        return _flops(self.steps)

    def unknown(self) -> list[str]:
        """Return the names of the kernels whose products are not known."""
        products = (each for step in with_inner(self.steps) for each in step.products)
        return [*dict.fromkeys(each.kernel for each in products if each.flops is None)]


def _flops(steps: Iterable[Step]) -> float | None:
    total: float | None = 0.0
    for step in steps:
        own = summed(product.flops for product in step.products)
        inner = [_flops(body) for body in step.bodies]
        called = summed(inner)
        if step.is_branch and None not in inner:
            called = max(filter(None, inner), default=0.0)
        total = summed((total, own, called and (step.times and called * step.times)))
    return total


def with_inner(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield each step, followed by those of the computations that it calls."""
    for step in steps:
        yield step
        for body in step.bodies:
            yield from with_inner(body)


def read_schedule(text: str, mesh: ProgramMesh = UNKNOWN_MESH) -> Schedule:
    """Return the steps of a program."""
    steps: list[Step] = []
    nbytes = 0
    for module in modules_of(text, mesh):
        reader = _ScheduleReader(module)
        entry = module.computations[module.entry]
        steps += reader.steps(module.entry)
        for name, line in entry.lines.items():
            opcode = _OPCODE.search(f" {line}")
            if opcode is not None and opcode[1] == "parameter":
                nbytes += reader.traffic.of_argument(entry, name)
    return Schedule(tuple(steps), nbytes)


class _ScheduleReader:
    """The steps of one module."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.traffic = MemoryTraffic(module.computations, module.fusions)

    def steps(self, name: str) -> tuple[Step, ...]:
        computation = self.module.computations[name]
        found = []
        for each, line in computation.lines.items():
            opcode = _OPCODE.search(f" {line}")
            if opcode is None or opcode[1] in _TAKES_NO_TIME or _GIVES_NAMES.search(line):
                continue
            instruction = computation.instruction(each)
            if instruction is not None:
                found.append(self._step(computation, each, instruction))
        return tuple(found)

    def _step(self, computation: Computation, name: str, instruction: Instruction) -> Step:
        opcode, module = instruction.opcode, self.module
        if opcode.endswith(("-done", "-update")):
            begun = _beginning(computation, instruction)
            return Step(ends=begun) if opcode.endswith("-done") else Step()
        metadata = metadata_of(instruction)
        place = (metadata.get("op_name", ""), *module.sources.line(metadata))
        step = Step(op_name=place[0], source_file=place[1], source_line=place[2])
        if opcode.endswith("-start") and '"is_sync":true' not in computation.lines[name]:
            step = step._replace(begins=name)
        if instruction.kind is not None:
            return step._replace(collective=module.collective(computation, instruction))
        if opcode == "while":
            times = trip_count(instruction, computation, module.computations)
            bodies = tuple(map(self.steps, instruction.called("body")))
            return step._replace(bodies=bodies, times=times)
        if opcode in ("conditional", "call", "async-start"):
            bodies = tuple(map(self.steps, instruction.called()))
            return step._replace(bodies=bodies, is_branch=opcode == "conditional")
        return self._kernel(computation, name, instruction, step)

    def _kernel(
        self, computation: Computation, name: str, instruction: Instruction, step: Step
    ) -> Step:
        fused = [*self._fused(instruction)]
        found = self._communication(fused)
        if found is not None:
            step = step._replace(**found)
            if step.collective is not None or step.ends:
                return step
        cycles = _CYCLES.search(computation.lines[name])
        inside = [(each, line) for each in fused for line in each.lines]
        products = [product_of(*each) for each in [(computation, name), *inside]]
        return step._replace(
            products=tuple(each for each in products if each is not None),
            arrays=self.traffic.of(computation, name),
            cycles=int(cycles[1]) if cycles else None,
        )

    def _fused(self, instruction: Instruction) -> Iterator[Computation]:
        """Yield the computations inside a kernel, without those of each element of a reduction."""
        if instruction.opcode.removesuffix("-start") == "fusion":
            for name in instruction.called("calls"):
                computation = self.module.computations[name]
                yield computation
                for inner in computation.of_interest.values():
                    yield from self._fused(inner)

    def _communication(self, fused: Sequence[Computation]) -> dict[str, object] | None:
        """Return the collective in a fusion of a TPU, or the one that it begins or ends."""
        for computation in fused:
            for name, instruction in computation.of_interest.items():
                if instruction.kind is None:
                    continue
                channel = f"channel {instruction.attributes.get('channel_id')}"
                if name in computation.ended_elsewhere:
                    found = self.module.collective(computation, instruction)
                    return {"collective": found, "begins": channel}
                if self.module.was_begun(instruction):
                    is_end = any(_ENDS in line for line in computation.lines.values())
                    return {"ends": channel} if is_end else None
                return {"collective": self.module.collective(computation, instruction)}
        return None


def _beginning(computation: Computation, instruction: Instruction) -> str:
    """Return the name of the operation that an end or an update continues."""
    name = instruction.operand_names[0]
    before = computation.instruction(name)
    if before is not None and before.opcode.endswith("-update"):
        return _beginning(computation, before)
    return name
