"""Hostile files for ``gda plan --tree``, each in a process whose memory is measured."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from trials import Trials, tried


def _many(before: str, value: str, after: str) -> str:
    """Return 15 MB of JSON: a value again and again, numbered if it has a place for a number."""
    count = 15_000_000 // (len(value) + 7)
    return before + ",".join(value.replace("#", f"{i:x}") for i in range(count)) + after


HOSTILE = {
    name: (lambda before=before, value=value, after=after: _many(before, value, after), said)
    for name, (before, value, after, said) in {
        "lists": ('{"parameters":{"w":[', "[]", "]}}", "so many lists and objects"),
        "objects": ('{"parameters":{"w":[', "{}", "]}}", "so many"),
        "nodes": ('{"parameters":{"w":[', '{"list":[]}', "]}}", "so many lists and objects"),
        "parameters": ('{"parameters":{', '"#":{}', "}}", "so many lists and objects"),
        "sizes": ('{"parameters":{"w":{"shape":[', "300", "]}}}", "this shape has"),
        "spec": ('{"parameters":{"w":{"shape":[4],"spec":[', "null", "]}}}", "this spec has"),
        "axes": ('{"parameters":{"w":{"shape":[4],"spec":[[', '"ab"', "]]}}}", "this spec has"),
        "text": ('{"parameters":{"w":{"shape":[4],"spec":"', "ab", '"}}}', "more than 10,000"),
        "keys": ('{"parameters":{"w":{', '"#":1', "}}}", "are not known"),
        "depth": ('{"about":', "[", "}", "cannot be read as JSON"),
    }.items()
}
HOSTILE["size"] = (lambda: " " * 2**25, "has more than 16,777,216 bytes")
HOSTILE["brackets"] = (lambda: "[" * 200_000, "nested too deeply")

PROGRAM = """
import sys
from gda.cli import main

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

before = peak()
code = main(["plan", "--tree", sys.argv[1], "--mesh", "x=4"])
print(code, (peak() - before) // 1024)
"""


@tried("a hostile file for gda plan --tree", sample=1)
def test_a_hostile_file_takes_little_memory(write: Callable[..., Path], trials: Trials) -> None:
    for name in trials.of([*HOSTILE]):
        make, said = HOSTILE[name]
        command = [sys.executable, "-c", PROGRAM, write(make())]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        code, mib = map(int, done.stdout.split()[-2:])
        assert said in done.stderr, (name, done.stderr[:500])
        # The text twice, and what a parser takes for 15 MB of ordinary values.
        assert (code, mib < 350) == (2, True), (name, mib)
        trials.count("refused")
