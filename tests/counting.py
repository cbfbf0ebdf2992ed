"""A source that counts what is read of it, and a target that counts what is written to it."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class Counting:
    """A source or target that counts how often each element is read or written, and where.

    The chunks of a source are read whole. ``before`` is called with each index before its block.
    """

    def __init__(self, data: np.ndarray, chunks: Any = None) -> None:
        self.data, self.shape, self.dtype = data, data.shape, data.dtype
        if chunks is not None:
            self.chunks = chunks
        self.counts = np.zeros(data.shape, int)
        self.asked: list[Any] = []
        self.threads: set[str] = set()
        self.before: Callable[[Any], object] = lambda index: None
        self._guard = threading.Lock()

    def __getitem__(self, index: Any) -> np.ndarray:
        assert all(isinstance(each, slice) and each.step is None for each in index)
        self.before(index)
        chunks = getattr(self, "chunks", (1,) * len(self.shape))
        whole = [
            slice(s.start // step * step, -(-s.stop // step) * step)
            for s, step in zip(index, chunks, strict=True)
        ]
        with self._guard:
            self.asked.append(index)
            self.threads.add(threading.current_thread().name)
            self.counts[tuple(whole)] += 1
        return self.data[index]

    def __setitem__(self, index: Any, value: np.ndarray) -> None:
        self.before(index)
        assert isinstance(value, np.ndarray)
        assert (value.shape, value.dtype) == (self.data[index].shape, self.dtype)
        with self._guard:
            self.asked.append(index)
            self.threads.add(threading.current_thread().name)
            self.counts[index] += 1
            self.data[index] = value

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest read."""
        return max(self.data[index].nbytes for index in self.asked)
