"""The steps of a program in the order in which a device takes them, with the work of each."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from gda.compiled.hlo.instructions import COLLECTIVE, Computation, Instruction
from gda.compiled.hlo.listing import summed
from gda.compiled.hlo.loops import trip_count
from gda.compiled.hlo.memory_traffic import MemoryTraffic
from gda.compiled.hlo.products import KernelCosts, Product, product_of
from gda.compiled.hlo.program import Collective, Module
from gda.compiled.hlo.source_lines import metadata_of

_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
_TAKES_NO_TIME = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency"),
}
_GIVES_NAMES = re.compile(r'custom_call_target="(AllocateBuffer|ConcatBitcast)"')
_ENDS = 'custom_call_target="AsyncCollectiveDone"'
_NO_COSTS = KernelCosts()
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)".*?"cost_model_type":"COST_MODEL_TYPE_CLASSIC"')


class Step(NamedTuple):
    """An instruction of one device that takes time.

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
      name, opcode: of the instruction.
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
    name: str = ""
    opcode: str = ""


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

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives in program order, each once, with all its executions."""
        found: dict[int, Collective] = {}
        for step, times, is_conditional in executions(self.steps):
            if (one := step.collective) is not None:  # the same object at each call
                before = found.get(id(one))
                found[id(one)] = dataclasses.replace(
                    one,
                    count=summed((before.count if before else 0, times)),
                    is_conditional=is_conditional or (before is not None and before.is_conditional),
                )
        return tuple(found.values())

    def unknown(self) -> list[str]:
        """Return the names of the kernels whose products are not known."""
        products = (each for run in executions(self.steps) for each in run.step.products)
        return [*dict.fromkeys(each.kernel for each in products if each.flops is None)]


_Bodies = tuple[tuple[Step, ...], ...]


class Execution(NamedTuple):
    """A step at one of its places in a program, with its executions there in one call."""

    step: Step
    times: int | None
    is_conditional: bool


def executions(
    steps: Iterable[Step],
    branches: Callable[[_Bodies], Iterable[tuple[Step, ...]]] = tuple,
    unknown: int | None = None,
    times: int | None = 1,
    is_conditional: bool = False,
) -> Iterator[Execution]:
    """Yield each step, followed by those that it calls.

    ``branches`` chooses from the bodies of a branch, and ``unknown`` is the length of loops that
    tell none. ``times`` and ``is_conditional`` are those of the steps.
    """
    for step in steps:
        yield Execution(step, times, is_conditional)
        each_time = unknown if step.times is None else step.times
        inner = None if times is None or each_time is None else times * each_time
        may_be_omitted = is_conditional or step.is_branch
        for body in branches(step.bodies) if step.is_branch else step.bodies:
            yield from executions(body, branches, unknown, inner, may_be_omitted)


def _flops(steps: Iterable[Step]) -> float | None:
    def order(body: tuple[Step, ...]) -> float:
        flops = _flops(body)
        return math.inf if flops is None else flops

    runs = executions(steps, lambda bodies: [max(bodies, key=order, default=())])
    products = ((product.flops, times) for step, times, _ in runs for product in step.products)
    return summed(flops and (times and flops * times) for flops, times in products)


def read_schedule(modules: Iterable[Module], costs: KernelCosts = _NO_COSTS) -> Schedule:
    """Return the steps of a program, with operations of kernels that its text does not tell."""
    steps: list[Step] = []
    nbytes = 0
    for module in modules:
        reader = _ScheduleReader(module, costs)
        entry = module.computations[module.entry]
        steps += reader.steps(module.entry, True)
        for name, line in entry.lines.items():
            opcode = _OPCODE.search(f" {line}")
            if opcode is not None and opcode[1] == "parameter":
                nbytes += reader.traffic.of_argument(entry, name)
    return Schedule(tuple(steps), nbytes)


def read_collectives(modules: Iterable[Module]) -> tuple[Collective, ...]:
    """Return the collectives of a program, in its order, without reading the lines that compute.

    Those in a computation that is called several times come at its first call.
    """
    steps = [step for each in modules for step in _ScheduleReader(each).steps(each.entry, False)]
    return Schedule(tuple(steps), 0).collectives


class _ScheduleReader:
    """The steps of one module: all of a computation, or only those that communicate or call."""

    def __init__(self, module: Module, costs: KernelCosts = _NO_COSTS) -> None:
        self.module, self.costs = module, costs
        self.traffic = MemoryTraffic(module.computations, module.fusions)
        self.steps = functools.cache(self._steps)

    def _steps(self, name: str, is_whole: bool) -> tuple[Step, ...]:
        computation = self.module.computations[name]
        found: list[Step] = []
        for each in computation.lines if is_whole else computation.of_interest:
            line = computation.lines[each]
            opcode = _OPCODE.search(f" {line}")
            if opcode is None or opcode[1] in _TAKES_NO_TIME or _GIVES_NAMES.search(line):
                continue
            instruction = computation.instruction(each)
            if instruction is None or instruction.opcode.endswith("-update"):
                continue
            if instruction.opcode.endswith("-done"):
                begun = _beginning(computation, instruction)
                is_known = is_whole or begun in {step.begins for step in found}
                found += [Step(ends=begun, name=each)] if is_known else []
            else:
                found += self._steps_of(computation, each, instruction, is_whole)
        return tuple(found)

    def _steps_of(
        self, computation: Computation, name: str, instruction: Instruction, is_whole: bool
    ) -> list[Step]:
        opcode, called = instruction.opcode.removesuffix("-start"), instruction.called()
        is_sent = instruction.kind is not None or any(self.steps(each, False) for each in called)
        if not (is_whole or is_sent):
            return []
        metadata = metadata_of(instruction)
        file, line = self.module.sources.line(metadata)
        place = {"op_name": metadata.get("op_name", ""), "source_file": file, "source_line": line}
        place |= {"name": name, "opcode": opcode}
        step = Step(**place)
        if instruction.opcode != opcode and '"is_sync":true' not in computation.lines[name]:
            step = step._replace(begins=name)
        if instruction.kind is not None:
            return self._communication(computation, name, instruction, step)
        if opcode == "while":
            times = trip_count(instruction, computation, self.module.computations)
            # A test is a small kernel, so only its communication takes time.
            tests = [self.steps(each, False) for each in instruction.called("condition")]
            often = None if times is None else times + 1
            test = step._replace(bodies=(*filter(None, tests),), times=often)
            bodies = tuple(self.steps(each, is_whole) for each in instruction.called("body"))
            loop = step._replace(bodies=bodies, times=times)
            return [*[test] * any(tests), loop]
        if opcode in ("conditional", "call", "async") or re.fullmatch(COLLECTIVE, opcode):
            bodies = tuple(self.steps(each, is_whole) for each in called)
            return [step._replace(bodies=bodies, is_branch=opcode == "conditional")]
        inside = tuple(filter(None, (self.steps(each, False) for each in called)))
        if opcode == "fusion" and inside:  # of a TPU, which communicates while it computes
            return [
                each._replace(begins=each.begins or step.begins, **place)
                for body in inside
                for each in body
            ]
        kernel = [self._kernel(computation, name, instruction, step)] if is_whole else []
        return kernel + [step._replace(bodies=inside, times=None)] * bool(inside)

    def _communication(
        self, computation: Computation, name: str, instruction: Instruction, step: Step
    ) -> list[Step]:
        """Return the step of a collective.

        A TPU communicates while it computes: a collective, of one channel, is written in the fusion
        that begins it, in those that run meanwhile, and in the one that ends it.
        """
        channel = f"{instruction.kind}, channel {instruction.attributes.get('channel_id')}"
        if name in computation.ended_elsewhere:
            step = step._replace(begins=channel)
        elif self.module.was_begun(instruction):
            is_end = any(_ENDS in line for line in computation.lines.values())
            return [step._replace(ends=channel)] * is_end
        return [step._replace(collective=self.module.collective(computation, name))]

    def _kernel(
        self, computation: Computation, name: str, instruction: Instruction, step: Step
    ) -> Step:
        inside = [(each, line) for each in self._fused(instruction) for line in each.lines]
        products = [product_of(*each) for each in [(computation, name), *inside]]
        if instruction.target:
            place = step.source_file, step.source_line
            called = instruction.target, step.op_name, place
            products[0] = self.costs.product_of(products[0], *called)
        cycles = _CYCLES.search(computation.lines[name])
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


def _beginning(computation: Computation, instruction: Instruction) -> str:
    """Return the name of the operation that an instruction ends or updates."""
    name = instruction.operand_names[0]
    before = computation.instruction(name)
    if before is not None and before.opcode.endswith("-update"):
        return _beginning(computation, before)
    return name
