"""Advice on a rehearsed program: changes that save memory or communication, with their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gda.compiled.hlo import Axes, Collective, format_axes, format_size, format_source, summed
from gda.compiled.report.rehearsal_text import format_seconds
from gda.layout.boundary import set_module
from gda.layout.grid import ShardGrid
from gda.layout.spec import Shape, SpecEntry, format_spec
from gda.layout.text import counted, format_bytes, listed, printable, typed_shape
from gda.planning.device_kinds import speeds_of_device
from gda.planning.model import better_spec

if TYPE_CHECKING:
    from gda.compiled.rehearsal import ArgumentBytes, Rehearsal

_LEAST_SHARE = 100  # of the peak, or of all communication: less is not worth a line
_MOST_NAMES = 2


@set_module("gda")
class Advice(NamedTuple):
    """A change of a program that saves memory or communication; ``gda.Rehearsal.advice`` has them.

    Attributes:
      text: the change and its effect, in words.
      saves_bytes: bytes of the arguments or results on one device that it saves; the temporaries
        may change as well. None for a change of the communication.
      costs_seconds: the least time to gather a sharded argument once, at the vendor's figure; None
        if nothing is to be gathered, or the figure is unknown.

    >>> import gda
    >>> gda.Advice("shard params['w'] float32[8,2] by P('x')", saves_bytes=32).saves_bytes
    32
    """

    text: str
    saves_bytes: int | None
    costs_seconds: float | None = None


def advice_of(rehearsal: Rehearsal) -> tuple[Advice, ...]:
    """Return the advice on a rehearsal: temporaries that are too large, then what saves most."""
    found = [*_shardings(rehearsal), *_donations(rehearsal), *_gathers(rehearsal)]
    found.sort(key=lambda each: -(each.saves_bytes or 0))
    return (*_temporaries(rehearsal), *found)


def _is_much(nbytes: int, rehearsal: Rehearsal) -> bool:
    return nbytes * _LEAST_SHARE > (rehearsal.peak_bytes or rehearsal.argument_bytes)


# Memory.


def _temporaries(rehearsal: Rehearsal) -> Iterator[Advice]:
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


def _shardings(rehearsal: Rehearsal) -> Iterator[Advice]:
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
        if _is_much(saved, rehearsal):
            some = printable(arguments[0].name)
            if len(arguments) > 1:
                some = f"{counted(len(arguments), 'argument')} such as {some}"
            specs = f"{format_spec(proposed)} in place of {format_spec(spec)}"
            speeds = speeds_of_device(rehearsal.device_kind)
            seconds = None if speeds is None else saved / (speeds.link * speeds.links)
            price = (
                ""
                if seconds is None
                else f"; to gather it takes {format_seconds(seconds)} or more, each time"
            )
            yield Advice(
                f"shard {some} {typed_shape(dtype, shape)} by {printable(specs)}: "
                f"saves {format_bytes(saved)}{price}",
                saved,
                seconds,
            )


def _donations(rehearsal: Rehearsal) -> Iterator[Advice]:
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


# Communication.


def _gathers(rehearsal: Rehearsal) -> Iterator[Advice]:
    """Yield the all-gathers in loops by axes and lines, those with the most bytes first."""
    found = rehearsal.collectives or ()
    sent = summed(each.nbytes_total for each in found) or 0
    places: dict[tuple[Axes | None, str], list[Collective]] = {}
    for each in found:
        if each.kind == "all-gather" and each.count != 1:
            places.setdefault((each.axes, format_source(each)), []).append(each)
    totals = {key: summed(each.nbytes_total for each in some) for key, some in places.items()}
    for key in sorted(places, key=lambda key: -(totals[key] or 0)):
        nbytes = totals[key]
        if nbytes is None or nbytes * _LEAST_SHARE > sent:
            yield Advice(_of_gathers(key, places[key], nbytes, rehearsal), None)


def _of_gathers(
    key: tuple[Axes | None, str],
    gathers: Sequence[Collective],
    nbytes: int | None,
    rehearsal: Rehearsal,
) -> str:
    axes, source = key
    times = summed(each.count for each in gathers)
    text = (
        f"all-gather over {format_axes(axes)} in a loop, "
        f"{'?' if times is None else format(times, ',')} times, {format_size(nbytes)} sent in all"
        f"{f', from {source}' if source else ''}"
    )
    capacity, peak = rehearsal.capacity_bytes, rehearsal.peak_bytes
    gathered = sum(each.nbytes_output for each in gathers)
    if capacity is not None and peak is not None and gathered <= capacity - peak:
        text += (
            f"; before the loop, it takes {format_bytes(gathered)} of the "
            f"{format_bytes(capacity - peak)} that are free, if it is the same array each time"
        )
    return printable(text)
