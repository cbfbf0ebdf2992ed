"""Equal layers that a traced program has one after another, where a scan would have one of them.

XLA compiles each of them, so that the time grows with their number. No JAX: a trace is read by the
names of its attributes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gda.layout.boundary import set_module

_LEAST_LAYERS = 4
_PERIODS_TRIED = 16


@set_module("gda")
class UnrolledLayers(NamedTuple):
    """The equal layers of a program that are written out, and what a scan over them saves.

    Layers are equal if they have the same operations on the same shapes. The forward pass, the
    backward pass and the optimizer have runs of them, which all count.

    Attributes:
      num_layers: the layers of the longest run, of those that matter.
      num_operations: of the traced program, those of inner functions included.
      num_operations_scanned: the same if each run were a ``jax.lax.scan`` over one layer.

    >>> import gda, jax, numpy as np
    >>> def step(x, layers):
    ...     for w in layers:
    ...         x = jax.numpy.tanh(x @ w)
    ...     return x
    >>> w = np.zeros((4, 4), np.float32)
    >>> gda.rehearse(step, w, [w] * 12).unrolled
    UnrolledLayers(num_layers=12, num_operations=24, num_operations_scanned=2)
    """

    num_layers: int
    num_operations: int
    num_operations_scanned: int


def unrolled_in(jaxpr: Any) -> UnrolledLayers | None:
    """Return the equal layers of a trace; None if scans would save less than half of it."""
    found = _Reader().part_of(jaxpr)
    if 2 * found.saved < found.size or not found.num_layers:
        return None
    return UnrolledLayers(found.num_layers, found.size, found.size - found.saved)


class _Part(NamedTuple):
    """An equation, or all equations of a function.

    Attributes:
      kind: a number that equal parts share.
      size: the number of equations, those of inner functions included.
      saved: the equations that scans save.
      num_layers: the layers of the longest run that saves much; 0 if there is none.
    """

    kind: int
    size: int
    saved: int
    num_layers: int


class _Run(NamedTuple):
    """Equal layers of ``period`` parts each, from the part ``start`` to the part ``stop``."""

    saved: int
    start: int
    stop: int
    period: int

    @property
    def num_layers(self) -> int:
        return (self.stop - self.start) // self.period


class _Reader:
    """A reader of one trace, which looks at each function once."""

    def __init__(self) -> None:
        self._kinds: dict[Any, int] = {}
        self._parts: dict[int, _Part] = {}  # by the id of a function, which the trace holds

    def part_of(self, jaxpr: Any) -> _Part:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        if id(jaxpr) not in self._parts:
            self._parts[id(jaxpr)] = self._joined([*map(self._part_of_equation, jaxpr.eqns)])
        return self._parts[id(jaxpr)]

    def _joined(self, parts: Sequence[_Part]) -> _Part:
        runs = _apart(_runs(parts))
        most = max((run.saved for run in runs), default=0)
        # The backward pass may have one layer less than the forward pass, and saves more.
        layers = max((run.num_layers for run in runs if 4 * run.saved >= most), default=0)
        # In a run only its first layer stays, and inner scans would save a part of this.
        left = [*parts]
        for run in runs:
            left[run.start + run.period : run.stop] = [_NOTHING] * (
                run.stop - run.start - run.period
            )
        inner = max(left, key=lambda part: part.saved, default=_NOTHING)
        saved = sum(run.saved for run in runs)
        return _Part(
            self._kind(tuple(part.kind for part in parts)),
            sum(part.size for part in parts),
            saved + sum(part.saved for part in left),
            layers if most > inner.saved else inner.num_layers,
        )

    def _part_of_equation(self, equation: Any) -> _Part:
        known: list[Any] = [equation.primitive.name]
        known += [var.aval for var in (*equation.invars, *equation.outvars)]
        size, saved, num_layers = 1, 0, 0
        for name, value in sorted(equation.params.items()):
            values = value if isinstance(value, list | tuple) else [value]
            inner = [self.part_of(each) for each in values if _is_function(each)]
            size += sum(part.size for part in inner)
            saved += sum(part.saved for part in inner)
            num_layers = max([num_layers, *(part.num_layers for part in inner)])
            known.append((name, *(part.kind for part in inner)))
            # Names and functions of Python tell layers apart that are equal.
            if not inner and name != "name" and not callable(value):
                known.append(value)
        return _Part(self._kind(tuple(known)), size, saved, num_layers)

    def _kind(self, known: tuple[Any, ...]) -> int:
        try:
            return self._kinds.setdefault(known, len(self._kinds))
        except TypeError:  # something has no hash
            return self._kinds.setdefault(repr(known), len(self._kinds))


_NOTHING = _Part(-1, 0, 0, 0)


def _is_function(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def _runs(parts: Sequence[_Part]) -> Iterator[_Run]:
    """Yield stretches of equal layers, which may overlap."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for index, part in enumerate(parts):
        if part.kind in last:
            distances[index - last[part.kind]] += part.size
        last[part.kind] = index
    # Most parts of a layer come once in it, so that their distance is its length.
    for period, _ in distances.most_common(_PERIODS_TRIED):
        start = 0
        for index in range(period, len(parts) + 1):
            if index < len(parts) and parts[index].kind == parts[index - period].kind:
                continue
            layers = (index - start) // period
            if layers >= _LEAST_LAYERS:
                stop = start + layers * period
                saved = sum(part.size for part in parts[start + period : stop])
                yield _Run(saved, start, stop, period)
            start = index - period + 1


def _apart(runs: Iterator[_Run]) -> list[_Run]:
    """Return runs that do not overlap, those first that save most."""
    chosen: list[_Run] = []
    for run in sorted(runs, key=lambda run: -run.saved):
        if all(run.stop <= other.start or other.stop <= run.start for other in chosen):
            chosen.append(run)
    return chosen
