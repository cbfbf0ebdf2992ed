"""Advice on a rehearsed program: changes that save time or memory, with numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from gda.compiled.devices.device_kinds import speeds_of_device
from gda.compiled.hlo import format_source
from gda.compiled.rehearsal_facts import ArgumentBytes, RehearsalFacts
from gda.compiled.report.rehearsal_text import repetition_of
from gda.compiled.seconds import format_seconds
from gda.layout.boundary import set_module
from gda.layout.grid import ShardGrid, better_spec
from gda.layout.spec import Shape, SpecEntry, axes_by_dimension, format_spec
from gda.layout.text import counted, format_bytes, listed, printable, typed_shape

_LEAST_SHARE = 100  # of the memory or of the time: less is not worth a line
_MOST_NAMES = 2


@set_module("gda")
class Advice(NamedTuple):
    """A change of a program that saves time or memory; ``gda.Rehearsal.advice`` has them.

    Attributes:
      text: the change and its effect, in words.
      saves_bytes: bytes on one device that it saves, of the arguments or results; the temporaries
        may change as well. None if it is unknown.
      costs_seconds: the least time to gather a sharded argument once, at the vendor's figure; None
        if nothing is to be gathered, or the figure is unknown.
      saves_seconds: the time of the work that it saves, at the vendor's figures; None if it is
        unknown.

    >>> import gda
    >>> gda.Advice("shard params/w float32[8,2] by P('x')", saves_bytes=32).saves_bytes
    32
    """

    text: str
    saves_bytes: int | None
    costs_seconds: float | None = None
    saves_seconds: float | None = None


def advice_of(rehearsal: RehearsalFacts) -> tuple[Advice, ...]:
    """Return the advice on a rehearsal: temporaries that are too large, then what saves most."""
    found = [*_repeated(rehearsal), *_shardings(rehearsal), *_donations(rehearsal)]

    def order(each: Advice) -> tuple[float, ...]:
        savings = -(each.saves_seconds or 0), -(each.saves_bytes or 0)
        return savings[::-1] if rehearsal.fits is False else savings

    return (*_temporaries(rehearsal), *sorted(found, key=order))


def _is_much(nbytes: int, rehearsal: RehearsalFacts) -> bool:
    return nbytes * _LEAST_SHARE > (rehearsal.peak_bytes or rehearsal.argument_bytes)


def _repeated(rehearsal: RehearsalFacts) -> Iterator[Advice]:
    """Yield the work that devices repeat, as for a batch that is not sharded."""
    if repeated := repetition_of(rehearsal):
        shape = rehearsal.mesh_shape
        dimensions = (
            axes
            for each in rehearsal.arguments
            for axes in axes_by_dimension(each.spec or (), len(each.shape), shape)
        )
        used = {*chain(*dimensions)}
        unused = [axis for axis, size in shape.items() if size > 1 and axis not in used]
        over = f" over {', '.join(unused)}" if unused else ""
        seconds = rehearsal.seconds.compute
        seconds = seconds and seconds * (1 - 1 / (rehearsal.repetitions or 1))
        saves = f"; saves {format_seconds(seconds)}" if seconds else ""
        yield Advice(
            printable(
                f"shard the batch{over}, or constrain what is computed from it by "
                f"jax.lax.with_sharding_constraint: {repeated}{saves}"
            ),
            None,
            saves_seconds=seconds,
        )


def _temporaries(rehearsal: RehearsalFacts) -> Iterator[Advice]:
    """Yield the bytes that temporaries must lose, if the program would fit then."""
    capacity, peak = rehearsal.capacity_bytes, rehearsal.peak_bytes
    if not rehearsal.temporaries or capacity is None or peak is None or peak <= capacity:
        return
    if peak - capacity > (rehearsal.temporary_bytes or peak - rehearsal.argument_bytes):
        return
    largest = rehearsal.temporaries[0]
    source = format_source(largest)
    yield Advice(
        printable(
            f"hold {format_bytes(peak - capacity)} less of temporaries, by smaller batches on a "
            f"device or jax.checkpoint: the largest is {typed_shape(largest.dtype, largest.shape)} "
            f"of {format_bytes(largest.nbytes)}{f', from {source}' if source else ''}"
        ),
        None,
    )


def _shardings(rehearsal: RehearsalFacts) -> Iterator[Advice]:
    """Yield for arguments of the same shape and spec the one that further axes would shard."""
    alike: dict[tuple[str, Shape, tuple[SpecEntry, ...]], list[ArgumentBytes]] = {}
    for each in rehearsal.arguments:
        if each.spec is not None and not each.is_on_host:
            alike.setdefault((each.dtype, each.shape, each.spec), []).append(each)
    for (dtype, shape, spec), arguments in alike.items():
        grid = ShardGrid(shape, rehearsal.mesh_shape, spec)
        proposed = better_spec(grid)
        blocks = ShardGrid(shape, rehearsal.mesh_shape, proposed).num_shards // grid.num_shards
        nbytes = sum(each.nbytes for each in arguments)
        saved = nbytes - nbytes // blocks
        speeds, seconds, price = speeds_of_device(rehearsal.device_kind), None, ""
        if speeds is not None:
            seconds = saved / (speeds.link * speeds.links)
            price = f"; to gather it takes {format_seconds(seconds)} or more, each time"
        if _is_much(saved, rehearsal) and _is_worth(saved, seconds, rehearsal):
            some = f"{counted(len(arguments), 'argument')} such as " * (len(arguments) > 1)
            specs = f"{format_spec(proposed)} in place of {format_spec(spec)}"
            array = f"{printable(arguments[0].name)} {typed_shape(dtype, shape)}"
            text = f"shard {some}{array} by {printable(specs)}: saves {format_bytes(saved)}{price}"
            yield Advice(text, saved, seconds)


def _is_worth(saved: int, seconds: float | None, rehearsal: RehearsalFacts) -> bool:
    """Return True if the program does not fit, or if memory is saved that costs little time."""
    if rehearsal.fits is False:
        return True
    capacity, step = rehearsal.capacity_bytes, rehearsal.seconds.estimate
    if capacity is None or step is None or seconds is None:
        return False
    return saved * _LEAST_SHARE >= capacity and seconds * _LEAST_SHARE <= step


def _donations(rehearsal: RehearsalFacts) -> Iterator[Advice]:
    nbytes = rehearsal.undonated_bytes
    if _is_much(nbytes, rehearsal):
        could_be = [each for each in rehearsal.arguments if each.could_be_donated]
        named = [
            f"{printable(each.name)} ({format_bytes(each.nbytes)})"
            for each in could_be[:_MOST_NAMES]
        ]
        if more := len(could_be) - len(named):
            named.append(f"{more:,} more")
        yield Advice(
            f"donate {listed(named)} by jax.jit(…, donate_argnums=…), since results have the same "
            f"shapes: saves {format_bytes(nbytes)}",
            nbytes,
        )
