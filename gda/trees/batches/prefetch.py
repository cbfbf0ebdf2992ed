"""Trees of global arrays from batches, which a thread makes ahead of the training step."""

from __future__ import annotations

import atexit
import copy
import operator
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Self

import jax
from jax.sharding import PartitionSpec

from gda.arrays.construction.from_process_local import (
    BatchBuffers,
    array_from_process_local,
    as_array,
)
from gda.arrays.global_array import GlobalArray
from gda.layout.boundary import public, set_module
from gda.mesh import MeshLike
from gda.trees.leaves import Tree, are_bare_keys, is_container, is_value, with_paths
from gda.trees.matching import SpecOf, makes_plain, mesh_and_spec_of, specs_per_leaf
from gda.trees.plain import to_jax

_SECONDS_AT_EXIT = 5.0


@set_module("gda")
@public
def prefetch(
    iterator: Iterable[Tree],
    mesh: MeshLike | Tree,
    spec: PartitionSpec | SpecOf | Tree = None,
    *,
    size: int = 2,
    plain: bool | None = None,
) -> Prefetched:
    """Return an iterator of the same batches as arrays on devices, made ahead in a thread.

    Each process passes the batches of its own part, as to ``GlobalArray.from_process_local``. They
    are copied, so the iterator may use the memory of a batch again. Numbers and strings of a batch
    stay as they are, and so do weak types and kinds of memory of ``jax.Array``s. Never communicates
    between processes: they must have as many batches, of equal shapes.

    An error of the iterator, or of a batch that cannot be placed, is raised where that batch would
    have come, with a note of its number. The thread ends with the iterator, with ``close()`` or the
    end of a ``with`` block, and when the result is garbage. A context manager of JAX around the
    loop, such as ``jax.transfer_guard``, does not apply in the thread; the value of
    ``jax_enable_x64`` does.

    Args:
      iterator: any iterable of pytrees: of grain, a ``torch.utils.data.DataLoader``, a generator.
        Only the thread takes batches from it.
      mesh: ``jax.sharding.Mesh``. Or, in place of mesh and spec, a ``NamedSharding`` or a tree of
        them that is a prefix of a batch.
      spec: one ``PartitionSpec``, a tree of them that is a prefix of a batch, or a function
        ``(path, leaf)`` as in ``load_tree``; here the leaf has the shape of this process's part.
      size: the most batches that are fetched and not yet handed out, including the one that is
        being made.
      plain: batches of ``jax.Array``s in place of ``GlobalArray``s; by default if shardings are
        given in place of mesh and spec.

    Raises:
      TypeError: ``iterator`` is not an iterable, or mesh and spec are not as above.
      ValueError: ``size`` is less than 1.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('data',))
    >>> batches = ({'tokens': np.full((16, 4), step)} for step in range(3))
    >>> for batch in gda.prefetch(batches, mesh, P('data')):
    ...     print(batch['tokens'].shape, batch['tokens'].max())
    (16, 4) 0
    (16, 4) 1
    (16, 4) 2
    """
    count = operator.index(size)
    if count < 1:
        raise ValueError(f"size is {count}; prefetch at least 1 batch")
    is_plain = makes_plain(plain, mesh, pad=False)
    specs_per_leaf((), mesh, spec, _shaped, "spec")  # raises if they are of another kind
    try:
        source = iter(iterator)
    except TypeError as error:
        raise TypeError(
            f"prefetch takes an iterable of batches, not {type(iterator).__name__}; pass the "
            "loader, or a generator that yields batches"
        ) from error
    place = partial(_placed, mesh=mesh, spec=spec, plain=is_plain)
    return Prefetched(source, place, count)


