"""The restore of a tree: its leaves are matched with the checkpoint, then read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh, Sharding

from gda.checkpoint.format.manifest import Manifest
from gda.checkpoint.reading.fingerprints import check_fingerprints, check_provable
from gda.checkpoint.reading.manifest_at import read_complete
from gda.checkpoint.reading.read_once import NAME, layout_to_share, processes_together
from gda.checkpoint.reading.reader import read_arrays
from gda.layout.boundary import public, set_module
from gda.mesh import MeshLike
from gda.multihost.agreement import check_same_call, communicates, timeout_of_calls
from gda.storage.options import Options, ProgressLike
from gda.storage.stores import checksums
from gda.storage.stores.opening import open_store
from gda.trees.records.restored_leaves import RestoredLeaf, layout_of, leaves_like, leaves_of
from gda.trees.records.structure import checked_path, subtree, unflatten
from gda.trees.to_jax import check_not_padding, to_jax

MAX_BYTES = 128 * 2**20


def _layouts_of(given: dict[str, Any]) -> Any:
    """Return a tree for ``communicates``."""
    if given["check_fingerprint"]:
        return ()
    return [given["mesh"], given["like"]] if given["read_once"] else None


@set_module("gda.checkpoint")
@public
@communicates(NAME, _layouts_of)
def restore(
    path: Any,
    like: Any = None,
    *,
    mesh: MeshLike | Any = None,
    specs: Any = None,
    at: Iterable[str | int] = (),
    partial: bool = False,
    missing: Literal["error", "keep"] = "error",
    cast: bool = False,
    pad: bool = False,
    plain: bool = False,
    check_fingerprint: bool = False,
    read_once: bool = False,
    max_workers: int | None = None,
    max_bytes: int = MAX_BYTES,
    timeout: float = 600,
    progress: ProgressLike = False,
) -> Any:
    """Restore a tree, onto any mesh, with any specs, in any number of processes.

    Each process reads the blocks of its devices. Communicates only with ``check_fingerprint`` and
    with ``read_once``.

    Args:
      path: as for ``save``.
      like: the tree to restore. ``GlobalArray``s, ``PaddedArray``s, ``jax.Array``s and
        ``ShapeDtypeStruct``s with a sharding give shape, dtype and layout; their data is not
        needed. Each leaf comes back as its example is, so that a jitted step is not traced again:
        with its weak type and kind of memory, committed or not. A ``ShapeDtypeStruct`` gives a
        ``jax.Array``. An array of one number becomes a Python number where ``like`` has one, and a
        Python number an array. Named tuples and dataclasses come back as such only with ``like``.
      mesh, specs: make every array a ``GlobalArray`` over the mesh, also one saved as NumPy, unless
        JAX does not have its dtype, as float64 without x64: that stays a NumPy array.
        ``specs`` is a ``PartitionSpec`` for all, a tree of them that is a prefix of the saved tree,
        or a function ``(path, leaf)`` that returns one; a path is such as ``'params/layers/0'``,
        and a leaf is a ``jax.ShapeDtypeStruct``, with ``shape``, ``dtype``, ``ndim`` and ``size``.
        A ``NamedSharding``, or a tree of them, can replace both; pass it as ``mesh``. With
        ``like``, they override its layouts only. Without any of the three every array becomes a
        NumPy array, whole, whatever it was saved from. NumPy numbers come back as such.
        PRNG keys come back as keys, in a container if they were saved in one.
      at: restore only the subtree at this path, such as ``['params']``; ``like`` and ``specs`` are
        for that subtree.
      partial: omit leaves that ``like`` does not have.
      missing: ``"keep"`` returns the leaf of ``like`` itself where the checkpoint has none, for a
        model that has grown by a layer. By default, a missing leaf is an error.
      cast: convert arrays and numbers to the dtypes of ``like``. A value that the new dtype cannot
        hold is an error, as in ``gda.load_tree``.
      pad: return a ``PaddedArray``, padded with 0, where the mesh does not divide the shape of an
        array. The other arrays are as without it. A ``PaddedArray`` in ``like`` needs no ``pad``.
      plain: return ``jax.Array``s in place of ``GlobalArray``s, those of ``like`` too.
      check_fingerprint: compute the fingerprint of every restored array, and compare it with the
        recorded one. Communicates.
      read_once: ``True`` reads a chunk that several processes need in one of them only, and sends
        its bytes to the others. Communicates: all processes with devices of the meshes must call
        this, or without a mesh all processes, with the same ``max_bytes``. Arrays on one device are
        read by its process.
      max_workers: number of files read at a time; by default the number of cores, from 2 to 32, and
        32 on an object store.
      max_bytes: bound on host memory beyond the arrays themselves; one chunk is always allowed.
        With ``read_once``, parts of chunks that were read for other processes come on top.
      timeout: seconds to wait for the other processes, and for each answer of an object store, as
        for ``save``.
      progress: ``True`` shows bytes and rate of the reads of this process on stderr, which needs
        the extra ``progress``; or a function ``(nbytes_done, nbytes_total)``.

    Returns:
      the tree.

    Raises:
      CheckpointNotFoundError: there is no complete checkpoint; it is a ``FileNotFoundError``.
      CorruptionError: a file is damaged or missing; the message names array, chunk and file.
      ValueError: the checkpoint does not fit ``like`` or ``specs``, or ``plain`` is given with
        ``pad`` or a ``PaddedArray`` in ``like``; nothing was read.
      TypeError: a dtype differs, or a leaf is of another kind.
      DoesNotFitError: with ``cast``, a value does not fit its new dtype.
      KeyError: there is nothing at ``at``.
      ImportError: google-crc32c is not installed, or rich for ``progress=True``.
      RuntimeError: the checkpoint was replaced ten times while it was read; with several
        processes, once, because they could read different checkpoints.
      OSError: reading failed for another reason; the message names the file.
      DisagreementError, LateProcessError: with ``check_fingerprint`` or ``read_once``, another
        process failed, did not arrive in time, or restores something else.

    >>> import gda, jax, numpy as np, tempfile
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> w = gda.GlobalArray.from_callback((8, 2), mesh, P('x'), lambda i: np.ones((2, 2)))
    >>> folder = tempfile.TemporaryDirectory()
    >>> gda.checkpoint.save(folder.name, {'w': w, 'step': 3})
    >>> tree = gda.checkpoint.restore(folder.name, mesh=mesh, specs={'w': P(None, 'y')})
    >>> tree['w']
    GlobalArray(shape=(8, 2), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P(None, 'y'))
    >>> tree['step']
    3
    >>> folder.cleanup()
    """
    checksums.require_crc32c()
    options = Options(max_workers, max_bytes, progress, read_once=read_once)
    where = checked_path(at)
    if isinstance(like, Mesh | Sharding):
        raise TypeError(f"like is the layout {like!r:.80}, and no tree; pass mesh= and specs=")
    if missing not in ("error", "keep"):
        raise ValueError(f"missing must be 'error' or 'keep', not {missing!r}")
    keeps_missing = missing == "keep"
    if like is None and (cast or partial or keeps_missing):
        raise TypeError("cast, partial and missing are for like; pass like= too")
    if (pad or plain) and like is None and mesh is None:
        given = "pad" if pad else "plain"
        raise TypeError(f"{given} was given without a mesh; pass mesh= and specs=, or like=")
    check_not_padding(plain, pad)
    like = to_jax(like) if plain else like
    store = open_store(path, timeout)

    def found(manifest: Manifest) -> _Found:
        subtree(manifest.structure, where)
        layout = layout_of(mesh, specs, manifest, where)
        if like is not None:
            leaves, definition = leaves_like(
                manifest, like, where, partial, cast, layout, pad, keeps_missing
            )
        else:
            leaves, definition = leaves_of(manifest, where, layout, pad), None
        wanted = [leaf for leaf in leaves if isinstance(leaf, RestoredLeaf)]
        if check_fingerprint:
            check_provable(store.url, wanted)
        together = processes_together(wanted) if read_once else ()
        return _Found(leaves, definition, wanted, together)

    def check_same(manifest: Manifest, found: _Found) -> None:
        layouts = {
            "/".join(map(str, each.saved.path)): layout_to_share(each) for each in found.wanted
        }
        arguments = {
            "checkpoint": manifest.data,
            "check_fingerprint": check_fingerprint,
            "read_once": read_once,
            "max_bytes": max_bytes if found.together else None,  # decides what is read in one go
        }
        among = None if check_fingerprint else found.together
        check_same_call(NAME, layouts, arguments, among, min(timeout, timeout_of_calls()))

    def read(manifest: Manifest) -> Any:
        leaves, definition, wanted, together = looked_up = found(manifest)
        if check_fingerprint or read_once:
            check_same(manifest, looked_up)
        arrays = read_arrays(store, manifest, wanted, options, together)
        if check_fingerprint:
            check_fingerprints(f"the checkpoint {store.url}", wanted, arrays, timeout=timeout)
        following = iter(arrays)
        values = [next(following) if isinstance(each, RestoredLeaf) else each for each in leaves]
        if definition is not None:
            return jax.tree.unflatten(definition, values)
        tree = unflatten(manifest.structure, values, where)
        return to_jax(tree) if plain else tree

    # Processes do not communicate here: if one began again, it could have a later tree.
    return read_complete(store, read, is_alone=lambda: jax.process_count() == 1)


class _Found(NamedTuple):
    """The leaves of a checkpoint that a restore is to return."""

    leaves: list[RestoredLeaf | Any]  # all, in order; a value that is no array as it is
    definition: Any  # the tree to put them in, if it is not that of the checkpoint
    wanted: list[RestoredLeaf]  # those to be read
    together: tuple[int, ...]  # the processes that read them together
