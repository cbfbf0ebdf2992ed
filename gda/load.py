"""Trees of sources to trees of arrays, whose blocks are all read in one go."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import keystr

from gda.agreement import describe, together
from gda.array import GlobalArray
from gda.blocks import narrowed_dtype
from gda.build import Build, build_of_source, read_all
from gda.reading import Options, ProgressLike, Retry
from gda.sources import is_group, source_of
from gda.trees import SpecOf, is_container, note_path, spec_by, specs_for


def load_tree(
    sources: Any,
    mesh: Mesh,
    specs: PartitionSpec | SpecOf | Any,
    *,
    dtype: npt.DTypeLike | Any = None,
    max_workers: int | None = None,
    max_bytes: int | None = None,
    progress: ProgressLike = False,
    retry: Retry | None = None,
) -> Any:
    """Build a ``GlobalArray`` of every source in a tree.

    All blocks of all arrays that this process needs are read in one go, each once, with one set of
    workers and one budget, so that the reads of small arrays overlap too. Nothing is read before
    the specs and shapes of all have been checked. Communicates between processes only to check that
    they agree, once for the whole tree, and only where ``gda.checking_agreement`` is on.

    Args:
      sources: a pytree of what ``GlobalArray.from_source`` takes; also a mapping that JAX does not
        know, such as ``zarr.Group``, ``h5py.Group`` or what ``gda.storage.open_safetensors``
        returns, or a tree with some in it.
      mesh: ``jax.sharding.Mesh``, of all arrays.
      specs: one ``PartitionSpec``, a tree of them that is a prefix of ``sources``, or a function
        ``(path, leaf)`` that returns one; a path is such as ``'layers/0/weight'``, and a leaf is a
        ``jax.ShapeDtypeStruct``, which has ``shape``, ``dtype``, ``ndim`` and ``size``.
      dtype: cast to it; one for all or a tree of them that is a prefix of ``sources``, with
        ``None`` for what is not cast.
      max_workers, max_bytes, progress, retry: as in ``GlobalArray.from_callback``, for the whole
        tree.

    Returns:
      the same tree of ``GlobalArray``s; of a mapping a dict.

    Raises:
      TypeError, ValueError, DoesNotFitError, ImportError: as ``GlobalArray.from_source`` does, with
        a note of the path; ``specs`` or ``dtype`` is no prefix of ``sources``, or the function
        ``specs`` ends with ``StopIteration``.
      Exception: what a source raises, with a note of the index and the path, or the function
        ``specs``, with one of the path.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> sources = {'w': np.zeros((8, 2), np.float32), 'b': np.zeros(2, np.float32)}
    >>> gda.load_tree(sources, mesh, {'w': P('x', 'y'), 'b': P()})['w']
    GlobalArray(shape=(8, 2), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P('x', 'y'))
    """
    options = Options(max_workers, max_bytes, progress, retry)
    tree = _as_dicts(sources)

    @cache  # the builds that the processes agree on are those that are read
    def prepared() -> tuple[list[Build], Any]:
        return _builds_of(tree, mesh, specs, dtype, options)

    def wanted() -> Any:
        builds, structure = prepared()
        return jax.tree.unflatten(structure, [build.wanted() for build in builds])

    def work() -> Any:
        builds, structure = prepared()
        read_all(builds, options, "load_tree")
        arrays = [GlobalArray(array=build.array()) for build in builds]
        return jax.tree.unflatten(structure, arrays)

    return together("gda.load_tree", mesh, work, describe, wanted=lambda: describe(wanted()))


def _builds_of(
    tree: Any, mesh: Mesh, specs: Any, dtype: Any, options: Options
) -> tuple[list[Build], Any]:
    """Return how the array of each leaf is built, and the tree's structure; read nothing."""
    if callable(specs):
        function: Any = specs
        specs = _specs_by(function, tree)
    pairs, structure = specs_for(tree, specs, "specs")
    _check_dtypes(dtype)
    dtypes = specs_for(tree, dtype, "dtype", _is_dtype)[0]
    builds = []
    for number, ((source, spec), (_, wanted)) in enumerate(zip(pairs, dtypes, strict=True)):
        note = partial(note_path, tree=tree, number=number)
        try:
            builds.append(build_of_source(source, mesh, spec, wanted, options, note))
        except Exception as error:
            note(error)
            raise
    return builds, structure


def _as_dicts(tree: Any) -> Any:
    """Return a tree with dicts for the mappings in it that are no pytrees, as of open files."""

    def opened(node: Any) -> Any:
        return {name: _as_dicts(node[name]) for name in node} if is_group(node) else node

    return jax.tree.map(opened, tree, is_leaf=is_container)


def _specs_by(function: SpecOf, tree: Any) -> Any:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_container)
    specs = []
    for path, source in leaves:
        try:
            known = source_of(source)
            leaf = jax.ShapeDtypeStruct(known.shape, known.dtype.newbyteorder("="))
            specs.append(spec_by(function, keystr(path, simple=True, separator="/"), leaf))
        except Exception as error:
            note_path(error, tree, len(specs))
            raise
    return jax.tree.unflatten(structure, specs)


def _check_dtypes(dtypes: Any) -> None:
    """Raise ``TypeError`` unless all leaves are dtypes that JAX has, or ``None``."""
    for path, dtype in jax.tree_util.tree_flatten_with_path(dtypes, is_leaf=_is_dtype)[0]:
        if dtype is None:
            continue
        name = f"dtype{keystr(path)}"
        try:
            known = np.dtype(dtype) if _is_dtype(dtype) else None
        except TypeError:
            known = None
        if known is None:
            raise TypeError(
                f"{name} is {dtype!r}, not a dtype; a dtype is such as 'float32', np.int32 or "
                "jnp.bfloat16"
            )
        narrowed_dtype(known, f"{name} is ")


def _is_dtype(node: object) -> bool:
    return node is None or isinstance(node, str | type | np.dtype)
