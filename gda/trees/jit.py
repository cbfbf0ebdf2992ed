"""``jit`` and ``constrain``: containers outside a jitted function, plain arrays inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Protocol, TypeVar, overload

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from gda.arrays.container import Container
from gda.arrays.global_array import GlobalArray, unwrapped
from gda.arrays.padded_array import PaddedArray
from gda.arrays.process_local import has_padding_for
from gda.layout.boundary import public, set_module
from gda.layout.grid import ShardGrid
from gda.layout.spec import (
    SpecLike,
    axes_by_dimension,
    check_spec,
    entries_of,
    format_spec,
    partitions_of,
    reductions_of,
)
from gda.mesh import (
    check_mesh,
    checked_partition_spec,
    is_tracer,
    mesh_and_spec,
    named_sharding,
    sharding_of,
)
from gda.multihost.agreement import communicates, tells_alone
from gda.trees.leaves import Tree, array_of, held_by, is_array, is_leaf, is_value, opened
from gda.trees.matching import SPECS_OR_NONE, check_kind, map_with_specs

_TreeT = TypeVar("_TreeT")

_CONSTRAINTS = SPECS_OR_NONE._replace(
    classes=(*SPECS_OR_NONE.classes, NamedSharding, SingleDeviceSharding)
)


class Jitted(Protocol):
    """The result of ``jax.jit``, as far as it is the same in all versions of JAX."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any: ...
    def clear_cache(self) -> None: ...


@overload
def jit(
    fun: Callable[..., Any],
    *,
    mesh: Mesh | None = None,
    in_specs: Tree = None,
    out_specs: Tree = None,
    **jit_options: Any,
) -> Jitted: ...
@overload
def jit(
    *,
    mesh: Mesh | None = None,
    in_specs: Tree = None,
    out_specs: Tree = None,
    **jit_options: Any,
) -> Callable[[Callable[..., Any]], Jitted]: ...
@set_module("gda")
@public
def jit(
    fun: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | None = None,
    in_specs: Tree = None,
    out_specs: Tree = None,
    **jit_options: Any,
) -> Jitted | Callable[[Callable[..., Any]], Jitted]:
    """``jax.jit`` for a function of plain arrays: ``GlobalArray`` in, ``GlobalArray`` out.

    The body of ``fun`` sees a ``jax.Array`` for every ``GlobalArray`` in its arguments; every array
    that it returns, also a loss, comes out as a ``GlobalArray``. A ``PaddedArray`` stays one inside
    and comes out as one. The result is one ``jax.jit`` function, with its ``lower``, ``eval_shape``
    and ``clear_cache``; a call costs as much.

    Args:
      fun: the function; without it the result is a decorator: ``@gda.jit(out_specs=P('x'))``.
      mesh: the mesh of the specs; by default the mesh of the arguments, or that of
        ``jax.set_mesh``. With it results have ``out_specs`` exactly as written, so a spec must not
        have more entries than its result has dimensions. Without it JAX may drop axes that shard
        nothing, such as axes of size 1.
      in_specs: a tuple with one ``PartitionSpec`` or tree of them per positional argument, each
        tree a prefix of the argument; one ``PartitionSpec`` for a function of one argument.
        ``None`` leaves an argument as it is. An argument with another layout is moved first.
      out_specs: a ``PartitionSpec``, or a tree of them that is a prefix of the result. ``None``
        leaves the layout to JAX.
      jit_options: options of ``jax.jit``, such as ``donate_argnums`` and ``static_argnums``.

    Over Explicit axes JAX refuses an operation if its layout is ambiguous. If ``out_specs`` names
    every result, gda then traces the body again with Auto axes, and the compiler chooses the
    layouts inside.

    Write ``gda.jit(jax.grad(loss))``: JAX refuses ``jax.grad(gda.jit(loss))``. To call the lowered
    function with containers, lower it with containers: ``f.lower(g)``, or without data
    ``f.lower(jax.tree.map(lambda s: gda.GlobalArray.from_array(s), shapes))``.

    Raises (when first called with new shapes):
      ValueError: a spec does not fit an array and the mesh, or there is no mesh.
      TypeError: a spec is not a ``PartitionSpec``.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> data = np.ones((64, 32), np.float32)
    >>> g = gda.GlobalArray.from_callback((64, 32), mesh, P('x', 'y'), lambda i: data[i])
    >>> f = gda.jit(lambda x: x @ x.T, out_specs=P('y', 'x'))
    >>> f(g)
    GlobalArray(shape=(64, 64), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P('y', 'x'))
    """
    if fun is None:
        return partial(jit, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **jit_options)
    if not callable(fun):
        raise TypeError(f"gda.jit takes a function, not {fun!r}")
    if isinstance(in_specs, PartitionSpec):
        in_specs = (in_specs,)
    in_specs, out_specs = opened(in_specs), opened(out_specs)
    check_kind(in_specs, "in_specs", SPECS_OR_NONE)
    check_kind(out_specs, "out_specs", SPECS_OR_NONE)
    if in_specs is not None and type(in_specs) is not tuple:
        raise TypeError(
            "in_specs is a tuple with one entry per positional argument, not a "
            f"{type(in_specs).__name__}"
        )
    for specs, option in ((in_specs, "in_shardings"), (out_specs, "out_shardings")):
        if specs is not None and option in jit_options:
            raise TypeError(f"give {option.replace('shardings', 'specs')} or {option}, not both")
    if mesh is not None:
        check_mesh(mesh)

    @public
    @wraps(fun)
    def body(*args: Any, **kwargs: Any) -> Any:
        empty = _empty_contents((args, kwargs))
        args = tuple(map(_plain, args))
        kwargs = {name: _plain(value) for name, value in kwargs.items()}
        has_specs = in_specs is not None or out_specs is not None
        over: Any = _mesh_for((args, kwargs), mesh) if has_specs else None
        if in_specs is not None:
            args = _constrain_arguments(args, in_specs, over)
        is_ambiguous, result = False, None
        try:
            result = _plain(fun(*args, **kwargs))
        except Exception as error:
            named = jax.tree.leaves(out_specs, is_leaf=SPECS_OR_NONE.has)
            # JAX does not export the class.
            if type(error).__name__ != "ShardingTypeError" or over is None or None in named:
                raise
            is_ambiguous = True
        if is_ambiguous:
            result = _traced_as_auto(fun, args, kwargs, out_specs, over)
        if out_specs is not None:
            result = _map_specs(partial(_constrained, mesh=over), out_specs, result, "out_specs")
        return _contained(result, empty)

    if mesh is not None and out_specs is not None:
        # Tells JAX the devices if no argument is on them yet. As written, because a result that is
        # the next argument compiles again if its spec has a None less.
        jit_options["out_shardings"] = _shardings(mesh, out_specs, is_exact=True)
    jitted: Any = jax.jit(body, **jit_options)  # JAX's own type has no clear_cache
    return jitted


