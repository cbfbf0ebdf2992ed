"""The examples run as a user runs them: as programs, in a process of their own."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / program), *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def accuracies(output: str) -> list[float]:
    return [float(percent) for percent in re.findall(r"^accuracy .* ([\d.]+)%$", output, re.M)]


def test_train_digits_keeps_its_accuracy_on_the_way_through_files(tmp_path: Path) -> None:
    done = run("train_digits.py", "--data-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = accuracies(done.stdout)
    assert before == after
    assert after > 95
    assert "mesh={'data': 4, 'model': 2}" in done.stdout
    assert "mesh={'data': 2, 'model': 4}" in done.stdout
    assert "300/300" in done.stdout, "the progress bar is seen where there is no terminal"

    # Real data, and every element of the parameters once.
    assert np.load(tmp_path / "digits.npy").shape == (1797, 65)
    manifest = json.loads((tmp_path / "params" / "manifest.json").read_text())
    assert {name: len(entry["shards"]) for name, entry in manifest.items()} == {
        "w1": 2,
        "b1": 2,
        "w2": 2,
        "b2": 1,
    }
    for entry in manifest.values():
        elements = 0
        for shard in entry["shards"]:
            block = np.load(tmp_path / "params" / shard["file"])
            assert block.shape == tuple(stop - start for start, stop in shard["bounds"])
            assert block.dtype == entry["dtype"]
            elements += block.size
        assert elements == math.prod(entry["shape"])


def test_train_digits_fails_when_it_did_not_learn() -> None:
    done = run("train_digits.py", "--steps", "1", "--batch", "16", "--seed", "3")
    assert done.returncode == 1
    before, after = accuracies(done.stdout)
    assert before == after < 95
    assert "is not above 95 %; train with more --steps" in done.stderr


def test_train_digits_says_which_batches_it_takes() -> None:
    done = run("train_digits.py", "--batch", "2000")
    assert done.returncode == 2
    assert "--batch must be from 1 to 1437" in done.stderr


def test_quickstart_runs_through_the_constructors() -> None:
    done = run("quickstart.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "8 shards from 4 reads"
    assert [line for line in lines if not line.startswith("GlobalArray(shape=(8, 2), ")] == [
        "8 shards from 4 reads"
    ]
    assert len(lines) == 6
