"""Arrays that need no memory: ``gda.abstract``."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
from jax.dtypes import canonicalize_dtype
from jax.sharding import PartitionSpec

from gda.arrays.dtypes import is_weak
from gda.arrays.padded_array import PaddedArray
from gda.checkpoint.step_folders.folder import path_of
from gda.checkpoint.tree_at import open_tree
from gda.layout.boundary import public, set_module
from gda.mesh import MESHES, MeshLike, mesh_and_spec, mesh_grid, named_sharding
from gda.storage.sources import Unreadable
from gda.trees.leaves import Tree, as_dicts, is_container, with_paths
from gda.trees.matching import SpecOf, mesh_and_spec_of, specs_per_leaf
from gda.trees.per_process import PerProcess

_SECONDS = 600  # for each answer of an object store, as in gda.checkpoint.open
_STAYS = (str, bytes, PerProcess, Unreadable)  # no arrays, but leaves of a checkpoint


@set_module("gda")
@public
def abstract(
    tree: Tree, mesh: MeshLike | Tree, specs: PartitionSpec | SpecOf | Tree = None
) -> Tree:
    """Return the arrays of a tree as ``jax.ShapeDtypeStruct``s with shardings.

    They need no memory and no device, and stand for arrays where nothing is run.

    Args:
      tree: a pytree of arrays, ``GlobalArray``s, ``PaddedArray``s, ``jax.ShapeDtypeStruct``s,
        NumPy arrays, numbers and sources; also that of a checkpoint, ``gda.checkpoint.open(path)``,
        whose arrays have no weak types, or of files, ``gda.storage.open_safetensors(path)``. Or the
        path of a checkpoint, of a step of a run such as ``'runs/a@latest'``, of safetensors files
        or of an Orbax run. No data of arrays is read.
      mesh: ``jax.sharding.Mesh`` of all arrays, such as that of ``gda.rehearsal_mesh``, or an
        ``AbstractMesh``, for layouts without devices. Or, in place of mesh and specs, a
        ``NamedSharding`` or a tree of them that is a prefix of ``tree``. JAX drops ``memory_kind=``
        of a sharding over GPUs that are not here; one over ``mesh.abstract_mesh`` keeps it.
      specs: one ``PartitionSpec``, a tree of them that is a prefix of ``tree``, or a function
        ``(path, leaf)`` that returns one. A path is such as ``'layers/0/weight'``. Numbers need
        none, and are replicated.

    Returns:
      the same tree with a ``jax.ShapeDtypeStruct`` for each array and number, of its weak type and
        kind of memory. A ``GlobalArray`` or ``PaddedArray`` stays one, with a
        ``jax.ShapeDtypeStruct`` inside; a ``PaddedArray`` is padded for the new mesh. Mappings of
        sources become dicts. Strings and values of each process stay.

    Raises:
      TypeError, ValueError: ``specs`` is no prefix of ``tree``, a leaf is no array, or a spec does
        not fit its array; with a note of the path.
      CheckpointNotFoundError, CorruptionError, OSError: as ``gda.checkpoint.open``, for a path.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('data', 'model'))
    >>> tree = {'w': np.zeros((16, 8), np.float32), 'b': np.zeros(8, np.float32)}
    >>> placed = gda.abstract(tree, mesh, {'w': P('data', 'model'), 'b': P()})
    >>> placed['w'].shape, tuple(placed['w'].sharding.spec)
    ((16, 8), ('data', 'model'))
    """
    if isinstance(tree, str | os.PathLike):
        tree = open_tree(path_of(tree, _SECONDS), _SECONDS).tree
    tree = as_dicts(tree)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_container)
    layouts = specs_per_leaf(tree, mesh, specs, _shaped).of_each_leaf()
    return jax.tree.unflatten(structure, with_paths(tree, partial(_placed, mesh), leaves, layouts))


def _shaped(leaf: Any) -> jax.ShapeDtypeStruct | None:
    """Return shape and dtype of the elements of a leaf; None for a leaf that stays."""
    if isinstance(leaf, _STAYS):
        return None
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        dtype = canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=is_weak(leaf))
    if not isinstance(leaf, bool | int | float | complex):
        kind = type(leaf).__name__
        raise TypeError(f"{leaf!r:.80} is a {kind} and no array; a leaf is an array or a number")
    typed = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(typed.shape, typed.dtype, weak_type=True)


def _placed(mesh: Any, leaf: Any, found: Any) -> Any:
    if (shaped := _shaped(leaf)) is None:
        return leaf
    found = PartitionSpec() if found is None else found  # of a number, which needs no spec
    over = mesh_and_spec(*mesh_and_spec_of(mesh, found, leaf), MESHES)
    grid = mesh_grid(shaped.shape, over.mesh, over.spec, pad=isinstance(leaf, PaddedArray))
    sharding = named_sharding(shaped.shape, over.mesh, over.spec, over.memory_kind)
    array = jax.ShapeDtypeStruct(
        grid.padded_shape, shaped.dtype, sharding=sharding, weak_type=shaped.weak_type
    )
    return leaf._with_array(array) if is_container(leaf) else array
