"""Meetings: all bring a payload, one decides, all hear the decision or the names of late ones."""

import contextlib
import json
import os
import threading
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from running import wait_for

import gda
from gda.multihost import background, coordination, meeting, places
from gda.multihost.agreement import tells_alone
from gda.multihost.meeting import meet


def join(payloads: dict[int, bytes]) -> bytes:
    return json.dumps({i: payload.decode() for i, payload in sorted(payloads.items())}).encode()


@pytest.mark.processes(4, devices=2)
def test_decision_of_one_process_reaches_all() -> None:
    me = jax.process_index()
    for turn in range(3):
        mine = f"{me} in {turn}".encode()
        decision = meet(mine, join, kind="test", what="test", timeout=50)
        assert json.loads(decision) == {str(i): f"{i} in {turn}" for i in range(4)}
    # Some meet without the others, and one by itself.
    for some in ((1, 3) if me % 2 else (0, 2), (me,)):
        decision = meet(b"%d" % me, join, kind="test", what="some", timeout=50, processes=some)
        assert json.loads(decision) == {str(i): str(i) for i in some}
    # Payloads may be large or empty.
    mine = b"x" * (5_000_000 if me == 3 else 0)
    decision = meet(
        mine, lambda payloads: str(len(payloads[3])).encode(), kind="test", what="large", timeout=30
    )
    assert decision == b"5000000"


@pytest.mark.processes(2, devices=4)
def test_all_meet_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at exit since Python 3.12."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    mine = str(jax.process_index()).encode()
    decision = meet(mine, join, kind="test", what="test", timeout=50)
    assert json.loads(decision) == {str(i): str(i) for i in range(2)}


@pytest.mark.processes(4, devices=2)
@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["here", "on another machine"])
def test_a_late_process_is_named_to_everybody_and_to_itself(
    is_elsewhere: bool, monkeypatch: pytest.MonkeyPatch, shared_tmp_path: Path
) -> None:
    if is_elsewhere:
        monkeypatch.setattr(places, "machine", lambda: f"machine {jax.process_index()}")
    meet(b"", join, kind="test", what="the first place", timeout=50)
    if jax.process_index() == 2:
        wait_for(shared_tmp_path / str(i) for i in (0, 1, 3))
    with pytest.raises(gda.LateProcessError) as caught:
        meet(b"", join, kind="test", what="the second place", timeout=2)
    (shared_tmp_path / str(jax.process_index())).touch()
    message = str(caught.value)
    assert message.startswith("the second place: process 2 did not come within 2 s")
    assert "processes 0, 1, 3 waited at the second place" in message
    assert "process 2 was last at the first place" in message
    assert message.endswith("Look for the reason in the output of process 2")
    assert caught.value.processes == (2,)
    # The next meeting is in step again.
    meet(b"", join, kind="test", what="the third place", timeout=50)


@pytest.mark.processes(2, devices=4)
def test_a_first_array_does_not_hide_where_a_process_waits() -> None:
    me, service = jax.process_index(), coordination.service()
    assert service is not None
    meet(b"", join, kind="test", what="a place", timeout=50)
    places.introduce.__wrapped__()
    assert places.places(service, me)[me].what == "a place"


@pytest.mark.processes(4, devices=2)
def test_processes_that_wait_for_each_other_are_told_so() -> None:
    me, everybody = jax.process_index(), (0, 1, 2, 3)
    for group in ((1, 2, 3), (0, 1)):
        mine, what = (group, "of some") if me == 1 else (everybody, "of all")
        for _ in range(2):
            with pytest.raises(gda.DisagreementError) as caught:
                meet(b"", join, kind="test", what=what, timeout=60, processes=mine)
            message = str(caught.value)
            assert "the processes are at different places: process " in message
            assert "process 1 waits at of some for process" in message
            assert "waits at of all for processes 0-3" in message
        # All are in step again, in both groups.
        meet(b"", join, kind="test", what="of all", timeout=60)
        if me in group:
            meet(b"", join, kind="test", what="of some", timeout=60, processes=group)
    kind = "lunch" if me == 1 else "dinner"
    with pytest.raises(gda.DisagreementError) as caught:
        meet(b"", join, kind=kind, what=f"a place for {kind}", timeout=50)
    assert str(caught.value).endswith(
        "the processes are at different places: process 1 at a place for lunch; processes 0, 2, 3 "
        "at a place for dinner"
    )
    meet(b"", join, kind="test", what="in step again", timeout=50)


@pytest.mark.processes(2, devices=4)
def test_nothing_is_left_of_the_meetings_of_a_save(tmp_path: Path) -> None:
    service = coordination.service()
    assert service is not None
    both = (0, 1)
    path = meet(str(tmp_path).encode(), lambda paths: paths[0], kind="p", what="p", timeout=50)
    before = service.list("gda/multihost/meeting/")
    gda.checkpoint.save_async(path.decode(), {"a": np.zeros(3)}).result()
    assert [name for name, _ in meeting._held if name.startswith("gda-save")] == []
    service.barrier("after the save", 50, both)
    left = service.list("gda/multihost/meeting/").keys() - before.keys()
    assert [key for key in left if "/entry/" in key] == []


