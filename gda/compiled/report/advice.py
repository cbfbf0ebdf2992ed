"""Advice on a rehearsed program: changes that save time or memory, with numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gda.compiled.devices.device_kinds import kind_of_device, speeds_of_device
from gda.compiled.hlo import format_line, format_source
from gda.compiled.rehearsal_facts import ArgumentBytes, RehearsalFacts
from gda.compiled.report.rehearsal_text import repetition_of
from gda.compiled.seconds import format_seconds
from gda.layout.boundary import set_module
from gda.layout.grid import ShardGrid, better_spec
from gda.layout.spec import Shape, SpecEntry, format_spec
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
    """Return the advice on a rehearsal: first too large temporaries, then the largest savings."""
    found = [
        *(*_repeated(rehearsal), *_copied(rehearsal)),
        *(*_shardings(rehearsal), *_donations(rehearsal)),
    ]

    def order(each: Advice) -> tuple[float, ...]:
        savings = -(each.saves_seconds or 0), -(each.saves_bytes or 0)
        return savings[::-1] if rehearsal.fits is False else savings

    return (*_temporaries(rehearsal), *sorted(found, key=order))


def shortfall_of(rehearsal: RehearsalFacts, advice: Sequence[Advice]) -> str:
    """Return text about a program that does not fit even with all advice; else empty."""
    capacity, peak = rehearsal.capacity_bytes, rehearsal.peak_bytes
    if rehearsal.fits is not False or capacity is None or peak is None:
        return ""
    rest = max(0, peak - sum(each.saves_bytes or 0 for each in advice))
    if rest <= capacity or any(_temporaries(rehearsal)):
        return ""
    takes = f"it takes {format_bytes(rest)} of {format_bytes(capacity)}"
    if rest - _temporary_bytes(rehearsal) <= capacity:
        less = format_bytes(rest - capacity)
        return f"with all of this {takes}: its temporaries must also be {less} smaller"
    least = rehearsal.least_devices or 1
    needed = max(least, math.ceil(rehearsal.num_devices * rest / capacity))
    return (
        f"all of this together does not make it fit: {takes}; the arguments alone need "
        f"{counted(least, 'device')} of this kind, and all of it about {needed:,}, if they share it"
    )


def _temporary_bytes(rehearsal: RehearsalFacts) -> int:
    """Return the bytes of temporaries, or if it does not fit, of all but the arguments."""
    held = (rehearsal.peak_bytes or 0) - rehearsal.argument_bytes
    return rehearsal.temporary_bytes or max(held, 0)


def _is_much(nbytes: int, rehearsal: RehearsalFacts) -> bool:
    return nbytes * _LEAST_SHARE > (rehearsal.peak_bytes or rehearsal.argument_bytes)


def _repeated(rehearsal: RehearsalFacts) -> Iterator[Advice]:
    """Yield the work that devices repeat, as for a batch that is not sharded.

    The products alone would promise too much: gradients of a sharded batch are sums over devices.
    So it has a price only if the step after it was rehearsed, and is omitted if that is no faster.
    """
    if not (repeated := repetition_of(rehearsal)):
        return
    over = f" over {', '.join(rehearsal.unused_axes)}" if rehearsal.unused_axes else ""
    saved, price = None, ""
    if rehearsal.seconds_advised is not None and rehearsal.seconds.estimate is not None:
        saved = rehearsal.seconds.estimate - rehearsal.seconds_advised
        price = (
            f"; with the batch sharded{over} a call takes "
            f"{format_seconds(rehearsal.seconds_advised)}, which saves {format_seconds(saved)}"
        )
    if saved is None or saved > 0:
        text = (
            f"shard the batch{over}, or constrain what is computed from it by "
            f"jax.lax.with_sharding_constraint: {repeated}{price}"
        )
        yield Advice(printable(text), None, saves_seconds=saved)


def _temporaries(rehearsal: RehearsalFacts) -> Iterator[Advice]:
    """Yield the bytes by which temporaries must shrink, if the program would then fit."""
    capacity, peak = rehearsal.capacity_bytes, rehearsal.peak_bytes
    if not rehearsal.temporaries or capacity is None or peak is None or peak <= capacity:
        return
    if peak - capacity > _temporary_bytes(rehearsal):
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
    """Yield a sharding over further axes for arguments of one shape and spec."""
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
    """Return True if the program does not fit, or if saving the memory costs little time."""
    if rehearsal.fits is False:
        return True
    capacity, step = rehearsal.capacity_bytes, rehearsal.seconds.estimate
    if capacity is None or step is None or seconds is None:
        return False
    return saved * _LEAST_SHARE >= capacity and seconds * _LEAST_SHARE <= step


def _donations(rehearsal: RehearsalFacts) -> Iterator[Advice]:
    undonated = (each for each in rehearsal.arguments if each.could_be_donated)
    could_be = [each for each in undonated if each.copied_at is None]
    nbytes = sum(each.nbytes for each in could_be)
    if _is_much(nbytes, rehearsal):
        yield Advice(
            f"donate {_named(could_be)} by jax.jit(…, donate_argnums=…), since results have the "
            f"same shapes: saves {format_bytes(nbytes)}",
            nbytes,
        )


def _copied(rehearsal: RehearsalFacts) -> Iterator[Advice]:
    # To donate them alone is not enough: XLA then has temporary arrays in place of the results.
    copied = [each for each in rehearsal.arguments if each.copied_at is not None]
    nbytes = sum(each.nbytes for each in copied)
    if not copied or not _is_much(nbytes, rehearsal):
        return
    places = {format_line(*each.copied_at): None for each in copied if each.copied_at}
    at, named, saves = listed([*places]), _named(copied), f"saves {format_bytes(nbytes)}"
    kind, seconds, time = kind_of_device(rehearsal.device_kind), None, ""
    if kind is not None and kind.gpu is None:  # a carry is copied as well, or neither
        text = f"donate {named}: {saves}, unless XLA copies what is xs and ys of the scan of {at}"
        yield Advice(printable(f"{text}; rehearse that"), None)
        return
    if kind is not None and kind.memory_bandwidth:
        seconds = 2 * nbytes / kind.memory_bandwidth
        time = f" and {format_seconds(seconds)} or more"
    also = ", and donate them" * any(each.could_be_donated for each in copied)
    yield Advice(
        printable(
            f"carry {named} in the loop of {at}, as jax.lax.fori_loop does, and update each layer "
            f"in place{also}: as xs and ys of jax.lax.scan they are copied in each call; "
            f"{saves}{time}"
        ),
        nbytes,
        saves_seconds=seconds,
    )


def _named(arguments: Sequence[ArgumentBytes]) -> str:
    named = [
        f"{printable(each.name)} ({format_bytes(each.nbytes)})" for each in arguments[:_MOST_NAMES]
    ]
    if more := len(arguments) - len(named):
        named.append(f"{more:,} more")
    return listed(named)
