"""Meetings of a call, and its bytes through the coordination service, as the processes grow."""

import pytest

from benchmarks.multihost.traffic import CALLS, Traffic, traffic_in
from gda.testing import Pool

MEETINGS = {"check": 1, "save": 2, "restore": 0, "reshard": 1, "gather": 1}


@pytest.fixture(scope="module")
def found() -> dict[str, list[list[Traffic]]]:
    """Return the traffic of each call in 2 processes, and in 4."""
    traffic: dict[str, list[list[Traffic]]] = {call: [] for call in CALLS}
    for processes in (2, 4):
        with Pool(processes) as pool:
            for call in CALLS:
                traffic[call].append(traffic_in(pool, call))
    return traffic


@pytest.mark.parametrize("call", CALLS)
def test_meetings_and_bytes_sent_do_not_grow_with_the_processes(call: str, found: dict) -> None:
    few, many = found[call]
    assert {each.meetings for each in few + many} == {MEETINGS[call]}
    # A path or the place of a call may be a few characters longer. Bytes received are not compared:
    # a process that waits long looks where the others are.
    assert max(each.sent for each in many) <= 1.2 * max(each.sent for each in few)
    assert min(each.sent for each in few) > 0
