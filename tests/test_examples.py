"""A run of the examples as programs, each in its own process."""

import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from costs import COMPILER_FLAGS
from running import fresh_python

import gda
from gda.trees.records.recorded_tree import ArrayLeaf

pytestmark = pytest.mark.docs

EXAMPLES = Path(__file__).parents[1] / "examples"
README = EXAMPLES.parent / "README.md"


def run(program: str, *args: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Run an example, in several processes on 8 devices together if it is for that."""
    launcher = ["-m", "gda.launch", "-n", str(processes), "--timeout", "300"]
    launcher += ["--devices-per-process", str(8 // processes)]
    command = [*(launcher if processes > 1 else []), EXAMPLES / program, *args]
    # Alone, an example makes its devices by this variable.
    flags = {"XLA_FLAGS": COMPILER_FLAGS} if processes > 1 else {}
    return fresh_python("-W", "error", *command, **flags)


def accuracies(output: str) -> list[float]:
    return [float(percent) for percent in re.findall(r"^accuracy .* ([\d.]+)%$", output, re.M)]


def test_the_tour_runs_in_a_narrow_terminal() -> None:
    done = run("spmd_tour.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_train_digits_keeps_its_accuracy_on_the_way_through_files(tmp_path: Path) -> None:
    done = run("train_digits.py", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = accuracies(done.stdout)
    assert before == after
    assert after > 95
    shown = re.search(r"^```text\n(accuracy .*?)^```$", README.read_text(), re.M | re.S)
    assert shown
    wanted = shown[1].replace("98.61%", f"{after:.2f}%")
    assert done.stdout.endswith(wanted), "the last lines that the README shows"

    # Real data, and a checkpoint that has all of the parameters.
    assert np.load(tmp_path / "digits.npy").shape == (1797, 65)
    leaves = gda.checkpoint.verify(tmp_path / "params").leaves
    assert {leaf.path: leaf.shape for leaf in leaves if isinstance(leaf, ArrayLeaf)} == {
        ("w1",): (64, 128),
        ("b1",): (128,),
        ("w2",): (128, 10),
        ("b2",): (10,),
    }


def test_load_safetensors_reads_only_needed_data(tmp_path: Path) -> None:
    done = run("load_safetensors.py")
    assert done.returncode == 0, done.stderr
    assert "process 0 of 1: 21 tensors, read 393,856 of 393,856 bytes" in done.stdout
    assert done.stdout.endswith("are equal: True\n")

    done = run("load_safetensors.py", str(tmp_path), processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"read ([\d,]+) of 393,856 bytes", done.stdout) == ["262,784"] * 2
    assert "are equal: True\n" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *[f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)],
        "model.safetensors.index.json",
    ]


def test_train_and_sample_sends_the_weights_to_the_other_program() -> None:
    done = run("train_and_sample.py")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.findall(
        r"^\[0\] step (\d+): bfloat16, P\(None, 'model'\), error 0", done.stdout, re.M
    )
    steps = [int(step) for step in shown]
    assert steps == sorted({*steps})
    assert steps[-1] == 20


def test_convert_llama_gives_every_bit_back() -> None:
    done = run("convert_llama.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layers/attention/key           bfloat16[64,4,32] " in done.stdout
    assert done.stdout.endswith("the same bits came back: True\n")


def test_resume_training_ends_with_the_loss_of_a_training_without_a_pause() -> None:
    done = run("resume_training.py")
    assert done.returncode == 0, done.stdout + done.stderr
    words = r"devices: (\d), from step (\d+), (?:ended after step (\d+), loss ([\d.]+)\n)?(.*)\n"
    whole, killed, told, last = re.findall(words, done.stdout)
    assert (*whole[:3], whole[4]) == ("4", "0", "100", "exit code 0")
    assert killed == ("4", "0", "", "", "killed by SIGKILL")
    assert int(told[1]) in (20, 30)  # the save of step 30 may not be complete
    assert (told[0], *told[2::2]) == ("2", "68", "exit code 75")
    assert (*last[:3], last[4]) == ("1", "68", "100", "exit code 0")
    assert math.isclose(float(whole[3]), float(last[3]), rel_tol=1e-2)


def test_padded_vocabulary_trains_as_without_padding() -> None:
    done = run("padded_vocabulary.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "padded to (50264, 16): 0.01% more memory\n" in done.stdout
    assert done.stdout.endswith("one device without padding has the same losses, norms and table\n")


def test_prefetch_grain_continues_with_the_same_losses(tmp_path: Path) -> None:
    for processes in (1, 2):
        done = run("prefetch_grain.py", str(tmp_path), processes=processes)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "GlobalArray(shape=(128, 16), dtype=float32, mesh={'data': 8}" in done.stdout
        assert done.stdout.count("continued after step 3: the same 5 losses\n") == processes


def test_elastic_hosts_has_the_losses_of_an_uninterrupted_run() -> None:
    done = run("elastic_hosts.py", processes=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mesh={'data': 6}, spec=P(None, 'data')), padded to (64, 132)\n" in done.stdout
    curves = re.findall(r"loss ([\d.]+), uninterrupted ([\d.]+)\n", done.stdout)
    losses, expected = np.array(curves, float).T
    assert len(losses) == 6
    np.testing.assert_allclose(losses, expected, atol=2e-4)
    assert losses[-1] < 0.5 < 2 < losses[0]
    assert "[2] the sampler has the weights of the trainers: accuracy " in done.stdout


def test_the_index_names_every_program() -> None:
    index = (EXAMPLES / "README.md").read_text()
    programs = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", index, re.M)) == programs
