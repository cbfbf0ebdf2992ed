"""Batches of a training loop: from the hosts to the devices of the current mesh and back.

The current mesh is that of ``jax.set_mesh(mesh)``; functions of these names and meanings are in
axlearn.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gda.agreement import describe, together
from gda.array import GlobalArray
from gda.indices import local_positions
from gda.local import Batch, array_from_process_local
from gda.local_view import process_local_of, view_of
from gda.sharding import is_tracer, sharding_of
from gda.spec import Shape
from gda.transform import constrain
from gda.trees import is_container, map_with_specs, note_path, path_of, specs_for


class DataPartitionType(enum.Enum):
    """How the arrays of a batch are cut over the current mesh.

    ``FULL``: dimension 0 over all axes of the mesh, so that each process has some of the rows.
    ``REPLICATED``: not at all, so that every device has the whole array.

    >>> import gda
    >>> gda.DataPartitionType('full')
    <DataPartitionType.FULL: 'full'>
    """

    __module__ = "gda"

    FULL = "full"
    REPLICATED = "replicated"


def host_to_global_device_array(
    host_arrays: Any, *, partition: Any = DataPartitionType.FULL
) -> Any:
    """Return a tree of ``GlobalArray``s over the current mesh, made of what each process has.

    Under ``FULL`` each process brings the rows of its own devices: the global batch is the local
    batch divided by the devices of this process and multiplied by all devices, that is, where every
    process has as many, the local batch times the number of processes. The rows of a process are on
    its own devices, in their order in the mesh, whatever that order is. Under ``REPLICATED`` every
    process brings the whole array. Under a spec it brings what ``GlobalArray.from_process_local``
    says. NumPy data is copied once. Communicates between processes only to check that they agree,
    where ``gda.checking_agreement`` is on.

    Args:
      host_arrays: a pytree of arrays of shape ``[local batch, ...]``; under ``REPLICATED`` and
        specs of any shape.
      partition: a ``DataPartitionType``, a ``PartitionSpec``, or a tree of specs that is a prefix
        of ``host_arrays``.

    Raises:
      ValueError: there is no current mesh; the devices of this process do not divide the local
        batch; an array without dimensions under ``FULL``. With the path of the leaf.
      NotImplementedError: ``partition`` is something else.
      TypeError, DoesNotFitError: as in ``GlobalArray.from_process_local``.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> with jax.set_mesh(mesh):
    ...     batch = gda.host_to_global_device_array({'tokens': np.zeros((16, 5), np.int32)})
    >>> batch['tokens']
    GlobalArray(shape=(16, 5), dtype=int32, mesh={'x': 4, 'y': 2}, spec=P(('x', 'y')))
    """
    mesh = _needed_mesh()
    return together(
        "host_to_global_device_array", mesh, lambda: _placed(host_arrays, partition, mesh), describe
    )


def _placed(host_arrays: Any, partition: Any, mesh: Mesh) -> Any:
    pairs, structure = specs_for(host_arrays, _spec_of(partition, mesh), "partition")
    leaves = []
    with Batch(len(pairs)) as batch:
        for leaf, spec in pairs:
            if partition is DataPartitionType.FULL:
                _check_rows(np.shape(leaf), mesh, host_arrays, len(leaves))
            try:
                array = array_from_process_local(leaf, mesh, spec, batch=batch)
            except Exception as error:
                note_path(error, host_arrays, len(leaves))
                raise
            leaves.append(GlobalArray(array=array))
    return jax.tree.unflatten(structure, leaves)


def global_to_host_array(global_arrays: Any, *, partition: Any = DataPartitionType.FULL) -> Any:
    """Return a tree of new NumPy arrays: of each array what this process has, every block once.

    The inverse of ``host_to_global_device_array`` with the same ``partition``: rows come in the
    order in which they went in. Needs no current mesh, and never communicates between processes.

    Under ``FULL`` the arrays may be cut along any dimensions, as long as this process has whole
    rows, and the same ones of each array; rows that several processes have are returned by each.

    Args:
      global_arrays: a pytree of ``GlobalArray``s and ``jax.Array``s.
      partition: a ``DataPartitionType``, a ``PartitionSpec``, or a tree of specs that is a prefix
        of ``global_arrays``. Only leaves whose spec cuts dimension 0 must have the same rows.

    Raises:
      ValueError: of two leaves the batch sizes differ, or this process has other rows of the one
        than of the other (with the paths of both); this process does not have whole rows of a leaf,
        or under ``REPLICATED`` not all of it; its blocks do not form a regular grid; a leaf is not
        cut as its spec says; an array without dimensions under ``FULL``.
      TypeError: a leaf is not such an array, or is one of PRNG keys, of which NumPy knows nothing.
      NotImplementedError: ``partition`` is something else.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> with jax.set_mesh(mesh):
    ...     batch = gda.host_to_global_device_array({'tokens': np.arange(16)})
    >>> gda.global_to_host_array(batch)['tokens']
    array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15], dtype=int32)
    """
    pairs, structure = specs_for(global_arrays, _spec_of(partition, None), "partition")
    arrays = []
    for leaf, _ in pairs:
        try:
            arrays.append(_live(leaf))
        except Exception as error:
            note_path(error, global_arrays, len(arrays))
            raise
    batch = _Batch(global_arrays)
    for number, (array, (_, spec)) in enumerate(zip(arrays, pairs, strict=True)):
        if partition is DataPartitionType.FULL:
            batch.check_whole_rows(number, array)
            batch.check_same_rows(number, array)
        elif partition is DataPartitionType.REPLICATED:
            batch.check_whole(number, array)
        else:
            batch.check_cut(number, array, spec)
            if array.ndim and tuple(spec)[:1] not in ((), (None,)):
                batch.check_same_rows(number, array)
    values = []
    for array in arrays:
        try:
            values.append(process_local_of(array))
        except Exception as error:
            note_path(error, global_arrays, len(values))
            raise
    return jax.tree.unflatten(structure, values)


def with_sharding_constraint(x: Any, shardings: Any) -> Any:
    """Return ``x`` cut as ``shardings`` says: inside ``jit`` a constraint, outside it a move.

    ``gda.constrain`` for trees, over the current mesh. Where there is none, or it has one device,
    a spec leaves ``x`` as it is, so that a model runs unchanged on a laptop. Outside ``jit`` JAX
    moves the data, between processes if need be, and then all of them must call this.

    Args:
      x: a pytree of ``jax.Array``s and ``GlobalArray``s, which come back as such.
      shardings: a ``PartitionSpec`` over the current mesh, a ``NamedSharding``, or a tree of them
        that is a prefix of ``x``; ``None`` leaves a subtree as it is.

    Raises:
      ValueError: a spec does not fit, or ``shardings`` is no prefix. With the path of the leaf.
      TypeError: a leaf of ``x`` is not an array, or one of ``shardings`` is something else.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> with jax.set_mesh(mesh):
    ...     y = jax.jit(lambda x: gda.with_sharding_constraint(2 * x, P('x')))(np.ones(8))
    >>> y.sharding.shard_shape(y.shape), gda.with_sharding_constraint(1.0, P('x'))
    ((2,), 1.0)
    """
    current = _Current()
    return map_with_specs(
        lambda leaf, sharding: _constrained(leaf, sharding, current),
        x,
        shardings,
        "shardings",
        _is_sharding,
    )


def _constrained(leaf: Any, sharding: Any, current: _Current) -> Any:
    if sharding is None:
        return leaf
    is_placed = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    if isinstance(sharding, NamedSharding):
        mesh, spec = sharding.mesh, sharding.spec
    else:
        mesh, spec = current.mesh_for(leaf), sharding
    if mesh is None or (mesh.size == 1 and not is_placed):
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        leaf = jax.numpy.array(leaf)
    if is_placed:
        return constrain(leaf, sharding)
    return constrain(leaf, spec, mesh=mesh if isinstance(mesh, Mesh) else None)


# The current mesh.


class _Current:
    """The current mesh, looked for when it is first needed."""

    def __init__(self) -> None:
        self._mesh: Any = _Current

    def mesh_for(self, leaf: Any) -> Any:
        """Return it, inside ``jit`` without its devices if JAX knows it so; ``None`` if none is."""
        array = leaf.array if is_container(leaf) else leaf
        if not is_tracer(array):
            return self._concrete()
        ambient = jax.sharding.get_abstract_mesh()
        if not ambient.empty:
            return ambient
        known = jax.typeof(array).sharding.mesh  # pyright: ignore
        return self._concrete() if known.empty else known

    def _concrete(self) -> Mesh | None:
        if self._mesh is _Current:
            self._mesh = _current_mesh()
        return self._mesh


def _current_mesh() -> Mesh | None:
    """Return the mesh of ``jax.set_mesh``, or else that of ``with mesh:``; ``None`` if none is."""
    if is_tracer(jax.numpy.zeros(())):
        # A constraint cannot be looked at while tracing, so it is compiled, and not run.
        return _mesh_of(lambda: _probe.lower().compile().output_shardings)
    if hasattr(jax.sharding, "get_mesh"):  # not in JAX 0.8
        with contextlib.suppress(ValueError):  # under jax.grad it does not answer
            mesh: Any = jax.sharding.get_mesh()
            if not mesh.empty:
                return mesh
    return _mesh_of(lambda: _probe().sharding)


def _mesh_of(sharding: Any) -> Mesh | None:
    try:
        return sharding().mesh
    except RuntimeError:  # JAX: with_sharding_constraint requires a non-empty mesh in context
        return None


@jax.jit
def _probe() -> jax.Array:
    return jax.lax.with_sharding_constraint(jax.numpy.zeros(()), PartitionSpec())


def _needed_mesh() -> Mesh:
    mesh = _current_mesh()
    if mesh is None:
        raise ValueError(
            "there is no current mesh to place arrays on; call jax.set_mesh(mesh), or write "
            "`with jax.set_mesh(mesh):` around this"
        )
    return mesh


# Partitions.


def _spec_of(partition: Any, mesh: Mesh | None) -> Any:
    """Return a spec, or a tree of them, for a partition; without a mesh any spec will do."""
    if partition is DataPartitionType.REPLICATED:
        return PartitionSpec()
    if partition is DataPartitionType.FULL:
        return PartitionSpec(() if mesh is None else mesh.axis_names)
    for leaf in jax.tree.leaves(partition, is_leaf=_is_spec_or_none):
        if not isinstance(leaf, PartitionSpec | None):
            raise NotImplementedError(
                f"partition has {leaf!r}; it is DataPartitionType.FULL, "
                "DataPartitionType.REPLICATED, a PartitionSpec or a tree of specs"
            )
    if partition is None:
        raise NotImplementedError(
            "partition is None; write DataPartitionType.REPLICATED, or PartitionSpec(), for arrays "
            "that every device holds whole"
        )
    return partition


def _is_spec_or_none(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, PartitionSpec)


def _is_sharding(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, PartitionSpec | NamedSharding)


def _at(tree: Any, number: int) -> str:
    path = path_of(tree, number)
    return f"the array at {path}" if path else "the array"


# Rows.


def _check_rows(shape: Shape, mesh: Mesh, tree: Any, number: int) -> None:
    if not shape:
        raise _scalar_error(tree, number)
    devices = len(local_positions(mesh))
    if devices and shape[0] % devices:
        below = shape[0] // devices * devices
        nearest = f"{below} and {below + devices}" if below else f"{devices}"
        raise ValueError(
            f"{_at(tree, number)} has a local batch of {shape[0]} rows, and this process has "
            f"{devices} devices of the mesh {dict(mesh.shape)}, which do not divide it; nearest "
            f"{'are' if below else 'is'} {nearest}"
        )


def _scalar_error(tree: Any, number: int) -> ValueError:
    return ValueError(
        f"{_at(tree, number)} is a scalar, and DataPartitionType.FULL cuts dimension 0, which it "
        "does not have; use DataPartitionType.REPLICATED, or a tree of specs with PartitionSpec() "
        "for the scalars"
    )


def _live(leaf: Any) -> jax.Array:
    array = leaf.__jax_array__() if is_container(leaf) else leaf
    if not isinstance(array, jax.Array) or is_tracer(array):
        kind = "traced array" if is_tracer(array) else type(array).__name__
        raise TypeError(f"expected a GlobalArray or a jax.Array, not a {kind}")
    return array


class _Batch:
    """What this process has of the leaves of a tree, and what is wrong with it."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._first: tuple[int, int, Sequence[slice]] | None = None

    def check_same_rows(self, number: int, array: jax.Array) -> None:
        """Raise ``ValueError`` if an array has another batch or other rows than the first."""
        size, rows = array.shape[0], _rows(array)
        if self._first is None:
            self._first = number, size, rows
            return
        first, first_size, first_rows = self._first
        before, now = _at(self._tree, first), _at(self._tree, number)
        if size != first_size:
            raise ValueError(
                f"{before} has a batch of {first_size} rows, and {now} one of {size}; all arrays "
                "of a batch have the same"
            )
        if rows != first_rows:
            raise ValueError(
                f"of {before} this process has the rows {_rows_text(first_rows)}, and of {now} the "
                f"rows {_rows_text(rows)}; cut dimension 0 of both over the same mesh axes, for "
                "instance with GlobalArray.reshard"
            )

    def check_whole_rows(self, number: int, array: jax.Array) -> None:
        """Raise ``ValueError`` if this process has only parts of the rows of an array."""
        if not array.ndim:
            raise _scalar_error(self._tree, number)
        if (local := self._local_shape(number, array))[1:] != array.shape[1:]:
            raise ValueError(
                f"{_at(self._tree, number)} has the shape {array.shape}, and this process has only "
                f"parts of its rows, {local} in all; pass its PartitionSpec as partition= for "
                "those parts, or cut it along dimension 0 with GlobalArray.reshard"
            )

    def check_whole(self, number: int, array: jax.Array) -> None:
        """Raise ``ValueError`` if this process does not have all of an array."""
        if (local := self._local_shape(number, array)) != array.shape:
            raise ValueError(
                f"{_at(self._tree, number)} has the shape {array.shape}, and of that this process "
                f"has {local}; with DataPartitionType.REPLICATED it must have all. Use "
                "DataPartitionType.FULL for its rows, or GlobalArray.gather for the whole"
            )

    def check_cut(self, number: int, array: jax.Array, spec: PartitionSpec) -> None:
        """Raise ``ValueError`` if this process has other blocks than those of a spec."""
        if array.is_fully_addressable:
            return
        sharding = sharding_of(array)
        try:
            wanted = NamedSharding(sharding.mesh, spec)
            is_so = sharding.is_equivalent_to(wanted, array.ndim)
        except ValueError as error:
            note_path(error, self._tree, number)
            raise
        if not is_so:
            raise ValueError(
                f"{_at(self._tree, number)} is cut by {sharding.spec}, and partition says {spec}; "
                "pass the spec that it has, or move it there first with GlobalArray.reshard"
            )

    def _local_shape(self, number: int, array: jax.Array) -> Shape:
        if array.is_fully_addressable:
            return array.shape
        sharding: Any = sharding_of(array)
        try:
            return view_of(array.shape, sharding.mesh, sharding.spec).local_shape
        except ValueError as error:
            note_path(error, self._tree, number)
            raise


def _rows(array: jax.Array) -> Sequence[slice]:
    if array.is_fully_addressable:
        return (slice(0, array.shape[0]),)
    sharding: Any = sharding_of(array)
    return view_of(array.shape, sharding.mesh, sharding.spec).rows


def _rows_text(rows: Sequence[slice]) -> str:
    return " and ".join(f"{r.start}:{r.stop}" for r in rows[:8]) + " ..." * (len(rows) > 8)
