"""The order of the tests, their workers, and their time limits."""

import functools
import random
import re
import signal
import zlib
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import costs
import pytest
from jax.sharding import AxisType

from gda.testing.marker import is_marked, size_of

# Seconds after which a test fails, one of many trials or examples, and one on an accelerator, which
# is at hand for minutes. Before that, at `faulthandler_timeout`, pytest shows where its threads
# stand.
LIMIT, LONG, SHORT = 600, 2 * 3600, 100

# Seconds for a test in the processes of a pool.
POOL = 200

# Files of fewer tests are not kept together: their tests fill the gaps at the end.
MANY = 40

# The folder of which every test of `mesh` has both kinds of axes: its code reads the axes.
ALL_AXES = Path(__file__).parent / "layout"

# Files without a group whose tests take longest: they start before those of other files without
# one, so that none of them is left at the end.
LONGEST = ("test_kills.py", "test_soak.py", "launch/test_launch.py")


def add_shuffle(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run files, and tests of each, in any order")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark, shuffle, and keep in one worker all tests of pools, and those of a file of many.

    Those of a file share what is compiled, and fixtures that take long to make.
    """
    if not config.getoption("--all-axes") and not config.pluginmanager.hasplugin("gda-process"):
        chosen = choose_axes(items)
        costs.omitted = len(items) - len(chosen)
        items[:] = chosen
    if seed := config.getoption("--shuffle"):
        items.sort(key=lambda item: place_of(item, seed))
    sizes = Counter(item.path for item in items)
    for item in items:
        if is_marked(item):
            marker: Any = item.get_closest_marker("processes")
            given = {"timeout": POOL, **marker.kwargs}
            item.add_marker(pytest.mark.processes(*marker.args, **given), append=False)
        if item.get_closest_marker("xdist_group") is not None:
            continue
        if is_marked(item) or "process_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("processes"))
        elif sizes[item.path] >= MANY:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if hasattr(config, "workerinput") and not config.getoption("--shuffle"):
        items.sort(key=rank)


def rank(item: pytest.Item) -> tuple[int, ...]:
    """Return the rank of a test in a worker: processes, groups, the longest files, and others."""
    if is_marked(item):
        return 0, *(size_of(item) or ())
    if item.get_closest_marker("xdist_group") is not None:
        return (1,)
    return (2 if item.path in _paths(LONGEST) else 3,)


@functools.cache
def _paths(names: tuple[str, ...]) -> set[Path]:
    return {Path(__file__).parent / name for name in names}


def choose_axes(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep one of two tests that differ in the axes of the fixture ``mesh`` only.

    The choice is the same in all processes. A test that is alone, because the command line names
    it, is kept, and so are both in the folder ``ALL_AXES``.
    """
    pairs: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        is_one_of_two = (
            callspec is not None
            and isinstance(callspec.params.get("mesh"), AxisType)
            and ALL_AXES not in item.path.parents
        )
        name = re.sub("auto|explicit", "", item.name) if is_one_of_two else item.nodeid
        pairs.setdefault((str(item.path), name), []).append(item)
    chosen = {
        pair[zlib.crc32(f"{pair[0].path.name} {name}".encode()) % len(pair)]
        for (_, name), pair in pairs.items()
    }
    return [item for item in items if item in chosen]


def place_of(item: pytest.Item, seed: str) -> list[float]:
    parts = item.nodeid.split("::")[0], item.nodeid
    return [random.Random(f"{seed} {part}").random() for part in parts]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that hangs, wherever Python code waits."""
    is_long = item.get_closest_marker("torture") or item.config.getoption("--figures")
    is_short = item.get_closest_marker("accelerator")
    limit = LONG if is_long else SHORT if is_short else LIMIT

    def fail(*_: object) -> None:
        pytest.fail(f"{item.nodeid} took more than {limit} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(limit)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
