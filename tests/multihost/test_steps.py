"""Steps of all processes, which all hear of a failure in one."""

import threading
from typing import Any

import jax
import pytest

import gda
from gda.multihost.steps import Done, all_do


def is_me() -> bool:
    return jax.process_index() == 1


def refuse(parts: dict[int, Any]) -> None:
    raise FileExistsError(f"{sorted(parts.values())} are there")


def done(**arguments: Any) -> Done[int]:
    step = {"work": jax.process_index, "what": "a step", "timeout": 50}
    return all_do(**step | arguments)


@pytest.mark.processes(2, devices=4)
def test_all_hear_the_decision_on_what_is_shared() -> None:
    said = done(share=lambda mine: {"mine": mine}, decide=lambda parts: [*parts.items()])
    assert said.mine == jax.process_index()
    assert said.decision == [[0, {"mine": 0}], [1, {"mine": 1}]]


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_failure_is_raised_as_it_is_and_the_others_hear_of_it(kind: type[BaseException]) -> None:
    def work() -> None:
        if is_me():
            raise kind("no\nspace")

    with pytest.raises(kind if is_me() else RuntimeError) as caught:
        done(work=work, failed=RuntimeError)
    said = "no\nspace" if is_me() else f"a step: process 1 failed: {kind.__name__}: no space"
    assert str(caught.value) == said
    assert done().decision is None  # and all are there for the next


@pytest.mark.processes(2, devices=4)
def test_process_that_cannot_send_its_part_has_failed() -> None:
    with pytest.raises(TypeError if is_me() else gda.DisagreementError, match="JSON serializable"):
        done(share=lambda _: object() if is_me() else 0)


@pytest.mark.processes(2, devices=4)
def test_interrupt_of_a_decision_ends_it_and_is_told_to_all() -> None:
    """Python raises a Ctrl-C in the main thread: a decision in another one would go on."""

    def interrupted(parts: dict[int, Any]) -> None:
        assert threading.current_thread() is threading.main_thread()
        raise KeyboardInterrupt("now")

    expected = gda.DisagreementError if is_me() else KeyboardInterrupt
    with pytest.raises(expected, match="now"):
        done(decide=interrupted)
    assert done().decision is None


@pytest.mark.processes(2, devices=4)
def test_error_of_the_judge_fails_the_step() -> None:
    expected = gda.DisagreementError if is_me() else FileExistsError
    with pytest.raises(expected, match=r"\[0, 1\] are there"):
        done(decide=refuse)
    with pytest.raises(FileExistsError, match=r"\[0, 1\] are there"):
        done(decide=refuse, shared=(FileExistsError,))


@pytest.mark.processes(2, devices=4)
def test_a_failure_is_not_hidden_by_others_that_are_elsewhere() -> None:
    def fail() -> None:
        raise OSError("no space")

    if is_me():
        with pytest.raises(OSError, match="no space"):
            done(work=fail)
    else:
        with pytest.raises(gda.DisagreementError, match="at different places"):
            done(what="another step")


@pytest.mark.processes(2, devices=4)
def test_error_that_ended_an_earlier_step_is_told_in_a_later_one() -> None:
    with pytest.raises(gda.DisagreementError, match="at different places") as caught:
        done(what="mine" if is_me() else "a step")

    def fail() -> None:
        raise caught.value

    with pytest.raises(gda.DisagreementError, match="at different places") as later:
        done(work=fail if is_me() else lambda: 0)
    assert is_me() or str(later.value).startswith("a step: process 1 failed")


def test_alone_there_is_no_other_to_wait_for() -> None:
    assert done(decide=lambda parts: parts[0]) == Done(0, 0)
    with pytest.raises(FileExistsError):
        done(decide=refuse)
