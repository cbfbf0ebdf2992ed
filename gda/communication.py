"""What a jitted function will communicate: it is compiled and read, never run.

Not called ``collectives``, because a submodule of that name would take the place of the function
``gda.collectives``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import site
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple, overload

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Compiled, Lowered, Traced, Wrapped

from gda.hlo import KINDS, Collective, num_devices, read_collectives
from gda.indices import check_mesh
from gda.wording import format_bytes

Axes = tuple[str, ...]
Program = Callable[..., Any] | Traced | Lowered | Compiled
AxesRule = str | Axes | list[str | Axes]
Allowed = (
    Mapping[str, AxesRule | int | None]
    | Mapping[tuple[str, str | Axes], int | None]
    | Mapping[str | tuple[str, str | Axes], AxesRule | int | None]
    | Iterable[str | tuple[str, AxesRule]]
)

_LIBRARIES = [os.path.dirname(jax.__file__), os.path.dirname(__file__)]

# What those may have meant who write what JAX calls them. Not accepted: XLA chooses the kinds, and
# an allowed ``pmax`` would allow a sum.
_MEANT_BY = {
    "psum": "all-reduce",
    "pmean": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "psum_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}


class Traffic(NamedTuple):
    """What is communicated over some axes in one call.

    Attributes:
      executions: how many collectives are executed; None where a loop's length is not known.
      nbytes: bytes of their operands on one device; None likewise.
    """

    executions: int | None
    nbytes: int | None


@dataclass(frozen=True, repr=False)
class Collectives(Sequence[Collective]):
    """The collectives of a compiled function, in the order in which it comes to them.

    A sequence of ``Collective``, shown as a table for the terminal.

    Attributes:
      found: the collectives.
      mesh_shape: sizes of the axes by name, in mesh order; empty where no mesh is known.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> x = jax.ShapeDtypeStruct((16, 32), np.float32, sharding=NamedSharding(mesh, P('x')))
    >>> gda.collectives(lambda x: x.sum(axis=0), x).by_axis()
    {('x',): Traffic(executions=1, nbytes=128)}
    """

    found: tuple[Collective, ...]
    mesh_shape: dict[str, int] = field(hash=False)  # a dict has no hash

    def __len__(self) -> int:
        return len(self.found)

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Collective, ...]: ...
    def __getitem__(self, index: int | slice) -> Collective | tuple[Collective, ...]:
        return self.found[index]

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all operands on one device in one call; None where a loop's length is unknown.

        What is in branches counts as if it were executed.
        """
        return _sum(collective.total_bytes for collective in self)

    def by_axis(self) -> dict[Axes | None, Traffic]:
        """Return the total for each set of mesh axes that is communicated over.

        A collective over two axes counts for the pair of them alone. The key None is for groups
        that no axes give. What is in branches counts as if it were executed.
        """
        totals: dict[Axes | None, Traffic] = {}
        for collective in self:
            so_far = totals.get(collective.axes, Traffic(0, 0))
            totals[collective.axes] = Traffic(
                _sum((so_far.executions, collective.count)),
                _sum((so_far.nbytes, collective.total_bytes)),
            )
        return totals

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as dicts, lists, strings and numbers, ready for JSON."""
        return {
            "mesh": dict(self.mesh_shape),
            "collectives": [dataclasses.asdict(collective) for collective in self],
            "total_bytes": self.total_bytes,
        }

    def __repr__(self) -> str:
        mesh = f"the mesh {self.mesh_shape}" if self.mesh_shape else "a mesh that is not known"
        if not self:
            return f"no collectives on {mesh}"
        some = "1 collective" if len(self) == 1 else f"{len(self)} collectives"
        header = ["collective", "over", "operands", "times", "bytes", "from"]
        totals = [
            ["total", _format_axes(axes), "", _format_count(executions), _format_size(nbytes), ""]
            for axes, (executions, nbytes) in self.by_axis().items()
        ]
        return f"{some} on {mesh}; bytes are of the operands on one device\n" + _table(
            [header, *map(_row, self), *totals]
        )


def collectives(
    fun: Program,
    /,
    *args: Any,
    mesh: Mesh | AbstractMesh | None = None,
    **kwargs: Any,
) -> Collectives:
    """Return what a call ``fun(*args, **kwargs)`` will communicate between devices.

    The function is compiled for these arguments and the optimised program is read. Nothing is run,
    nothing is allocated. The list says what this version of XLA does on this kind of device:
    another may choose other collectives for the same result. Of several processes all should call
    it, since XLA may have them share the work of compiling.

    Arrays that a plain ``fun`` closes over become constants of the program, and those are not cut:
    pass them as arguments. JAX's compilation cache may give a program back with the lines of an
    older source; the compilation here asks for one with today's, but a function that has run
    already keeps what it got, as a ``Compiled`` does.

    Args:
      fun: a function made by ``jax.jit`` or ``gda.jit``, a method or ``functools.partial`` of one,
        or any callable, which is then jitted; or what ``jax.stages`` makes of one (``Traced``,
        ``Lowered``, ``Compiled``), alone.
      args, kwargs: as for a call: arrays, ``GlobalArray``s, trees of them, static arguments; or in
        their place ``jax.ShapeDtypeStruct`` with a ``sharding``, which need no memory.
      mesh: whose axes are named; by default that of the first argument that has one, else that of
        a result, else that of ``jax.set_mesh``. (A function with a keyword argument ``mesh`` of its
        own is passed as ``functools.partial(fun, mesh=…)``.)

    Raises:
      TypeError: ``fun`` is not callable, ``mesh`` is no mesh, or a compiled program comes
        with arguments.
      ValueError: no argument is placed on a mesh and the program is for one device, so there is
        nothing to see; ``mesh`` has another number of devices than the program; or the program has
        a collective that cannot be read.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ('x', 'y'))
    >>> a = jax.ShapeDtypeStruct((16, 32), np.float32, sharding=NamedSharding(mesh, P(None, 'y')))
    >>> b = jax.ShapeDtypeStruct((32, 8), np.float32, sharding=NamedSharding(mesh, P('y')))
    >>> print(gda.collectives(lambda a, b: a @ b, a, b))  # doctest: +ELLIPSIS
    1 collective on the mesh {'x': 2, 'y': 4}; bytes are of the operands on one device
      collective        over  operands       times  bytes  from
      all-reduce (add)  y     float32[16,8]  1      512 B  ...:1
      total             y                    1      512 B
    """
    _check_mesh(mesh)
    fun, args, kwargs = _unwrapped(fun, args, kwargs)
    program = _compiled(fun, args, kwargs)
    text = program.as_text()
    if text is None:
        raise ValueError("the compiler for these devices does not give the text of its programs")
    mesh_shape = _mesh_shape(program, num_devices(text), mesh, (args, kwargs))
    found = read_collectives(text, mesh_shape, library=_LIBRARIES, installed=_installed())
    return Collectives(found, mesh_shape)


def assert_collectives(
    fun: Program,
    /,
    *args: Any,
    allow: Allowed,
    max_bytes: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    **kwargs: Any,
) -> None:
    """Fail unless a call ``fun(*args, **kwargs)`` communicates only what is allowed. For tests.

    ``allow`` maps kinds of collectives to what they may do:

    - ``[]``: nothing is allowed.
    - ``['all-reduce']``: all-reduces over any axes, as many as there are.
    - ``{'all-reduce': 'data'}``: all-reduces over the axis ``'data'`` alone.
    - ``{'all-reduce': ('data', 'model')}``: over these two axes at once.
    - ``{'all-reduce': ['data', 'model']}``: over one or the other.
    - ``{('all-reduce', 'data'): 1}``: just once over ``'data'``, and it has to be there.
    - ``{'all-reduce': 2}``: just two in all, over any axes.

    A number is of executions in one call, so a collective in a loop of 7 is 7; what is in a branch
    counts as executed. XLA may combine or split collectives, most of all gradients of many
    parameters: name the axis where that must not matter.

    Args:
      fun, args, kwargs, mesh: as for ``gda.collectives``; nothing is run.
      allow: as above.
      max_bytes: an upper bound on the bytes of all operands on one device, in one call, in the
        types in which this kind of device sends them: on CPU twice as many for bfloat16.

    Raises:
      AssertionError: it communicates something else; says what was found, and where it comes from.
      TypeError, ValueError: ``allow`` names no kind of collective; or an axis that the mesh lacks,
        before anything is compiled where ``mesh`` is given. Else as ``gda.collectives``.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('data',))
    >>> x = jax.ShapeDtypeStruct((64, 4), np.float32, sharding=NamedSharding(mesh, P('data')))
    >>> w = jax.ShapeDtypeStruct((4,), np.float32, sharding=NamedSharding(mesh, P()))
    >>> step = jax.jit(jax.grad(lambda w, x: (x @ w).sum()))
    >>> gda.assert_collectives(step, w, x, allow={('all-reduce', 'data'): 1})
    """
    rules = _rules(allow)
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 0):
        raise ValueError(f"max_bytes is a number of bytes, 0 or more, not {max_bytes!r}")
    _check_mesh(mesh)
    if mesh is not None:
        _check_axes(rules, dict(mesh.shape))
    found = collectives(fun, *args, mesh=mesh, **kwargs)
    _check_axes(rules, found.mesh_shape)
    complaints = _complaints(found, rules, max_bytes)
    if complaints:
        inside, _, _ = _unwrapped(fun, args, kwargs)
        name = getattr(inside, "__name__", type(inside).__name__)
        allowed = "; ".join(map(str, rules)) + "; nothing else" if rules else "nothing"
        raise AssertionError(
            "\n".join([f"{name} may communicate: {allowed}", *complaints, f"found: {found}"])
        )


# The program and its mesh.


def _check_mesh(mesh: Mesh | AbstractMesh | None) -> None:
    if mesh is not None:
        check_mesh(mesh, (Mesh, AbstractMesh))  # pyright: ignore[reportArgumentType]


def _unwrapped(
    fun: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Program, tuple[Any, ...], dict[str, Any]]:
    """Return the jitted function inside of partials and methods, with their arguments too.

    Jitted once more, they would make constants of them. A method looks jitted by itself, since it
    passes on ``lower``, but without its object.
    """

    def received(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    inside, inside_args, inside_kwargs = fun, args, kwargs
    while isinstance(inside, functools.partial | MethodType):
        if isinstance(inside, MethodType):
            inside_args = (inside.__self__, *inside_args)
            inside = inside.__func__
        else:
            partial = functools.partial(received, *inside.args, **inside.keywords)
            inside_args, inside_kwargs = partial(*inside_args, **inside_kwargs)
            inside = inside.func
    is_jitted = isinstance(inside, Wrapped)
    return (inside, inside_args, inside_kwargs) if is_jitted else (fun, args, kwargs)


def _compiled(fun: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
    if isinstance(fun, Traced | Lowered | Compiled):
        if args or kwargs:
            raise TypeError(
                f"a jax.stages.{type(fun).__name__} has its arguments already; pass it alone, or "
                "pass the function"
            )
        fun = fun.lower() if isinstance(fun, Traced) else fun
        return _with_its_lines(fun) if isinstance(fun, Lowered) else fun
    if not callable(fun):
        raise TypeError(
            "this takes a function, plain or jitted, and the arguments of a call of it, not "
            f"{type(fun).__name__} as the function"
        )
    jitted = fun if isinstance(fun, Wrapped) else jax.jit(fun)
    return _with_its_lines(jitted.lower(*args, **kwargs))


def _with_its_lines(lowered: Lowered) -> Compiled:
    # Else JAX's cache may give the same program from another source: lines are not in its key.
    option = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        return lowered.compile()
    finally:
        jax.config.update(option, before)


def _installed() -> list[str]:
    own = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    return [*own, *site.getsitepackages(), site.getusersitepackages()]


def _mesh_shape(
    program: Compiled, devices: int, mesh: Mesh | AbstractMesh | None, arguments: Any
) -> dict[str, int]:
    """Return sizes of the axes of the mesh that a program is over; none where no mesh is known."""
    shardings = (program.input_shardings, program.output_shardings)
    for known in [mesh] if mesh is not None else _meshes((arguments, shardings)):
        if known.size == devices:
            return dict(known.shape)
    if devices == 1:
        which = "a mesh" if mesh is None else f"the mesh {dict(mesh.shape)}"
        raise ValueError(
            f"no argument is placed on {which}, so the program is for one device and has nobody to "
            "communicate with; pass arrays over a mesh, or jax.ShapeDtypeStruct(shape, dtype, "
            "sharding=NamedSharding(mesh, spec))"
        )
    if mesh is not None:
        raise ValueError(
            f"the mesh {dict(mesh.shape)} has {mesh.size} devices, but the program is compiled "
            f"for {devices}; pass the mesh that its arguments are cut over"
        )
    return {}


def _meshes(tree: Any) -> Iterator[Mesh | AbstractMesh]:
    """Yield the meshes of arrays, of their stand-ins and of shardings, and last that of JAX."""
    for leaf in jax.tree.leaves(tree):
        sharding = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            yield sharding.mesh
    ambient = jax.sharding.get_abstract_mesh()
    if not ambient.empty:
        yield ambient


# What is allowed.


@dataclass(frozen=True)
class _Rule:
    """A kind that is allowed, over some sets of axes or any, some number of times or any."""

    kind: str
    over: tuple[Axes, ...] | None = None
    times: int | None = None

    def allows(self, collective: Collective, mesh_shape: Mapping[str, int]) -> bool:
        if collective.kind != self.kind:
            return False
        return self.over is None or collective.axes in [
            tuple(name for name in mesh_shape if name in axes and mesh_shape[name] > 1)
            for axes in self.over
        ]

    def __str__(self) -> str:
        over = "any axes" if self.over is None else " or ".join(map(_format_axes, self.over))
        times = "" if self.times is None else f", exactly {_format_times(self.times)}"
        return f"{self.kind} over {over or 'no axes'}{times}"


def _rules(allow: Allowed) -> list[_Rule]:
    if isinstance(allow, str) or not isinstance(allow, Iterable):
        raise TypeError(
            "allow is a mapping such as {'all-reduce': 'data'} or {('all-reduce', 'data'): 1}, or "
            f"a list of kinds such as ['all-reduce'], not {allow!r}"
        )
    items = allow.items() if isinstance(allow, Mapping) else [(key, None) for key in allow]
    return [_rule(key, value) for key, value in items]


def _rule(key: Any, value: Any) -> _Rule:
    kind, over = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
    if kind not in KINDS:
        raise _unknown_kind_error(kind)
    if isinstance(value, str | tuple | list) and over is None:
        over, value = value, None
    if value is not None and (type(value) is not int or value < 0):
        raise TypeError(
            f"allow says {key!r}: {value!r}; what follows is a number of executions, 0 or more"
            + ("" if isinstance(key, tuple) else f", or the axes that it is allowed over: {_FORMS}")
        )
    return _Rule(kind, _alternatives(over), value)


_FORMS = "a name, a tuple of names for these axes at once, or a list of these for one or the other"


def _alternatives(over: Any) -> tuple[Axes, ...] | None:
    """Return sets of axes: one for a name or a tuple of names, several for a list of these."""
    if over is None:
        return None
    several = over if isinstance(over, list) else [over]
    sets = [(names,) if isinstance(names, str) else names for names in several]
    for names in sets:
        if type(names) is not tuple or not all(isinstance(name, str) for name in names):
            raise TypeError(f"axes in allow are {_FORMS}; not {over!r}")
    return tuple(sets)


def _unknown_kind_error(kind: object) -> ValueError:
    known = f"the kinds of collectives are {', '.join(KINDS)}"
    if not isinstance(kind, str):
        hint = ""
        if isinstance(kind, tuple) and len(kind) == 3:
            hint = f"; did you mean {{{kind[:2]!r}: {kind[2]!r}}}?"
        return ValueError(
            f"allow has {kind!r} where it names a kind or (kind, axes); {known}{hint}"
        )
    spelled = _MEANT_BY.get(kind, kind.replace("_", "-").lower())
    near = difflib.get_close_matches(spelled, KINDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"allow names {kind!r}, but {known}{hint}")


def _check_axes(rules: Iterable[_Rule], mesh_shape: dict[str, int]) -> None:
    for name in [name for rule in rules for axes in rule.over or () for name in axes]:
        if not mesh_shape:
            raise ValueError(
                f"allow names the axis {name!r}, but of no argument or result a mesh is known; "
                "pass mesh="
            )
        if name not in mesh_shape:
            near = difflib.get_close_matches(name, map(str, mesh_shape), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"allow names the axis {name!r}, but the mesh has the axes {mesh_shape}{hint}"
            )


def _complaints(found: Collectives, rules: list[_Rule], max_bytes: int | None) -> list[str]:
    def allowed_by(rule: _Rule) -> list[Collective]:
        return [each for each in found if rule.allows(each, found.mesh_shape)]

    complaints = []
    for each in found:
        # Where every device is alone in its group nothing is communicated.
        is_allowed = any(rule.allows(each, found.mesh_shape) for rule in rules)
        if each.axes != () and not is_allowed:
            complaints.append(f"not allowed: {_sentence(each)}")
    for rule in rules:
        times = _sum(each.count for each in allowed_by(rule))
        if rule.times is not None and times != rule.times:
            counted = "not known how often" if times is None else _format_times(times)
            complaints.append(f"expected {rule}; found: {counted}")
    total = found.total_bytes
    if max_bytes is not None and (total is None or total > max_bytes):
        size = "a number that is not known" if total is None else f"{total}"
        complaints.append(f"expected at most {max_bytes} bytes on one device; found: {size}")
    return complaints


# In words.


def _sum(numbers: Iterable[int | None]) -> int | None:
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _sentence(collective: Collective) -> str:
    count = collective.count
    times = "in a loop of unknown length" if count is None else _format_times(count)
    branch = ", in a branch" if collective.is_conditional else ""
    return (
        f"{_format_kind(collective)} over {_format_axes(collective.axes)} of "
        f"{_format_operands(collective)}, {format_bytes(collective.nbytes)}, {times}{branch}, "
        f"from {_format_source(collective) or 'no line'}"
    )


def _row(collective: Collective) -> list[str]:
    count = _format_count(collective.count)
    return [
        _format_kind(collective),
        _format_axes(collective.axes),
        _format_operands(collective),
        f"<={count}" if collective.is_conditional else count,
        _format_size(collective.total_bytes),
        _format_source(collective),
    ]


def _format_kind(collective: Collective) -> str:
    reduction = "" if collective.reduction is None else f" ({collective.reduction})"
    return f"{collective.kind}{reduction}"


def _format_axes(axes: Axes | None) -> str:
    return "other groups" if axes is None else ", ".join(map(str, axes)) or "no axes"


def _format_operands(collective: Collective) -> str:
    operands = [
        f"{dtype}[{','.join(map(str, shape))}]"
        for dtype, shape in zip(collective.operand_dtypes, collective.operand_shapes, strict=True)
    ]
    if not operands:
        return "none"
    same = operands.count(operands[0])
    more = len(operands) - same
    first = operands[0] if same == 1 else f"{same} x {operands[0]}"
    return f"{first} and {more} more" if more else first


def _format_source(collective: Collective) -> str:
    file = collective.source_file
    if file is None:
        return collective.op_name
    return f"{_format_file(file)}:{collective.source_line}"


def _format_file(file: str) -> str:
    if re.search(r"[\\/]ipykernel_\d+[\\/]\d+\.py$", file):
        return "cell"  # the number in its name is a hash of the cell, which nobody knows
    is_elsewhere = os.path.splitdrive(file)[0] != os.path.splitdrive(os.getcwd())[0]
    return file if is_elsewhere else min(file, os.path.relpath(file), key=len)


def _format_count(count: int | None) -> str:
    return "?" if count is None else str(count)


def _format_times(count: int) -> str:
    return "1 time" if count == 1 else f"{count} times"


def _format_size(nbytes: int | None) -> str:
    return "?" if nbytes is None else format_bytes(nbytes)


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