@set_module("gda")
@communicates("reshard", lambda given: [given["x"], given["spec"], given["mesh"]])
def constrain(
    x: _TreeT,
    spec: SpecLike | NamedSharding | SingleDeviceSharding | Tree,
    *,
    mesh: Mesh | None = None,
) -> _TreeT:
    """Shard an array, or every array of a tree, by ``spec``.

    In a trace this is a constraint: ``with_sharding_constraint`` of JAX over Auto axes, ``reshard``
    over Explicit axes. Outside ``jit`` JAX moves the data. If processes hold parts of an array, the
    move communicates, and all of them must call this.

    Args:
      x: a ``jax.Array`` or a ``GlobalArray``, or a pytree of them. The result is of the same kind.
        A ``PaddedArray`` too, in a trace only if it needs no other padding. Numbers and strings
        stay as they are.
      spec: a ``PartitionSpec``, or a sharding, which moves ``x`` to its memory kind too. For one
        array also a sequence of ``None``, axis names and tuples of axis names. For a tree also a
        tree of specs and shardings that is a prefix of ``x``. ``None`` leaves arrays as they are.
      mesh: the mesh of the specs, by default that of each array. Omit it for shardings.

    Raises:
      TypeError: a mesh is given for a sharding, a leaf of ``x`` is not an array, or a leaf of
        ``spec`` is not a spec.
      ValueError: a spec does not fit its array; an array has no mesh, and none is given; ``spec``
        is no prefix of ``x``. An error of a tree has a note with the path of the leaf.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> g = gda.GlobalArray.from_callback((8, 2), mesh, ['x'], lambda i: np.zeros((2, 2)))
    >>> gda.constrain(g, [None, 'y'])
    GlobalArray(shape=(8, 2), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P(None, 'y'))
    >>> from jax.sharding import PartitionSpec as P
    >>> gda.constrain({'w': g, 'b': g}, {'w': P('y'), 'b': None})['w'].spec == P('y')
    True
    """
    if is_leaf(x):
        result = _constrained_leaf(x, spec, mesh)
    else:
        result = map_with_specs(
            lambda leaf, one: _constrained_leaf(leaf, one, mesh), x, spec, "spec", _CONSTRAINTS
        )
    leaves = jax.tree.leaves(result, is_leaf=is_leaf)
    are_traced = [is_tracer(held_by(leaf)) for leaf in leaves]
    if leaves and all(are_traced):
        return result
    from gda.trees.resharding import Moving, moved_together  # here: a jitted function moves nothing

    moved = moved_together(result, "reshard")
    if not any(are_traced) and not any(isinstance(leaf, Moving) for leaf in leaves):
        tells_alone("reshard", "no array of the tree is to move")
    return moved


