"""Changed copies of gda that a test should refuse: `python tests/mutants.py`, on Python 3.12 on.

A *mutant* is gda with one operator, constant, condition or statement changed, in a copy of the
tree. It is killed if a test of its folder fails, or does not end; else by a test of a folder above.
The tests that run the changed line are tried, those of the file of its module first. So a run
begins by recording the lines of each test.

A change that no test could see is no mutant. So nothing is changed in

- texts, docstrings and annotations; what is raised, logged or warned of; ``assert``;
- the methods that show a value, or hash it;
- code outside functions: constants of speed, tables and types;
- waits and limits of time, ``stacklevel``, and ``strict`` of ``zip``, which only asserts;
- the side on which a size of exactly a limit in bytes falls: only speed depends on it.
"""

import argparse
import ast
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = ("layout", "arrays", "trees", "checkpoint")  # from the lowest layer to the highest

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_SHOW = re.compile(r"__(repr|str|hash|dir|format)__|_repr_.*")
_TELL = re.compile(r"(log|warnings)\.\w+|print|.*\.add_note|time\.sleep")
_LIMIT = re.compile(r"_?[A-Z_]*(BYTES|BELOW|LARGEST)")
_UNSEEN = {"timeout", "stacklevel", "strict", "maxsize"}  # keywords
_OMITTED = ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom

# Seconds of the tests that are tried for a mutant, as they were recorded: of any, and of all.
_QUICK_SECONDS, _SECONDS = 10, 60
_LEAST_LIMIT = 120


@dataclass(frozen=True)
class Mutant:
    """A change of a file: ``new`` in place of its bytes from ``start`` to ``stop``.

    Attributes:
      path: of the file, from the root of the tree.
      lines: the tests that run one of them are tried.
    """

    path: str
    line: int
    start: int
    stop: int
    old: str
    new: str
    lines: range

    def __str__(self) -> str:
        old, new = (re.sub(r"\s+", " ", text) for text in (self.old, self.new))
        return f"{self.path}:{self.line}  {old}  ->  {new}"


def mutants_of(source: str, path: str = "") -> list[Mutant]:
    """Return all mutants of the text of a module."""
    data = source.encode()
    firsts = [0, *itertools.accumulate(len(line) for line in data.splitlines(keepends=True))]
    found = []
    for node, new, lines in _changes_of(ast.parse(source)):
        start = firsts[node.lineno - 1] + node.col_offset
        stop = firsts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old = data[start:stop].decode()
        found.append(Mutant(path, node.lineno, start, stop, old, new, lines))
    return found


def _changes_of(module: ast.Module) -> Iterator[tuple[Any, str, range]]:
    """Yield nodes, texts in their place, and the lines whose tests are tried."""
    inside: list[Any] = [*module.body]
    while inside:
        node = inside.pop(0)
        if isinstance(node, ast.ClassDef):
            inside = [*node.body, *inside]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _inside(node, None, range(node.lineno, node.lineno + 1))


def _inside(node: Any, parent: Any, lines: range) -> Iterator[tuple[Any, str, range]]:
    if isinstance(node, ast.stmt):
        # Also of what is in a statement: a test that runs that runs its beginning too.
        lines = range(node.lineno, (node.end_lineno or 0) + 1)
    if isinstance(node, _OMITTED) or _tells(node):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if not _SHOW.fullmatch(node.name):
            for each in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
                yield from _inside(each, node, lines)
        return
    for changed, text in _changes(node, parent):
        yield changed, text, lines
    fields = {} if isinstance(node, ast.Raise | ast.Constant) else dict(ast.iter_fields(node))
    for name, value in fields.items():
        for child in value if isinstance(value, list) else [value]:
            is_seen = getattr(child, "arg", None) not in _UNSEEN
            if isinstance(child, ast.AST) and name != "annotation" and is_seen:
                yield from _inside(child, node, lines)


def _tells(node: Any) -> bool:
    """Return True for what people read, and for waits."""
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and bool(_TELL.fullmatch(ast.unparse(call.func)))