@set_module("gda")
class Prefetched(Iterator[Any]):
    """The iterator that ``gda.prefetch`` returns, for one thread to use.

    As a context manager it closes itself at the end of the block.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('data',))
    >>> with gda.prefetch([np.zeros(8), np.ones(8)], mesh, P('data')) as batches:
    ...     next(batches)
    GlobalArray(shape=(8,), dtype=float32, mesh={'data': 8}, spec=P('data'))
    """

    def __init__(self, source: Iterator[Any], place: Callable[[Any], Any], size: int) -> None:
        x64: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        self._start = partial(_BatchThread, source, place, size, x64)
        self._source = source
        self._state = _state_of(source)
        self._is_closed = False
        self._thread: _BatchThread | None = self._start()

    def __iter__(self) -> Self:
        return self

    @public
    def __next__(self) -> Any:
        thread = self._thread
        if thread is None:
            raise StopIteration
        made = thread.following()
        if made.error is None:
            self._state = made.state
            return made.batch
        self._thread = None
        raise made.error

    @public
    def get_state(self) -> Any:
        """Return the state of the iterator after the last batch that was handed out.

        It is what ``get_state()`` of the iterator returned at that batch, and does not count what
        was fetched ahead. Before the first batch it is the state at the start.

        Raises:
          TypeError: the iterator has no ``get_state``.
        """
        self._check_has("get_state")
        return copy.deepcopy(self._state)

    @public
    def set_state(self, state: Any) -> None:
        """Continue from a state that ``get_state`` returned, also after the end or an error.

        Batches that were fetched ahead are discarded. Waits for the batch that is being made.

        Raises:
          TypeError: the iterator has no ``set_state``.
          ValueError: this was closed.
          Exception: an error of its ``set_state``; then there are no more batches.
        """
        self._check_has("set_state")
        if self._is_closed:
            raise ValueError("the prefetched batches were closed; call gda.prefetch again")
        if self._thread is not None:
            self._thread.stop()
            self._thread.join()
            self._thread = None
        self._source.set_state(copy.deepcopy(state))  # pyright: ignore[reportAttributeAccessIssue]
        self._state = _state_of(self._source)
        self._thread = self._start()

    @public
    def close(self) -> None:
        """End the thread, and call ``close()`` of the iterator if it has one.

        Waits for the batch that is being made, unless the iterator calls this. There are no more
        batches afterwards.
        """
        thread, self._thread = self._thread, None
        if self._is_closed:
            return
        self._is_closed = True
        if thread is not None:
            is_own = thread is threading.current_thread()  # the iterator, which is running
            thread.stop(closes=is_own)
            if is_own:
                return
            thread.join()
        _close(self._source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is not None:
            thread.stop(closes=True)  # without waiting: any thread may be collecting garbage

    def _check_has(self, method: str) -> None:
        if not hasattr(self._source, method):
            raise TypeError(
                f"the iterator is a {type(self._source).__name__}, which has no {method}(); "
                "prefetch an iterator that has get_state() and set_state(state), such as one of "
                "grain"
            )


_THE_END = object()


class _Made(NamedTuple):
    """A batch and the state of the iterator after it; or the error that came in its place."""

    batch: Any = None
    state: Any = None
    error: BaseException | None = None


class _BatchThread(threading.Thread):
    """A thread that makes batches until the end; it must not refer to the ``Prefetched``."""

    def __init__(
        self, source: Iterator[Any], place: Callable[[Any], Any], size: int, x64: bool
    ) -> None:
        super().__init__(daemon=True, name="gda-prefetch")
        self._source, self._place, self._x64 = source, place, x64
        self._made: queue.SimpleQueue[_Made] = queue.SimpleQueue()
        # An item for each batch that may be made. No Semaphore: ``stop`` is called while garbage is
        # collected, perhaps in the middle of another call of it.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(size):
            self._room.put(None)
        self._is_over = self._closes = False
        _running.add(self)
        self.start()

    # In the caller's thread.

    def following(self) -> _Made:
        """Return the next batch, or the error in its place, when it is there."""
        made = self._made.get()
        self._room.put(None)
        return made

    def stop(self, *, closes: bool = False) -> None:
        """Let the thread end after the batch that it is making; ``closes`` the iterator there."""
        self._closes = self._closes or closes
        self._is_over = True
        self._room.put(None)

    # In its own thread.

    def run(self) -> None:
        with jax.enable_x64(self._x64):
            last = self._make_all()
            if self._closes:
                _close(self._source)
        self._made.put(last)

    def _make_all(self) -> _Made:
        """Make batches as long as there is room; return the error that ended it."""
        number = 0
        try:
            while True:
                self._room.get()
                host = _THE_END if self._is_over else next(self._source, _THE_END)
                if host is _THE_END:
                    return _Made(error=StopIteration())
                batch = self._place(host)
                self._made.put(_Made(batch, _state_of(self._source)))
                del host, batch
                number += 1
        except BaseException as error:
            if isinstance(error, StopIteration):  # which would end the loop of the user in silence
                error = RuntimeError("a leaf of a batch raised StopIteration")
            error.add_note(f"gda: in batch {number} of prefetch, counted from 0")
            return _Made(error=error)


def _state_of(source: Any) -> Any:
    """Return the state of an iterator, which may change it later; ``None`` if it has none."""
    return copy.deepcopy(source.get_state()) if hasattr(source, "get_state") else None


def _close(source: Any) -> None:
    if hasattr(source, "close"):
        source.close()


# A thread that uses JAX while the interpreter takes it apart may crash.
_running: weakref.WeakSet[_BatchThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + _SECONDS_AT_EXIT
    threads = list(_running)
    for thread in threads:
        thread.stop(closes=True)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


# One batch.


def _placed(tree: Any, *, mesh: Any, spec: Any, plain: bool) -> Any:
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_container)
    layouts = specs_per_leaf(tree, mesh, spec, _shaped, "spec").of_each_leaf()

    with BatchBuffers(len(leaves)) as batch:

        def placed(leaf: Any, found: Any) -> Any:
            if is_value(leaf):
                return leaf
            over = mesh_and_spec_of(mesh, found, leaf)
            array = array_from_process_local(leaf, *over, batch=batch)
            return array if are_bare_keys(leaf) else GlobalArray.from_array(array)

        made = jax.tree.unflatten(structure, with_paths(tree, placed, leaves, layouts))
    return to_jax(made) if plain else made


def _shaped(leaf: Any) -> jax.ShapeDtypeStruct:
    array = as_array(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
