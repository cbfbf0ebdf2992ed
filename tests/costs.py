"""The costs of a run, in its last lines, and the folder that saves some of them."""

import gc
import os
import subprocess
import zlib
from collections import Counter
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from gda.testing import forking

# The tests and their imports stay. A search for garbage among these objects would take a quarter of
# the time until the first test.
gc.disable()

# Half of the time to compile a small program on CPU. Other versions of XLA lack the second flag.
COMPILER_FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):
    COMPILER_FLAGS += " --xla_cpu_use_fusion_emitters=false"

DEAREST = 25

started: Counter[str] = Counter()
seconds_of: Counter[str] = Counter()  # CPU seconds of a file
compiled_before = 0
omitted = 0  # tests, by order.choose_axes
_measured: list[Any] = ["", 0.0]  # the file whose tests run, and the CPU seconds before them


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
    os.register_at_fork(before=lambda: started.update(["os.fork"]))
    start = subprocess.Popen.__init__

    def counted(*args: Any, **options: Any) -> None:
        started["subprocess.Popen"] += 1
        start(*args, **options)

    subprocess.Popen.__init__ = counted


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children."""
    ticks_of: dict[int, int] = {}
    children_of: dict[int, list[int]] = {}
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError), open(f"/proc/{process}/stat") as stat:  # it may end
            fields = stat.read().rpartition(") ")[2].split()
            ticks_of[process] = sum(map(int, fields[11:15]))
            children_of.setdefault(int(fields[1]), []).append(process)
    family = [os.getpid()]
    for process in family:
        family += children_of.get(process, ())
    return sum(map(ticks_of.__getitem__, family)) / os.sysconf("SC_CLK_TCK")


def measure(file: str) -> None:
    """Begin with the tests of a file; what was spent since the last call was for the one before."""
    now = cpu_seconds()
    seconds_of[_measured[0]] += now - _measured[1]
    _measured[:] = file, now


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True, specname="pytest_runtest_protocol")
def pytest_runtest_protocol_costs(item: pytest.Item) -> None:
    if item.location[0] != _measured[0]:
        measure(item.location[0])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    forking.end_servers()
    measure("")
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output.update(started=started.total(), omitted=omitted, seconds_of=dict(seconds_of))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    global omitted
    output = getattr(node, "workeroutput", {})
    started["workers"] += output.get("started", 0)
    seconds_of.update(output.get("seconds_of", {}))
    omitted = max(omitted, output.get("omitted", 0))  # each worker collects all tests


def num_programs() -> int:
    """Return the number of programs in JAX's cache."""
    with suppress(FileNotFoundError):
        return sum(name.endswith("-cache") for name in os.listdir(cache_folder()))
    return 0


@pytest.hookimpl(specname="pytest_terminal_summary")
def pytest_terminal_summary_costs(terminalreporter: Any, config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or config.pluginmanager.hasplugin("gda-process"):
        return
    terminalreporter.section("costs")
    terminalreporter.line(
        f"{cpu_seconds():.0f} CPU s of this process and all that it started; {started.total()} "
        f"processes started by tests; {num_programs() - compiled_before} programs compiled that "
        "JAX's cache did not have"
    )
    del seconds_of[""]  # imports and collection
    dearest = [f"{file} {time:.1f}" for file, time in seconds_of.most_common(DEAREST)]
    terminalreporter.line(f"dearest files, in CPU s: {', '.join(dearest)}")
    if omitted:
        terminalreporter.line(
            f"omitted: {omitted} tests that differ from another only in the axes of their mesh, "
            "Auto or Explicit; --all-axes runs them too"
        )
