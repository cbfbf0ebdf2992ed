"""A key-value store of TensorStore whose requests are kept, and fail where a test says so."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple


class Request(NamedTuple):
    """A request to a store; ``number`` counts all of them."""

    kind: str  # read, write, delete or list
    name: str
    number: int


Fault = Callable[[Request], str | None]


class Faults:
    """The requests to some stores, and what becomes of them.

    Attributes:
      fault: returns for a request ``None``, ``403``, ``never`` (there is no answer), ``late`` (it
        is sent by ``land``) or ``lose the answer``.
      listed: all names in answers to lists.
    """

    def __init__(self) -> None:
        self.fault: Fault = lambda request: None
        self.requests: list[Request] = []
        self.listed: list[bytes] = []
        self._late: list[Callable[[], Any]] = []

    def counts(self, kind: str) -> dict[str, int]:
        """Return how often each name was asked for."""
        names = [each.name for each in self.requests if each.kind == kind]
        return {name: names.count(name) for name in names}

    def land(self) -> None:
        """Let the late requests arrive."""
        for send in self._late:
            send().result()

    def outcome(self, kind: str, name: str, send: Callable[[], Any]) -> Any:
        request = Request(kind, name, len(self.requests))
        self.requests.append(request)
        what = self.fault(request)
        future: Future[Any] = Future()
        if what == "late":
            self._late.append(send)
        elif what == "403":
            future.set_exception(ValueError("PERMISSION_DENIED: Injected"))
        elif what != "never":
            answer = send()
            if kind == "list":
                self.listed += answer.result()
            if what is None:
                return answer
            answer.result()
            future.set_exception(ValueError("UNAVAILABLE: the answer is lost"))
        return future


class FaultyStore:
    """A key-value store whose requests ``faults`` decides on."""

    def __init__(self, kv: Any, faults: Faults) -> None:
        self._kv, self._faults = kv, faults

    def read(self, name: str, **options: Any) -> Any:
        return self._faults.outcome("read", name, lambda: self._kv.read(name, **options))

    def write(self, name: str, data: Any, **options: Any) -> Any:
        kind = "delete" if data is None else "write"
        return self._faults.outcome(kind, name, lambda: self._kv.write(name, data, **options))

    def list(self, within: Any) -> Any:
        return self._faults.outcome("list", "", lambda: self._kv.list(within))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)
