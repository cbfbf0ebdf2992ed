"""A source that counts what is read of it."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class Counting:
    """A source that counts how often each element is read, and where; its chunks are read whole."""

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

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest read."""
        return max(self.data[index].nbytes for index in self.asked)
