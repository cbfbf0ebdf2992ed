"""Rules for the communication of a program, and complaints about collectives that break them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gda.compiled.hlo import KINDS, Axes, Collective, Collectives, format_axes, sentence, summed
from gda.layout.text import counted, did_you_mean, nearest

AxesRule = str | Axes | list[str | Axes]
Allowed = (
    Mapping[str, AxesRule | int | None]
    | Mapping[tuple[str, str | Axes], int | None]
    | Mapping[str | tuple[str, str | Axes], AxesRule | int | None]
    | Iterable[str | tuple[str, AxesRule]]
)

_FORMS = "a name, a tuple of names for several axes at once, or a list of these as alternatives"

# JAX's names, for a hint. They are not accepted: XLA chooses the kinds, and an allowed ``pmax``
# would allow a sum.
_MEANT_BY = {
    **dict.fromkeys(("psum", "pmean", "pmax", "pmin"), "all-reduce"),
    "psum_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}


@dataclass(frozen=True)
class Rule:
    """An allowed kind, over some sets of axes or any, some number of times or any."""

    kind: str
    over: tuple[Axes, ...] | None = None
    times: int | None = None

    def allows(self, collective: Collective, mesh_shape: Mapping[str, int]) -> bool:
        """Return True if a collective has this kind and these axes; ``times`` does not count."""
        if collective.kind != self.kind:
            return False
        return self.over is None or collective.axes in [
            tuple(name for name in mesh_shape if name in axes and mesh_shape[name] > 1)
            for axes in self.over
        ]

    def __str__(self) -> str:
        over = "any axes" if self.over is None else " or ".join(map(format_axes, self.over))
        times = "" if self.times is None else f", exactly {counted(self.times, 'time')}"
        return f"{self.kind} over {over or 'no axes'}{times}"


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
        raise _unknown_kind_error(kind)
    if isinstance(value, str | tuple | list) and over is None:
        over, value = value, None
    if value is not None and (type(value) is not int or value < 0):
        raise TypeError(
            f"allow has {key!r}: {value!r}; the value must be a number of executions, 0 or more"
            + ("" if isinstance(key, tuple) else f", or the axes that it is allowed over: {_FORMS}")
        )
    return Rule(kind, _alternatives(over), value)


def _alternatives(over: Any) -> tuple[Axes, ...] | None:
    """Return sets of axes: one for a name or a tuple of names, several for a list of these."""
    if over is None:
        return None
    several = over if isinstance(over, list) else [over]
    sets = [(names,) if isinstance(names, str) else names for names in several]
    for names in sets:
        if type(names) is not tuple or not all(isinstance(name, str) for name in names):
            raise TypeError(f"axes in allow must be {_FORMS}, not {over!r}")
    return tuple(sets)


def _unknown_kind_error(kind: Any) -> ValueError:
    known = f"the kinds of collectives are {', '.join(KINDS)}"
    if not isinstance(kind, str):
        return ValueError(f"allow has {kind!r}; expected is a kind or (kind, axes); {known}")
    spelled = _MEANT_BY.get(kind, kind.replace("_", "-").lower())
    hint = did_you_mean([*map(repr, nearest(spelled, KINDS))])
    return ValueError(f"allow names {kind!r}, but {known}{hint}")


def check_axes(rules: Iterable[Rule], mesh_shape: dict[str, int]) -> None:
    """Raise ``ValueError`` if a rule names an axis that the mesh lacks."""
    for name in [name for rule in rules for axes in rule.over or () for name in axes]:
        if not mesh_shape:
            raise ValueError(
                f"allow names the axis {name!r}, but no argument or result has a mesh; pass mesh="
            )
        if name not in mesh_shape:
            hint = did_you_mean([*map(repr, nearest(name, map(str, mesh_shape)))])
            raise ValueError(
                f"allow names the axis {name!r}, but the mesh has the axes {mesh_shape}{hint}"
            )


def complaints_of(found: Collectives, rules: list[Rule], max_bytes: int | None) -> list[str]:
    """Return the collectives that break the rules, and the rules that they do not fulfil."""

    def allowed_by(rule: Rule) -> list[Collective]:
        return [each for each in found if rule.allows(each, found.mesh_shape)]

    complaints = []
    for each in found:
        # A collective communicates nothing if every device is alone in its group.
        is_allowed = any(rule.allows(each, found.mesh_shape) for rule in rules)
        if each.axes != () and not is_allowed:
            complaints.append(f"not allowed: {sentence(each)}")
    for rule in rules:
        times = summed(each.count for each in allowed_by(rule))
        if rule.times is not None and times != rule.times:
            often = "an unknown number of times" if times is None else counted(times, "time")
            complaints.append(f"expected {rule}; found: {often}")
    total = found.nbytes_total
    if max_bytes is not None and (total is None or total > max_bytes):
        size = "an unknown number" if total is None else f"{total}"
        complaints.append(f"expected at most {max_bytes} bytes on one device; found: {size}")
    return complaints
