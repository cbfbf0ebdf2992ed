"""Runs of a program that is being ended, and of one whose arrays mostly stay the same."""

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from damaged import limit_sizes
from meshes import batch
from training import check, state_of, train

import gda
from gda.checkpoint import Run


@pytest.mark.processes(2, devices=4)
def test_all_processes_save_at_the_same_step_when_one_is_ended(shared_tmp_path: Path) -> None:
    run = Run(shared_tmp_path, every=1000)
    state, step = run.resume(state_of(0))
    is_saved = False
    while step < 5000 and not run.is_ending:
        step += 7
        if step == 70 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        is_saved = run.save(step, state_of(step))
    assert run.is_ending
    assert is_saved
    assert run.steps()[-1] == step  # complete, without a wait
    assert not run.save(step, state)
    run.close(step, state_of(step))
    state, again = Run(shared_tmp_path, every=1000).resume(state_of(0))
    assert again == step
    check(state, step)


def test_a_signal_in_the_evaluation_lets_the_next_call_save(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Run(tmp_path, every=100, save_on=[signal.SIGUSR2]) as run:
        assert not run.save(1, state_of(1))
        os.kill(os.getpid(), signal.SIGUSR2)
        assert not run.check()
        assert run.save(2, state_of(2))
        assert not run.is_ending
        assert not run.save(3, state_of(3))
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.check()
        assert run.check()
        assert run.save(4, state_of(4))
        assert run.steps() == [2, 4]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_save_that_will_not_be_complete_in_time_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path, every=10, grace=0.001) as run:
        train(run, 0, 10)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not run.save(11, state_of(11))
        assert run.is_ending
        run.close(11, state_of(11))
        assert run.steps() == [10]
    assert any(
        each.startswith(f"step 11 of {tmp_path} is not saved: a save takes ")
        for each in caplog.messages
    )


def test_grace_counts_from_the_signal(tmp_path: Path) -> None:
    with Run(tmp_path, every=10, grace=0.2) as run:
        train(run, 0, 10)
        run.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        assert not run.save(11, state_of(11))
        assert run.is_ending


def test_unchanged_arrays_are_linked_but_in_the_steps_that_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "gda")
    limit_sizes(monkeypatch, 4096, 2**20, 4096)
    frozen = jnp.asarray(batch(64, 32))
    with Run(tmp_path, every=1, keep=2, keep_every=4) as run:
        for step in range(1, 7):
            run.save(step, {"frozen": frozen, "w": jnp.full(8, step)})
        run.wait()
        lines = [each for each in caplog.messages if each.startswith("saved step")]
        assert ["8.0 KiB linked" in each for each in lines] == [
            *(False, True, True, False, True, True)  # the first, and a multiple of 4
        ]
    assert run.steps() == [4, 5, 6]
    for step in run.steps():
        gda.checkpoint.verify(run.path(step))


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: os.truncate(file, 10)])
def test_a_step_is_written_whole_beside_one_that_became_unreadable(
    tmp_path: Path, harm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"frozen": jnp.ones((512, 1024))}
    with Run(tmp_path, every=1) as run:
        run.save(1, state)
        run.wait()
        harm(tmp_path / "00000001/manifest.json")
        run.save(2, state)
    (line,) = [each for each in caplog.messages if each.startswith("nothing is linked to ")]
    assert "00000001: " in line
    gda.checkpoint.verify(run.path(2))


def test_all_arrays_are_written_if_the_user_wants_it(tmp_path: Path) -> None:
    frozen = jnp.ones((512, 1024))
    options: Any = {"every": 1, "unchanged": "write"}
    with Run(tmp_path, **options) as run:
        for step in (1, 2):
            run.save(step, {"frozen": frozen})
    chunks = [each for each in tmp_path.glob("*/data-*/*/*") if each.stat().st_size > 2**20]
    assert [each.stat().st_nlink for each in chunks] == [1, 1]
