"""A key-value store of TensorStore that keeps the keys that it lists, for tests of requests."""

from typing import Any


class CountingStore:
    """A key-value store; the keys of every list are added to ``listed``."""

    def __init__(self, kv: Any, listed: list[bytes]) -> None:
        self._kv, self._listed = kv, listed

    def list(self, *args: Any, **options: Any) -> Any:
        future = self._kv.list(*args, **options)
        self._listed.extend(future.result())
        return future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)

    def __truediv__(self, name: str) -> Any:
        return self._kv / name