def _changes(node: Any, parent: Any) -> Iterator[tuple[Any, str]]:
    """Yield the changes of one node: the node whose text goes, and the text in its place."""
    match node:
        case ast.Compare(ops=ops):
            sides = [node.left, *node.comparators]
            for number, op in enumerate(ops):
                near = map(ast.unparse, sides[number : number + 2])
                if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and any(
                    map(_LIMIT.fullmatch, near)
                ):
                    continue
                new = [*ops[:number], _SWAPPED[type(op)](), *ops[number + 1 :]]
                yield node, _text(ast.Compare(node.left, new, node.comparators))  # pyright: ignore
        case ast.BinOp(op=op) if type(op) in _SWAPPED and not _has_text(node):
            yield node, _text(ast.BinOp(node.left, _SWAPPED[type(op)](), node.right))  # pyright: ignore
        case ast.AugAssign(op=op) if type(op) in _SWAPPED:
            yield node, ast.unparse(ast.AugAssign(node.target, _SWAPPED[type(op)](), node.value))  # pyright: ignore
        case ast.BoolOp():
            yield node, _text(ast.BoolOp(_SWAPPED[type(node.op)](), node.values))  # pyright: ignore
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node, _text(node.operand)
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.Tuple(elts=elements) if isinstance(parent, ast.Lambda) or _is_key(parent):
            for number in range(len(elements)):
                kept = [*elements[:number], *elements[number + 1 :]]
                yield node, _text(ast.Tuple(kept, ast.Load()))
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield node, "pass"
        case ast.Raise() if not (isinstance(parent, ast.If) and parent.body == [node]):
            yield node, "pass"
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) if ast.unparse(test) != "TYPE_CHECKING":
            yield test, "True"
            yield test, "False"
        case ast.While(test=test) if not isinstance(test, ast.Constant):
            yield test, "False"
        case ast.comprehension(ifs=tests):
            for test in tests:
                yield test, "True"
                yield test, "False"


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _has_text(node: ast.BinOp) -> bool:
    def is_text(side: ast.expr) -> bool:
        is_constant = isinstance(side, ast.Constant) and isinstance(side.value, str | bytes)
        return is_constant or isinstance(side, ast.JoinedStr)

    return is_text(node.left) or is_text(node.right)


def _is_key(parent: Any) -> bool:
    """Return True for the assignment of a key, whose parts decide what is taken for the same."""
    return isinstance(parent, ast.Assign) and ast.unparse(parent.targets[0]).endswith("key")


# Copies of the tree, and their tests.


