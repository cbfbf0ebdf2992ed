"""The watch over processes that work together, without other processes."""

import json
from typing import Any

import pytest

import gda
from gda.multihost import coordination
from gda.multihost.failure_watch import FailureWatch


class Service:
    """A key-value store that counts the states that it has sent."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.sent = 0

    def put(self, key: str, value: bytes, **_: Any) -> None:
        self.values[key] = value

    def list(self, folder: str) -> dict[str, bytes]:
        found = {key: value for key, value in self.values.items() if key.startswith(folder)}
        self.sent += len(found) * ("/state/" in folder)
        return found


def fail() -> None:
    raise OSError("the connection is gone")


def test_after_an_alarm_only_missing_states_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {7, 9}
    service = Service()
    monkeypatch.setattr(coordination, "service", lambda: service)
    watch = FailureWatch("work", tuple(range(20)), timeout=1)
    for process in set(range(1, 20)) - missing:
        state = json.dumps([watch._number, ""]).encode()
        service.put(f"{watch._folder}/state/{process}/last", state)
    with (
        pytest.raises(gda.LateProcessError, match="did not answer for 1 s") as caught,
        watch.called(),
    ):
        watch.result(watch.begin(fail))
    assert set(caught.value.processes) == missing
    assert service.sent == 20 - len(missing)  # each once
