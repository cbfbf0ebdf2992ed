"""A key-value store of TensorStore whose requests are kept, and fail where a test says so."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Request(NamedTuple):
    """A request to a store; ``number`` counts all of them."""

    kind: str  # read, write, delete or list
    name: str
    number: int


Fault = Callable[[Request], str | None]

FAILURES = {
    "503": "UNAVAILABLE: Injected 503",
    "403": "PERMISSION_DENIED: Injected",
    "gone": "UNAVAILABLE: Could not connect to server [curl_code='7']",
}


@dataclass
class Faults:
    """The requests to some stores, and what becomes of them.

    Attributes:
      fault: returns for a request ``None``, a key of ``FAILURES``, ``never`` (there is no answer),
        ``late`` (it is sent by ``land``) or ``lose the answer``.
      read_bytes: of all answers to reads.
    """

    fault: Fault = lambda request: None
    requests: list[Request] = field(default_factory=list)
    late: list[Callable[[], Any]] = field(default_factory=list)
    listed: list[bytes] = field(default_factory=list)
    read_bytes: int = 0

    def counts(self, kind: str) -> dict[str, int]:
        """Return how often each name was asked for."""
        names = [each.name for each in self.requests if each.kind == kind]
        return {name: names.count(name) for name in names}

    def land(self) -> None:
        """Let the late requests arrive."""
        for send in self.late:
            send().result()

    def outcome(self, kind: str, name: str, send: Callable[[], Any]) -> Any:
        request = Request(kind, name, len(self.requests))
        self.requests.append(request)
        what = self.fault(request)
        future: Future[Any] = Future()
        if what == "late":
            self.late.append(send)
        if what in ("late", "never"):
            return future
        if what not in FAILURES:
            future = send()
            if kind == "read":
                self.read_bytes += len(future.result().value)
            if kind == "list":
                self.listed += future.result()
        if what is None:
            return future
        future.result() if what == "lose the answer" else None
        failed: Future[Any] = Future()
        failed.set_exception(ValueError(FAILURES.get(what, FAILURES["503"])))
        return failed


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