class Copy:
    """A copy of the tree, in which one file at a time is changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.rmtree(path, ignore_errors=True)
        names = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, path / name)

    def run(self, words: Sequence[object], limit: float, **more: str) -> tuple[int | None, str]:
        """Run pytest with these words; return its exit code, or ``None`` after a limit."""
        caches = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache/mutants"))
        env = {**os.environ, "PYTHONPATH": str(self.path), "JAX_COMPILATION_CACHE_DIR": caches}
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={self.path}/temporary"]
        command = [sys.executable, "-m", "pytest", *options, *map(str, words)]
        with (self.path / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env={**env, **more},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:  # also after Ctrl-C
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return code, (self.path / "output.txt").read_text(errors="replace")

    def change(self, mutant: Mutant, new: str) -> None:
        """Write the file of a mutant, with a text in place of what it changes."""
        path = self.path / mutant.path
        data = (ROOT / mutant.path).read_bytes()
        path.write_bytes(data[: mutant.start] + new.encode() + data[mutant.stop :])
        # Its bytecode has the time in whole seconds, and the size, which may be the same.
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


class Tests:
    """The tests of a folder, with the lines that each runs, recorded once for all mutants."""

    def __init__(self, folder: str, work: Path, processes: int) -> None:
        self.folder, self._work, self._processes = folder, work, processes
        self._guard = threading.Lock()

    @cached_property
    def _records(self) -> list[Any]:
        """The tests that passed, when they are needed first."""
        record = self._work / f"lines-{self.folder}-{_digest(self.folder)}.jsonl"
        if not record.exists():
            print(f"recording the lines of tests/{self.folder}", flush=True)
            copy, parts = Copy(self._work / "record"), self._work / "parts"
            shutil.rmtree(parts, ignore_errors=True)
            parts.mkdir()
            words = ["-p", "lines_run", "-n", self._processes, f"tests/{self.folder}"]
            code, output = copy.run(words, 3 * 3600, LINES_RUN=str(parts))
            if code not in (0, 1) or re.search(r"^ERROR ", output, re.MULTILINE):
                sys.exit(f"the tests of {self.folder} did not run:\n{output[-5000:]}")
            record.write_text("".join([part.read_text() for part in sorted(parts.iterdir())]))
        found: dict[str, Any] = {}
        for new in map(json.loads, record.read_text().splitlines()):
            known = found.setdefault(new["test"], new)
            if known is not new:  # of another process
                known["seconds"] = max(known["seconds"], new["seconds"])
                known["passed"] &= new["passed"]
                for name, lines in new["lines"].items():
                    known["lines"][name] = [*known["lines"].get(name, ()), *lines]
        return [each for each in found.values() if each["passed"]]

    def of(self, mutant: Mutant) -> tuple[list[str], float, bool]:
        """Return tests, how long they took, and True if one of them runs a line of the mutant."""
        lines, own = set(mutant.lines), f"/test_{Path(mutant.path).stem}.py::"
        with self._guard:
            there = [each for each in self._records if mutant.path in each["lines"]]
        found = [each for each in there if not lines.isdisjoint(each["lines"][mutant.path])]
        # Of a function with a cache, only the first test runs the lines.
        more = [each for each in there if own in each["test"] and each not in found]
        if not found and mutant.path.startswith(f"gda/{self.folder}/"):
            more = there

        # Most are killed by any test. The others, by tests of just what the module does.
        ways = [
            (_QUICK_SECONDS, lambda each: (own not in each["test"], each["seconds"])),
            (_SECONDS, lambda each: -len(set(each["lines"][mutant.path]))),
        ]
        seconds, chosen = 0.0, dict[str, None]()
        for most, rank in ways:
            for each in sorted([*found, *more], key=rank):
                if each["test"] not in chosen and seconds + each["seconds"] <= most:
                    seconds += each["seconds"]
                    chosen[each["test"]] = None
        return [*chosen], seconds, bool(found)


def _digest(folder: str) -> str:
    """Return a text that changes with the files that decide what the tests of a folder run."""
    files = [*ROOT.glob("gda/**/*.py"), *ROOT.glob(f"tests/{folder}/**/*.py")]
    return hashlib.sha256(b"".join(each.read_bytes() for each in sorted(files))).hexdigest()[:12]


def tried(mutant: Mutant, copy: Copy, of_folders: Sequence[Tests]) -> str:
    """Return the fate of a mutant after the tests of its folder, and then those of others."""
    is_known = False
    copy.change(mutant, mutant.new)
    try:
        for tests in of_folders:
            chosen, seconds, is_run = tests.of(mutant)
            is_known |= is_run
            code, output = (
                copy.run(["-x", *chosen], _LEAST_LIMIT + 5 * seconds) if chosen else (0, "")
            )
            if code == 4 and not re.search("ERROR collecting|while loading conftest", output):
                sys.exit(f"pytest was called in a wrong way; is a test gone?\n{output[-2000:]}")
            if code != 0:
                how = "timeout" if code is None else "killed"
                return how if tests is of_folders[0] else f"{how} by tests/{tests.folder}"
    finally:
        copy.change(mutant, mutant.old)
    return "survived" if is_known else "survived, run by no test"


@cache
def all_mutants(folder: str) -> list[Mutant]:
    files = sorted((ROOT / "gda" / folder).rglob("*.py"))
    parts = [mutants_of(each.read_text(), str(each.relative_to(ROOT))) for each in files]
    return [*itertools.chain(*parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--number", type=int, default=200, help="of mutants, of all folders")
    parser.add_argument("--folders", nargs="+", choices=FOLDERS, default=FOLDERS)
    parser.add_argument("--only", default="", help="those in whose line of output is this text")
    parser.add_argument("--processes", type=int, default=2, help="that test at a time")
    options = parser.parse_args()
    work = ROOT / "build/mutants"
    work.mkdir(parents=True, exist_ok=True)
    each = -(-options.number // len(options.folders))
    sample: list[tuple[str, Mutant]] = []
    for folder in options.folders:
        there = all_mutants(folder)
        chosen = random.Random(f"{options.seed} {folder}").sample(there, min(each, len(there)))
        if options.only:
            chosen = [mutant for mutant in there if options.only in str(mutant)]
        sample += [(folder, mutant) for mutant in chosen]
    tests = {folder: Tests(folder, work, options.processes) for folder in FOLDERS}
    copies: SimpleQueue[Copy] = SimpleQueue()
    for number in range(options.processes):
        copies.put(Copy(work / f"copy-{number}"))
    fates: Counter[tuple[str, str]] = Counter()

    def fate_of(folder: str, mutant: Mutant) -> None:
        copy, begun = copies.get(), time.monotonic()
        try:
            fate = tried(mutant, copy, [tests[each] for each in FOLDERS[FOLDERS.index(folder) :]])
        finally:
            copies.put(copy)
        fates[folder, fate] += 1
        print(f"{fate:10} {time.monotonic() - begun:4.0f} s  {mutant}", flush=True)

    with ThreadPoolExecutor(options.processes) as pool:
        for done in [pool.submit(fate_of, *pair) for pair in sample]:
            done.result()
    heads = ("folder", "mutants", "tried", "killed", "by tests of another folder", "of tried")
    print("", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", sep="\n")
    for folder in options.folders:
        counts = Counter({fate: n for (of, fate), n in fates.items() if of == folder})
        killed = counts.total() - counts["survived"] - counts["survived, run by no test"]
        own, num_tried = counts["killed"] + counts["timeout"], counts.total()
        cells = (len(all_mutants(folder)), num_tried, own, killed - own)
        share = f"{killed / num_tried:.0%}" if num_tried else ""
        print(f"| `gda/{folder}` | {' | '.join(map('{:,}'.format, cells))} | {share} |")


if __name__ == "__main__":
    main()
