"""One of four processes is killed in an operation that communicates: all others raise and name it.

They run on one machine. A sample of the operations and moments, and all of them for torture.
"""

from collections.abc import Iterator
from pathlib import Path

import ended_program
import numpy as np
import pytest
from ended_program import MOMENTS, OPERATIONS, VICTIM, WITH_COLLECTIVES
from forks import Forks
from meshes import batch
from trials import Trials, tried

import gda
from gda import checkpoint
from gda.launch.children import Children

EACH = [
    (operation, moment)
    for operation in OPERATIONS
    for moment in MOMENTS
    if moment != "before its part of a collective" or operation in WITH_COLLECTIVES
]
SECONDS = 80  # many times the need, and below the limits of JAX


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Children() as children:
        log = tmp_path_factory.mktemp("ended") / "log"
        forks = Forks(children, log, ended_program.__file__)
        yield forks
        forks.close()


@tried("a process is killed in an operation", sample=1)
def test_the_others_name_a_process_that_is_killed(
    ended: Forks, tmp_path: Path, trials: Trials
) -> None:
    for number, (operation, moment) in enumerate(trials.of(EACH)):
        for turn in range(3 if moment == "at a random moment" and trials.most > 1 else 1):
            path = tmp_path / f"{number}-{turn}"
            path.mkdir()
            arguments: dict[str, object] = {"operation": operation, "moment": moment}
            arguments |= {"path": str(path), "seed": trials.chance.randrange(2**32)}
            try:
                end_in_operation(ended, arguments)
                check_nothing_is_lost(path, moment)
            except BaseException as error:
                error.add_note(f"{arguments}; errors:\n{ended.errors()}")
                ended.kill()
                raise
            trials.count("named")


def end_in_operation(forks: Forks, arguments: dict[str, object]) -> None:
    forks.start("work_until_one_ends", 4, **arguments)
    lines: dict[str, list[list[str]]] = {"killed": [], "raised": []}
    while sum(map(len, lines.values())) < 4:
        line = forks.line()
        lines.get(line[0], []).append(line)  # gloo says something too
    ((_, _, at),) = lines["killed"]
    killed, raised = float(at), lines["raised"]
    assert sorted(int(line[1]) for line in raised) == [0, 1, 3]
    for _, _, at, named, kind, *words in raised:
        said = " ".join(words)
        assert (kind, named) == ("LateProcessError", f"({VICTIM})"), said
        assert f"process {VICTIM} ended" in said
        assert float(at) - killed < SECONDS
    slowest = max(float(line[2]) for line in raised) - killed
    print(f"{arguments['operation']}, killed {arguments['moment']}: {slowest:.1f} s")
    forks.kill()


def check_nothing_is_lost(path: Path, moment: str) -> None:
    for manifest in path.glob("*/manifest.json"):
        checkpoint.verify(manifest.parent)
        np.testing.assert_array_equal(checkpoint.restore(manifest.parent)["a"], batch(16, 8))
    # Both were complete before it was killed, unless that was in their first call.
    is_early = moment == "before its first call"
    assert is_early or (path / "c" / "manifest.json").exists() == (path / "c").exists()
    if not is_early and (path / "model").exists():
        model = gda.storage.open_safetensors(path / "model")
        np.testing.assert_array_equal(model["a"][:], batch(16, 8))