@pytest.mark.processes(2, devices=4)
def test_a_process_that_has_refused_is_in_step_with_those_that_hear() -> None:
    what = "a call (program.py:3)"
    for reason in ("the first reason", "the second reason"):
        if jax.process_index() == 1:
            meeting.refuse(reason, what=what, processes=(0, 1))
            continue
        with pytest.raises(gda.DisagreementError) as caught:
            meet(b"", join, kind="test", what="a call (program.py:5)", timeout=50)
        assert str(caught.value) == f"{what}: process 1 failed: {reason}"
    meet(b"", join, kind="test", what="in step again", timeout=50)
    if jax.process_index() == 0:
        service, group = coordination.service(), meeting._group_of("MainThread", (0, 1))
        assert service is not None
        left = service.list(f"gda/multihost/meeting/{group}/")
        assert [key for key in left if key.endswith(("/by", "/failure"))] == []


@pytest.mark.processes(4, devices=2)
def test_those_that_make_another_call_pass_over_a_refused_one() -> None:
    for refuser in (0, 2):
        is_refuser = jax.process_index() == refuser
        if is_refuser:
            meeting.refuse("a reason", what="a call", processes=(0, 1, 2, 3))
        meet(b"", join, kind="test", what="another call", timeout=50)
        if is_refuser:
            meeting.refuse("a reason", what="a call", processes=(0, 1, 2, 3))
        else:
            with pytest.raises(gda.DisagreementError, match="failed: a reason"):
                meet(b"", join, kind="test", what="a call", timeout=50)
        meet(b"", join, kind="test", what="in step again", timeout=50)


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("skips", [False, True], ids=["comes late", "does not come"])
def test_after_a_late_process_was_caught_all_are_in_step(skips: bool) -> None:
    """Also if each of the later steps takes longer than a check waits."""
    is_late, service = jax.process_index() == 1, coordination.service()
    assert service is not None
    if is_late:
        service.get(f"test/{skips}", 50)
    if not (is_late and skips):
        with pytest.raises(gda.LateProcessError, match="process 1 did not come"):
            gda.check_processes_agree(0, name="first", timeout=0.5)
    if not is_late:
        service.put(f"test/{skips}", b"")
    for step in range(3):
        gda.check_processes_agree(0, name=f"step {step}", timeout=50)


@pytest.mark.processes(2, devices=4)
def test_without_the_service_a_meeting_says_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "service", lambda: None)
    with pytest.raises(RuntimeError, match=r"2 processes, .* Call gda.launch.initialize\(\)"):
        meet(b"", join, kind="test", what="here", timeout=50)


# Calls of one process without communication.


def local_tree() -> dict[str, jax.Array]:
    return {"a": jax.device_put(np.arange(4.0), jax.local_devices()[0])}


def shared_tree() -> dict[str, jax.Array]:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return gda.load_tree({"a": np.arange(8.0)}, NamedSharding(mesh, PartitionSpec("x")))


@pytest.mark.processes(4, devices=2)
def test_process_that_made_a_call_alone_may_come_to_it_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "_PATIENCE", 0.5)
    me, tree = jax.process_index(), shared_tree()
    if me == 1:
        gda.fingerprint(local_tree())
        time.sleep(3)
    gda.fingerprint(tree)
    # As many calls alone at one line are none that the others have missed.
    for turn in range(4):
        if turn == 3 and me < 2:  # some are further than others
            meet(b"", join, kind="test", what="some", timeout=50, processes=(0, 1))
        elif turn == 3:
            time.sleep(3)
        gda.fingerprint(tree if turn == 3 else local_tree())


@pytest.mark.processes(2, devices=4)
def test_process_that_made_the_same_call_alone_is_not_awaited(
    monkeypatch: pytest.MonkeyPatch, shared_tmp_path: Path
) -> None:
    monkeypatch.setattr(meeting, "_PATIENCE", 0.5)
    is_me, tree = jax.process_index() == 1, shared_tree()
    over = shared_tmp_path / "over"
    if not is_me:
        gda.fingerprint(local_tree())  # at another line
    with contextlib.nullcontext() if is_me else pytest.raises(gda.LateProcessError) as caught:
        gda.fingerprint(local_tree() if is_me else tree)
    if is_me:
        wait_for([over])
    else:
        assert "process 1 was last at gda.fingerprint" in str(caught.value)
        over.touch()
    meet(b"", join, kind="test", what="in step again", timeout=50)


@pytest.mark.processes(2, devices=4)
def test_call_without_communication_does_not_wait_for_a_stopped_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, answered = threading.Event(), threading.Event()

    class Stopped:
        def put(self, *_: object, **__: object) -> None:
            goes_on.wait(100)
            answered.set()

    with monkeypatch.context() as patch:
        patch.setattr(coordination, "service", Stopped)
        patch.setattr(background, "SECONDS_FOR_ANSWERS", 0.1)
        tells_alone("a call", "a reason")
    assert not answered.is_set()
    goes_on.set()
    meet(b"", join, kind="test", what="in step", timeout=50)


@pytest.mark.processes(2, devices=4)
def test_forked_child_does_not_speak_for_its_parent() -> None:
    meet(b"", join, kind="test", what="before", timeout=50)
    if jax.process_index() == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads in a process that forks
            child = os.fork()
        if not child:
            tells_alone("a call", "it is of a child")
            os._exit(0 if coordination.service() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(2)  # the other looks at this process
    meet(b"", join, kind="test", what="after", timeout=50)