def _plain(tree: Any) -> Any:
    """Return the tree as it would be if there were no ``GlobalArray``."""
    return unwrapped(opened(tree, GlobalArray))


def _empty_contents(tree: Any) -> set[Any]:
    """Return the structures of nodes without leaves, such as ``MaskedNode``, in containers."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, GlobalArray))
    contents = [node.array for node in nodes if isinstance(node, GlobalArray)]
    return {
        jax.tree.structure(content)
        for content in contents
        if content is not None and not jax.tree.leaves(content)
    }


def _contained(result: Any, empty: set[Any]) -> Any:
    """Return a result with each array, and each ``empty`` node, in a container."""

    def is_empty(node: Any) -> bool:
        return bool(empty) and jax.tree.structure(node) in empty

    def contained(leaf: Any) -> Any:
        if isinstance(leaf, int | float | complex | np.generic):
            leaf = jax.numpy.asarray(leaf)
        wants_one = isinstance(leaf, jax.Array | np.ndarray) or is_empty(leaf)
        return GlobalArray._from_leaf(leaf) if wants_one else leaf

    # The content of a PaddedArray stays as it is.
    return jax.tree.map(
        contained, result, is_leaf=lambda node: isinstance(node, Container) or is_empty(node)
    )


def _constrained_leaf(x: Any, spec: Any, mesh: Mesh | None) -> Any:
    if spec is None or is_value(x):
        return x
    is_sharding = isinstance(spec, Sharding)
    if mesh is not None:
        if is_sharding:
            raise TypeError("a sharding has a mesh of its own; omit mesh=")
        check_mesh(mesh)
    held = held_by(x)
    if is_tracer(held):
        if is_sharding:
            return _constrained_in_memory(x, spec)  # pyright: ignore[reportArgumentType]
        return _constrained(x, spec, _mesh_for(held, mesh))
    from gda.arrays.transport.carrying import Relayout  # here: a jitted function moves nothing
    from gda.trees.resharding import Moving

    array = array_of(x)
    if hasattr(spec, "__next__"):  # which can be read only once
        spec = tuple(spec)
    if is_sharding:
        over = mesh_and_spec(spec, None)  # pyright: ignore[reportArgumentType]
    elif mesh is None and isinstance(array.sharding, SingleDeviceSharding):
        raise ValueError(f"the array is on {array.device} and over no mesh; pass mesh=")
    else:
        over = mesh_and_spec(sharding_of(array).mesh if mesh is None else mesh, spec)
    relayout = Relayout(array, over, x.shape if isinstance(x, PaddedArray) else None)
    relayout.check()  # here, for an error with the path
    return Moving(x, relayout)


def _shardings(mesh: Mesh | AbstractMesh, specs: Any, *, is_exact: bool) -> Any:
    """Return the sharding of each spec: as written, or in the short form, which fits any rank."""

    def sharding(spec: PartitionSpec | None) -> NamedSharding | None:
        if spec is None:
            return None
        rank = len(partitions_of(spec))
        entries = check_spec(spec, (0,) * rank)
        short = entries_of(axes_by_dimension(entries, rank, mesh.shape))
        short = PartitionSpec(*short, **reductions_of(spec))
        return named_sharding((0,) * rank, mesh, spec if is_exact else short)

    return jax.tree.map(sharding, specs, is_leaf=SPECS_OR_NONE.has)


def _mesh_for(tree: Any, mesh: Mesh | None) -> Mesh | AbstractMesh:
    if mesh is not None:
        return mesh
    for leaf in jax.tree.leaves(tree):
        if is_tracer(leaf):
            sharding: Any = jax.typeof(leaf).sharding
            if not sharding.mesh.empty:
                return sharding.mesh
    ambient = jax.sharding.get_abstract_mesh()
    if not ambient.empty:
        return ambient
    raise ValueError(
        "there is no mesh for the specs: no argument is over one. Pass mesh=, or use jax.set_mesh"
    )


def _constrain_arguments(
    args: tuple[Any, ...], in_specs: tuple[Any, ...], mesh: Mesh | AbstractMesh
) -> tuple[Any, ...]:
    def constrain_array(leaf: Any, spec: SpecLike) -> Any:
        # Other leaves are static arguments.
        return _constrained(leaf, spec, mesh) if is_array(leaf) else leaf

    return _map_specs(constrain_array, in_specs, args, "in_specs")


def _map_specs(function: Callable[[Any, SpecLike], Any], specs: Any, tree: Any, name: str) -> Any:
    """Map ``function(leaf, spec)`` over a tree; ``specs`` is a prefix of it, ``None`` skips."""

    def at_leaf(leaf: Any, spec: PartitionSpec | None) -> Any:
        return leaf if spec is None else function(leaf, spec)

    try:
        return map_with_specs(at_leaf, tree, specs, name, SPECS_OR_NONE)
    except (TypeError, ValueError) as error:
        error.add_note(f"gda.jit: while applying {name}")
        raise


def _layout(x: Any, spec: SpecLike, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of ``x`` by ``spec``; ``ValueError`` if it does not fit."""
    shape = jax.numpy.shape(held_by(x))  # with padding
    spec = checked_partition_spec(spec, shape, mesh.shape)
    is_padded = isinstance(x, PaddedArray)
    grid = ShardGrid(x.shape if is_padded else shape, mesh.shape, spec, pad=is_padded)
    if not has_padding_for(grid, shape):
        raise ValueError(
            f"the array, a PaddedArray of shape {x.shape}, is padded to {shape}, and sharded by "
            f"{format_spec(grid.spec)} it has to be padded to {grid.padded_shape}; move it outside "
            "jit with p.reshard(mesh, spec)"
        )
    return named_sharding(shape, mesh, spec)


