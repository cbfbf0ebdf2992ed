"""Rules for the communication of a program, and complaints about collectives that break them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gda.compiled.hlo import (
    KINDS,
    Axes,
    Collective,
    Collectives,
    format_axes,
    format_source,
    summed,
)
from gda.layout.text import counted, near_name

AxesRule = str | Axes
Allowed = (
    Mapping[str, AxesRule | int]
    | Mapping[tuple[str, AxesRule], int]
    | Mapping[str | tuple[str, AxesRule], AxesRule | int]
    | Iterable[str | tuple[str, AxesRule]]
)

_FORMS = "a name, or a tuple of names for several axes at once"


@dataclass(frozen=True)
class Rule:
    """An allowed kind of collective, over some axes or any, some number of times or any."""

    kind: str
    over: Axes | None = None
    times: int | None = None

    def allows(self, collective: Collective, mesh_shape: Mapping[str, int]) -> bool:
        """Return True if a collective has this kind and these axes; ``times`` does not count."""
        if collective.kind != self.kind:
            return False
        return self.over is None or collective.axes == tuple(
            name for name in mesh_shape if name in self.over and mesh_shape[name] > 1
        )

    def __str__(self) -> str:
        over = "any axes" if self.over is None else format_axes(self.over)
        times = "" if self.times is None else f", exactly {counted(self.times, 'time')}"
        return f"{self.kind} over {over}{times}"


def rules_of(allow: Allowed) -> list[Rule]:
    """Return the rules of the argument ``allow`` of ``gda.assert_collectives``."""
    if isinstance(allow, str) or not isinstance(allow, Iterable):
        raise TypeError(
            "allow must be a mapping such as {'all-reduce': 'data'} or {('all-reduce', 'data'): "
            f"1}}, or a list of kinds such as ['all-reduce'], not {allow!r}"
        )
    items = allow.items() if isinstance(allow, Mapping) else [(key, None) for key in allow]
    return [_rule(key, value) for key, value in items]


def _rule(key: Any, value: Any) -> Rule:
    kind, over = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
    if kind not in KINDS:
        hint = near_name(kind, KINDS)
        known = f"the kinds of collectives are {', '.join(KINDS)}"
        raise ValueError(f"allow names {kind!r}, but {known}{hint}")
    if isinstance(value, str | tuple) and over is None:
        over, value = value, None
    if value is not None and (type(value) is not int or value < 0):
        raise TypeError(
            f"allow has {key!r}: {value!r}; the value must be a number of executions, 0 or more"
            + ("" if isinstance(key, tuple) else f", or the axes that it is allowed over: {_FORMS}")
        )
    axes = (over,) if isinstance(over, str) else over
    if axes is not None and (
        type(axes) is not tuple or not all(isinstance(name, str) for name in axes)
    ):
        raise TypeError(f"axes in allow must be {_FORMS}, not {over!r}")
    return Rule(kind, axes, value)


def check_axes(rules: Iterable[Rule], mesh_shape: dict[str, int]) -> None:
    """Raise ``ValueError`` if a rule names an axis that the mesh lacks."""
    for name in [name for rule in rules for name in rule.over or ()]:
        if name not in mesh_shape:
            hint = near_name(name, mesh_shape)
            raise ValueError(
                f"allow names the axis {name!r}, but the mesh has the axes {mesh_shape}{hint}"
            )


def complaints_of(found: Collectives, rules: list[Rule]) -> list[str]:
    """Return the collectives that break the rules, and the rules that they do not fulfil."""

    def allowed_by(rule: Rule) -> list[Collective]:
        return [each for each in found if rule.allows(each, found.mesh_shape)]

    complaints = []
    for each in found:
        # A collective communicates nothing if every device is alone in its group.
        is_allowed = any(rule.allows(each, found.mesh_shape) for rule in rules)
        if each.axes != () and not is_allowed:
            place = format_source(each) or "no line"
            complaints.append(
                f"not allowed: {each.kind} over {format_axes(each.axes)}, from {place}"
            )
    for rule in rules:
        times = summed(each.count for each in allowed_by(rule))
        if rule.times is not None and times != rule.times:
            often = "an unknown number of times" if times is None else counted(times, "time")
            complaints.append(f"expected {rule}; found: {often}")
    return complaints
