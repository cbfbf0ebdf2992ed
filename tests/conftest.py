"""Eight virtual CPU devices, default signal handlers, and the mesh of most tests."""

import os
import re
import signal
import sys
from importlib.util import find_spec

from costs import COMPILER_FLAGS, cache_folder

# Tests start hundreds of processes; without bytecode each would compile the same modules again.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
os.environ["XLA_FLAGS"] = (
    f"{COMPILER_FLAGS} {os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
# The subject of most tests is not the speed of their programs, and all processes compile the same
# ones.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["JAX_COMPILATION_CACHE_DIR"] = cache_folder()
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# A process may read an entry that another has begun to write. It then compiles, with a warning.
os.environ["PYTHONWARNINGS"] = ",".join(
    f"ignore:Error {what} persistent compilation cache entry:UserWarning"
    for what in ("reading", "writing")
)

from collections.abc import Generator, Iterator
from typing import Any

import costs
import jax
import pytest
from costs import (  # noqa: F401, hooks
    pytest_collection_finish,
    pytest_runtest_protocol_costs,
    pytest_sessionfinish,
    pytest_terminal_summary_costs,
    pytest_testnodedown,
)
from hosts import hosts  # noqa: F401, a fixture
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from jax.sharding import AxisType, Mesh
from meshes import mesh_of
from on_accelerator import pytest_configure_accelerator, pytest_ignore_collect  # noqa: F401, hooks
from order import add_shuffle, pytest_collection_modifyitems, pytest_runtest_protocol  # noqa: F401
from trials import (  # noqa: F401, hooks and a fixture
    add_figures,
    pytest_runtest_makereport,
    pytest_terminal_summary,
    trials,
)

from gda.arrays.fingerprints import on_devices
from gda.launch.children import Children
from gda.layout.distribution import install_command

sys.dont_write_bytecode = False

on_devices._ROWS_PER_TURN = 2  # half of the time to compile a program for fingerprints

# A shell that starts the suite in the background, and nohup, leave these ignored, and so would be
# every program that a test starts and then interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

costs.begin()

collect_ignore = ["testing/suites"]

# The module of each compiler, and the extra that brings it.
_COMPILERS = {
    "tpu": ("libtpu", "rehearse"),
    "gpu": ("jax_plugins.xla_cuda13", "rehearse-gpu"),
}

# Libraries that the extra `test` brings and `test-core` does not.
_LIBRARIES = {"boto3", "einops", "equinox", "flax", "grain", "moto", "orbax", "sklearn"}

# Else each process parses all modules of gda and of the tests for constants to try, and a change of
# any module gives other examples.
providers.is_local_module_file = lambda _: False  # pyright: ignore[reportPrivateImportUsage]

settings.register_profile(
    "gda",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    max_examples=15,
    derandomize=True,  # so that JAX's cache has the programs of the next run
)
settings.register_profile(
    "torture", settings.get_profile("gda"), max_examples=500, derandomize=False
)
settings.load_profile("gda")


def pytest_addoption(parser: pytest.Parser) -> None:
    add_figures(parser)
    add_shuffle(parser)
    parser.addoption("--all-axes", action="store_true", help="give a test both kinds of `mesh`")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("topology")
    for kind in () if marker is None else marker.args or ("tpu",):
        module, extra = _COMPILERS[kind]
        if find_spec(module.partition(".")[0]) is None or find_spec(module) is None:
            pytest.skip(f"needs {module}: {install_command(extra)}")


def _need(missing: str | None) -> str:
    """Return the reason to skip a test of a library that is not installed, or an empty text."""
    library = (missing or "").partition(".")[0]
    return f"needs {library}: {install_command('test')}" if library in _LIBRARIES else ""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    missing = re.search(r"No module named '([\w.]+)'", report.longreprtext)
    if report.failed and missing and (reason := _need(missing[1])):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {reason}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if reason := _need(error.name):
            pytest.skip(reason)
        raise


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """The (4, 2) mesh of axes x and y over 8 devices, with Auto or with Explicit axes.

    In some folders the name of a test chooses the kind (``order.choose_axes``), unless
    ``--all-axes`` is given.
    """
    return mesh_of({"x": 4, "y": 2}, request.param)


@pytest.fixture
def auto_mesh() -> Mesh:
    return mesh_of({"x": 4, "y": 2})


@pytest.fixture
def explicit_mesh() -> Mesh:
    return mesh_of({"x": 4, "y": 2}, AxisType.Explicit)


@pytest.fixture
def optimizing_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let JAX optimise programs, here and in processes that start, as it does for users."""
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A program that forks processes that save."""
    from forks import Forks  # not in each process of a pool

    with Children() as children:
        forks = Forks(children, tmp_path_factory.mktemp("forks") / "log")
        yield forks
        forks.close()