def _constrained(x: Any, spec: SpecLike, mesh: Mesh | AbstractMesh) -> Any:
    if isinstance(x, Container):
        _layout(x, spec, mesh)
        return x._with_array(_constrained(x.array, spec, mesh))
    x = jax.numpy.asarray(x)
    kinds = set(mesh.axis_types)
    if AxisType.Manual in kinds:
        raise TypeError(
            "inside jax.shard_map, over Manual axes, an array is one block; constrain it outside"
        )
    sharding = _layout(x, spec, mesh)
    if kinds == {AxisType.Explicit}:
        return jax.sharding.reshard(x, sharding)
    if AxisType.Explicit in kinds:
        raise TypeError(
            f"the mesh {dict(mesh.shape)} has Auto and Explicit axes, and JAX constrains them in "
            "different ways; use jax.sharding.reshard for the Explicit and "
            "jax.lax.with_sharding_constraint for the Auto ones"
        )
    return jax.lax.with_sharding_constraint(x, sharding)


def _constrained_in_memory(x: Any, sharding: NamedSharding | SingleDeviceSharding) -> Any:
    mesh, spec, kind = mesh_and_spec(sharding, None)
    if isinstance(x, Container):
        _layout(x, spec, mesh)
        return x._with_array(_constrained_in_memory(x.array, sharding))
    x = _constrained(x, spec, mesh)
    is_default = kind in (None, mesh.devices.flat[0].default_memory().kind)
    if is_default and jax.typeof(x).memory_space.name == "Device":  # pyright: ignore
        return x
    # JAX's constraints ignore the kind of memory.
    return jax.device_put(x, named_sharding(x.shape, mesh, spec, kind))


def _traced_as_auto(
    fun: Callable[..., Any], args: Any, kwargs: Any, out_specs: Any, mesh: Mesh | AbstractMesh
) -> Any:
    """Trace ``fun`` with all axes as Auto axes; other leaves than arrays pass through."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    traced = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

    def of_arrays(arrays: dict[int, Any]) -> Any:
        merged = (arrays.get(i, leaf) for i, leaf in enumerate(leaves))
        args, kwargs = jax.tree.unflatten(treedef, merged)
        result = _plain(fun(*args, **kwargs))
        _map_specs(partial(_layout, mesh=mesh), out_specs, result, "out_specs")
        return result

    as_auto = jax.sharding.auto_axes(
        of_arrays, axes=mesh.axis_names, out_sharding=_shardings(mesh, out_specs, is_exact=False)
    )
    return as_auto(traced)
