"""Trees of sources to trees of arrays; the blocks of all leaves are read together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec

from gda.arrays.construction.pending import PendingArray, pending_array_of_source
from gda.arrays.construction.reading import read_all
from gda.arrays.construction.reading_by_rows import RowsKind, TensorByRows
from gda.arrays.construction.reading_once import read_builds, reads_wanted
from gda.arrays.dtypes import dtype_in_tree, dtype_of_floats, narrowed_dtype
from gda.arrays.global_array import GlobalArray
from gda.arrays.padded_array import PaddedArray
from gda.layout.boundary import set_module
from gda.layout.dtype_names import as_dtype, is_raw
from gda.mesh import MeshLike, mesh_of_all
from gda.multihost.agreement import communicates, if_checked, together
from gda.multihost.descriptions import Description, describe, leaf_path, note_path
from gda.storage.options import Options, ProgressLike, Retry
from gda.storage.safetensors import SafetensorsTensor
from gda.storage.sources import source_of
from gda.trees.leaves import (
    Keys,
    Tree,
    are_bare_keys,
    are_keys,
    as_dicts,
    is_container,
    is_value,
    names_of,
    opened,
)
from gda.trees.matching import (
    EntryKind,
    SpecOf,
    makes_plain,
    mesh_and_spec_of,
    mesh_named_by,
    prefix_of,
    specs_per_leaf,
)

_DTYPES = EntryKind("dtype", (NoneType, str, type, np.dtype), "'float32'")


@set_module("gda")
@communicates("gda.load_tree", if_checked(option="read_once"))
def load_tree(
    sources: Tree,
    mesh: MeshLike | Tree,
    specs: PartitionSpec | SpecOf | Tree = None,
    *,
    dtype: npt.DTypeLike | Tree = None,
    pad: bool = False,
    plain: bool | None = None,
    read_once: bool = False,
    max_workers: int | None = None,
    max_bytes: int | None = None,
    progress: ProgressLike = False,
    retry: Retry | None = None,
) -> Tree:
    """Build an array from every source in a tree.

    The blocks that this process needs are read together, each once, with one set of workers and
    one budget, so that the reads of small arrays overlap too. Nothing is read before all specs and
    shapes are checked. It communicates with ``read_once``. Without, processes only check that they
    agree, once for the whole tree, inside ``with gda.checking_agreement()``.

    Args:
      sources: a pytree of sources of ``GlobalArray.from_source``. A mapping that JAX does not know,
        such as ``h5py.Group`` or the result of ``gda.storage.open_safetensors``, is taken too, also
        inside a tree. Numbers and strings stay as they are. A ``jax.Array`` stays of its weak type
        and in its kind of memory, unless a sharding names another, and one of PRNG keys comes back
        as one.
      mesh: ``jax.sharding.Mesh``, of all arrays. Or, in place of mesh and specs, a
        ``NamedSharding`` or a tree of them that is a prefix of ``sources``.
      specs: one ``PartitionSpec``, a tree of them that is a prefix of ``sources``, or a function
        ``(path, leaf)`` that returns one. A path is such as ``'layers/0/weight'``. A leaf is a
        ``jax.ShapeDtypeStruct``, with ``shape``, ``dtype``, ``ndim`` and ``size``.
      dtype: cast arrays of floats to it, and those of complex numbers to its precision; integers,
        booleans and keys stay. Or a tree of dtypes that is a prefix of ``sources``, with ``None``
        for no cast: a dtype at the place of a source is for that source, also one of integers. A
        value that the dtype cannot hold, as a finite one that would become infinite, is an error.
      pad: return a ``PaddedArray``, padded with 0, where the mesh does not divide the shape. The
        other arrays stay ``GlobalArray``s, which cost less in a jitted call.
      plain: return ``jax.Array``s in place of ``GlobalArray``s. By default, shardings in place of
        mesh and specs make ``jax.Array``s, and a mesh with specs makes containers.
      read_once: as in ``GlobalArray.from_source``, for the whole tree.
      max_workers, max_bytes, progress, retry: as in ``GlobalArray.from_source``, for the whole
        tree.

    Returns:
      the same tree of ``GlobalArray``s or ``jax.Array``s, with ``pad`` also of ``PaddedArray``s,
        with dicts for mappings that JAX does not know.

    Raises:
      TypeError, ValueError, DoesNotFitError, ImportError: as ``GlobalArray.from_source``, with a
        note of the path; also if ``specs``, ``dtype`` or the tree of shardings is no prefix of
        ``sources``, or ``plain`` is given with ``pad``.
      Exception: any other error of a source, with a note of index and path, or of the function
        ``specs``, with a note of the path.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> sources = {'w': np.zeros((8, 2), np.float32), 'b': np.zeros(2, np.float32)}
    >>> gda.load_tree(sources, mesh, {'w': P('x', 'y'), 'b': P()})['w']
    GlobalArray(shape=(8, 2), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P('x', 'y'))
    >>> gda.load_tree(sources, jax.sharding.NamedSharding(mesh, P('y')))['b']
    Array([0., 0.], dtype=float32)
    >>> gda.load_tree(sources, mesh, P('x'), pad=True)['b']
    PaddedArray(shape=(2,), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P('x'))
    """
    is_plain = makes_plain(plain, mesh, pad)
    options = Options(max_workers, max_bytes, progress, retry, read_once)
    tree = as_dicts(opened(sources) if is_plain else sources)
    loading = _LoadingTree(tree, mesh, specs, dtype, pad, is_plain, options)
    return together(
        "gda.load_tree",
        mesh_named_by(mesh) or mesh_of_all(jax.devices()),
        loading.read,
        prepare=loading.prepare,
        request=loading.described,
        communicates=read_once,
    )


class _RequestedLeaf(NamedTuple):
    """A source, and what the user asked for it."""

    keys: Keys
    source: Any
    layout: Any
    dtype: Any
    is_named: bool  # the dtype is at the very place of the source

    @property
    def alike(self) -> tuple[Any, ...] | None:
        """The key of tensors of files that are read alike; ``None`` for other sources."""
        if not isinstance(self.source, SafetensorsTensor):
            return None
        return self.source.shape, self.source.dtype, *self[2:]


class _LoadedLeaf(NamedTuple):
    """A source, and its pending array."""

    source: Any
    build: PendingArray | TensorByRows

    def contained(self, array: Any, is_plain: bool) -> Any:
        """Return the result for the source, around its array or around shape and dtype."""
        grid = self.build.plan.grid
        if grid.is_padded:
            return PaddedArray(array, grid.global_shape[: array.ndim])
        return array if is_plain or are_bare_keys(self.source) else GlobalArray._from_leaf(array)


_Leaves = list[Any]  # a _LoadedLeaf for each source; other leaves as they are


@dataclass(frozen=True)
class _LoadingTree:
    """A call of ``load_tree``, whose methods are its steps in their order."""

    tree: Any
    mesh: Any
    specs: Any
    dtype: Any
    pad: bool
    is_plain: bool
    options: Options

    def prepare(self) -> _Leaves:
        """Check the request; read nothing."""
        found = specs_per_leaf(self.tree, self.mesh, self.specs, _shaped)
        dtypes = zip(found.pairs, found.of_each_leaf(), self._dtypes(), strict=True)
        requests = [
            _RequestedLeaf(pair.keys, pair.leaf, layout, *dtype) for pair, layout, dtype in dtypes
        ]
        leaves, kinds = [], {}
        for request in requests:
            try:
                leaves.append(self._leaf(request, kinds))
            except Exception as error:
                note_path(error, leaf_path(request.keys))
                raise
        return leaves

    def _leaf(self, request: _RequestedLeaf, kinds: dict[Any, RowsKind]) -> Any:
        """Return a leaf; ``kinds`` has those of tensors before, by ``alike``."""
        keys, source, layout, dtype, is_named = request
        if is_value(source):
            return source
        alike = None if self.options.read_once else request.alike
        if (kind := kinds.get(alike)) is not None:
            return _LoadedLeaf(source, TensorByRows(kind, source, keys))
        if not is_named:
            dtype = _dtype_of_floats(source, dtype)
        over = mesh_and_spec_of(self.mesh, layout, source)
        build = pending_array_of_source(source, *over, dtype, self.options, keys, pad=self.pad)
        if alike is not None and (kind := RowsKind.of(build, self.options)):
            kinds[alike] = kind
            build = TensorByRows(kind, source, keys)
        return _LoadedLeaf(source, build)

    def _dtypes(self) -> list[tuple[Any, bool]]:
        """Return the dtype for each leaf, and True if it is at the very place of the leaf."""
        dtypes = opened(self.dtype)
        given = jax.tree_util.tree_flatten_with_path(dtypes, is_leaf=_DTYPES.has)[0]
        for path, dtype in given:
            if dtype is not None:
                name = f"{leaf_path(path, 'dtype')}="
                narrowed_dtype(as_dtype(dtype, name), f"the argument is {name}")
        prefix = prefix_of(self.tree, dtypes, "dtype", _DTYPES)
        named = {tuple(names_of(path)) for path, _ in given}
        return [
            (dtype, dtype is not None and tuple(names_of(pair.keys)) in named)
            for pair, dtype in zip(prefix.pairs, prefix.of_each_leaf(), strict=True)
        ]

    def described(self, leaves: _Leaves) -> Description:
        """Return what must be the same in all processes."""
        description = describe(self._tree_of(leaves, lambda build: build.wanted()))
        if self.options.read_once:
            description |= reads_wanted(_builds_of(leaves), self.options)
        return description

    def read(self, leaves: _Leaves) -> Any:
        """Read the blocks of all sources, and return the tree of arrays."""
        read = read_builds if self.options.read_once else read_all
        read(_builds_of(leaves), self.options, "load_tree")
        return self._tree_of(leaves, lambda build: build.array())

    def _tree_of(self, leaves: _Leaves, make: Callable[[PendingArray | TensorByRows], Any]) -> Any:
        """Return the tree with ``make(pending)`` for each pending array, contained."""
        made = [
            leaf.contained(make(leaf.build), self.is_plain)
            if isinstance(leaf, _LoadedLeaf)
            else leaf
            for leaf in leaves
        ]
        return jax.tree.unflatten(jax.tree.structure(self.tree, is_leaf=is_container), made)


def _builds_of(leaves: _Leaves) -> list[Any]:
    return [leaf.build for leaf in leaves if isinstance(leaf, _LoadedLeaf)]


def _shaped(source: Any) -> jax.ShapeDtypeStruct:
    if are_keys(source):
        return jax.ShapeDtypeStruct(source.shape, source.dtype)
    known = source_of(source)
    return jax.ShapeDtypeStruct(known.shape, known.dtype.newbyteorder("="))


def _dtype_of_floats(source: Any, dtype: Any) -> Any:
    """Return the dtype to cast a source to, as one of those under ``dtype``; None for no cast."""
    if dtype is None or are_keys(source):
        return None
    given = source_of(source).dtype
    if is_raw(given) or given.hasobject:  # no cast: it names the type of the elements
        return dtype
    wanted = dtype_in_tree(given, dtype_of_floats(dtype))
    return None if wanted == given else wanted
