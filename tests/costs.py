"""The costs of a run, in its last lines, and the folder that saves some of them."""

import os
import resource
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gda.testing import forking

STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn")
DEAREST = 10

started: Counter[str] = Counter()
compiled_before = 0
omitted = 0  # tests, by order.choose_axes


def cache_folder() -> str:
    """Return the folder of JAX's cache of programs, one for each kind of processor.

    JAX's keys omit the kind.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kind = sorted({line for line in lines if line.lower().startswith(("flags", "features"))})
    folder = Path(__file__).parents[1] / ".jax_cache" / f"{zlib.crc32(repr(kind).encode()):x}"
    return os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder))


def begin() -> None:
    """Count the processes that this one starts and the programs that are new in the cache."""
    global compiled_before
    compiled_before = num_programs()
    sys.addaudithook(lambda event, _: started.update([event]) if event in STARTS else None)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    forking.end_servers()
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output.update(started=started.total(), omitted=omitted)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    global omitted
    output = getattr(node, "workeroutput", {})
    started["workers"] += output.get("started", 0)
    omitted = max(omitted, output.get("omitted", 0))  # each worker collects all tests


def num_programs() -> int:
    """Return the number of programs in JAX's cache."""
    return len([*Path(cache_folder()).glob("*-cache")])


@pytest.hookimpl(specname="pytest_terminal_summary")
def pytest_terminal_summary_costs(terminalreporter: Any, config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or config.pluginmanager.hasplugin("gda-process"):
        return
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    durations: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                durations[report.location[0]] += report.duration
    terminalreporter.section("costs")
    terminalreporter.line(
        f"{seconds:.0f} CPU s of this process and all that it started; {started.total()} processes "
        f"started by tests; {num_programs() - compiled_before} programs compiled that JAX's cache "
        "did not have"
    )
    dearest = [f"{file} {time:.1f} s" for file, time in durations.most_common(DEAREST)]
    terminalreporter.line(f"dearest files: {', '.join(dearest)}")
    if omitted:
        terminalreporter.line(
            f"omitted: {omitted} tests that differ from another only in the axes of their mesh, "
            "Auto or Explicit; --all-axes runs them too"
        )
