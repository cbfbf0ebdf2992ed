"""A pytest plugin: tests in several real processes of this machine, and golden files.

pytest finds it if gda is installed; ``-p no:gda`` omits it.

    @pytest.mark.processes(4, devices=2)
    def test_sum_over_all_hosts():
        mesh = jax.make_mesh((8,), ('x',))
        assert jax.process_count() == 4
        ...

The body runs in 4 processes, each with 2 virtual CPU devices, connected through
``jax.distributed``. Fixtures and parameters work; each process makes its own. A failure names the
process. If one dies or runs past ``timeout=60`` seconds, the failure has the stacks of all.
Processes are kept for the next test of the same size.

- The fixture ``shared_tmp_path`` is one directory for all processes of a test. Each process
  has its own ``tmp_path``.
- The fixture ``process_pool`` is for hypothesis, whose examples must be the same in all processes:
  ``process_pool(4, devices=2).run(function, *arguments)`` calls a function in them.
- With pytest-xdist, give ``-n 2 --dist loadgroup``: tests of one size then run in one worker, and
  processes of each size start once. Otherwise each worker starts processes of every size. For a
  test with ``process_pool``, add ``@pytest.mark.xdist_group("processes-4x2")``.

``pytest --gda-update-golden`` writes the golden files of ``gda.Rehearsal.check`` and
``gda.Layouts.check`` instead of comparing with them, in this process, the workers of xdist and the
processes of tests.

Every pytest run with gda installed imports this module, so it has no slow imports, and it changes
nothing in a run without the marker and the option.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gda.testing import marker

if TYPE_CHECKING:
    from gda.testing.pool import Pool
    from gda.testing.pools import Pools

_pools_key = pytest.StashKey["Pools"]()
_UPDATE_GOLDEN = "GDA_UPDATE_GOLDEN"  # as in gda.storage.golden_files, which need not be imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("gda").addoption(
        "--gda-update-golden",
        action="store_true",
        help="write the golden files of gda.Rehearsal.check and gda.Layouts.check, not compare",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", marker.HELP)
    if config.getoption("--gda-update-golden"):
        patch = pytest.MonkeyPatch()
        patch.setenv(_UPDATE_GOLDEN, "1")
        config.add_cleanup(patch.undo)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        size = marker.size_of(item)
        if size is not None and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"processes-{size[0]}x{size[1]}"))


@pytest.hookimpl(wrapper=True, specname="pytest_collection_modifyitems")
def pytest_collection_modifyitems_ids(items: list[pytest.Item]) -> Generator[None, None, None]:
    yield
    if not any(map(_needs_processes, items)):
        return
    for item in items:
        # xdist puts the group into an attribute that pytest 9.2 does not read (pytest-xdist 1386).
        with_group = getattr(item, "_nodeid", item.nodeid)
        if with_group != item.nodeid and hasattr(item, "_id"):
            setattr(item, "_id", type(getattr(item, "_id")).parse(with_group))  # noqa: B009, B010


def _needs_processes(item: pytest.Item) -> bool:
    return marker.is_marked(item) or "process_pool" in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not marker.is_marked(item) or _is_in_process(item.config):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _pools(item.session).run_test(item):
        item.ihook.pytest_runtest_logreport(report=report)
    _tear_down_unshared(item, nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _tear_down_unshared(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End fixtures of this process that the next test does not share, which pytest has kept."""
    runner = item.config.pluginmanager.get_plugin("runner")
    assert runner is not None
    call = pytest.CallInfo.from_call(
        lambda: runner.pytest_runtest_teardown(item, nextitem), when="teardown"
    )
    if call.excinfo is not None:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if pools := session.config.stash.get(_pools_key, None):
        pools.close()


@pytest.fixture(scope="session")
def process_pool(request: pytest.FixtureRequest) -> Callable[..., Pool]:
    """Return a function that gives a ``gda.testing.Pool``: ``process_pool(2, devices=4)``.

    Pools are shared with the tests under ``@pytest.mark.processes`` and end with the session.
    """
    if _is_in_process(request.config):
        pytest.fail(
            "process_pool is not for tests under @pytest.mark.processes, which run in processes of "
            "a pool already; remove the marker or the fixture",
            pytrace=False,
        )
    return _pools(request.session).get


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """Return a directory that all processes of a test share; without processes, ``tmp_path``."""
    if _is_in_process(request.config):
        from gda.testing.session import shared_directory_key

        return request.config.stash[shared_directory_key]
    return request.getfixturevalue("tmp_path")


def _pools(session: pytest.Session) -> Pools:
    # Imported here, because a suite without the marker does not need it.
    from gda.testing.pools import Pools

    stash = session.config.stash
    if _pools_key not in stash:
        stash[_pools_key] = Pools(session)
        session.config.add_cleanup(stash[_pools_key].close)
    return stash[_pools_key]


def _is_in_process(config: pytest.Config) -> bool:
    return config.pluginmanager.hasplugin("gda-process")
