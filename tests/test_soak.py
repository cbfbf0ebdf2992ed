"""A long run: what a round of saves, restores and moves takes, it gives back."""

import json
from pathlib import Path

from running import python
from trials import Trials, tried

PROGRAM = Path(__file__).with_name("soak_program.py")
MIB = 2**20


@tried("a round of all operations in a long run", sample=5, full=100)
def test_a_long_run_holds_no_more_than_a_short_one(tmp_path: Path, trials: Trials) -> None:
    done = python(PROGRAM, tmp_path, trials.most, timeout=3600)
    assert done.returncode == 0, done.stderr
    growth = json.loads(done.stdout)
    print(growth)
    # The allocator keeps some; a program that is compiled anew takes more in each round.
    assert growth.pop("RSS") < 64 * MIB
    assert growth == dict.fromkeys(growth, 0)
    for _ in range(trials.most):
        trials.count("held")
