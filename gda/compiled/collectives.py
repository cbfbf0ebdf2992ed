"""The communication of a jitted function, which is compiled and read, never run."""

from __future__ import annotations

import functools
import os
import site
import sysconfig
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Compiled, Lowered, Traced, Wrapped

from gda.compiled.hlo import Collectives, num_devices, read_collectives
from gda.compiled.rules import Allowed, check_axes, complaints_of, rules_of
from gda.layout.boundary import public, set_module
from gda.mesh import check_mesh

Program = Callable[..., Any] | Traced | Lowered | Compiled

_LIBRARIES = [os.path.dirname(jax.__file__), os.path.dirname(os.path.dirname(__file__))]


@set_module("gda")
@public
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


@set_module("gda")
@public
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
    rules = rules_of(allow)
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 0):
        raise ValueError(f"max_bytes is a number of bytes, 0 or more, not {max_bytes!r}")
    _check_mesh(mesh)
    if mesh is not None:
        check_axes(rules, dict(mesh.shape))
    found = collectives(fun, *args, mesh=mesh, **kwargs)
    check_axes(rules, found.mesh_shape)
    complaints = complaints_of(found, rules, max_bytes)
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
            f"no argument is placed on {which}, so the program is for one device and does not "
            "communicate; pass arrays over a mesh, or jax.ShapeDtypeStruct(shape, dtype, "
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
