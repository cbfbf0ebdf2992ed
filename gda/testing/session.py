"""The pytest session inside a process of a pool, which runs its share of each test.

It is an ordinary session with the options of the controlling one, so fixtures, parameters and
conftest files work as usual. Only the next test comes from outside.
"""

from __future__ import annotations

import io
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gda.testing.channel import Channel

# The place of a test: its file, and the names inside it.
ItemAddress = tuple[str, tuple[str, ...]]

PLUGIN_NAME = "gda-process"  # of a session in a process of a pool
TEXT = "gda_text"  # the attribute of a report that has the text of a failure
shared_directory_key = pytest.StashKey[Path]()

_PLAIN = (str, int, float, bool, type(None))
_SENT = (*_PLAIN, list, tuple, dict)  # types of values in a report of pytest

# Options that select tests, stop the session, read from a terminal, or overwrite the report of the
# controlling session.
_NEUTRAL_OPTIONS = {
    "allure_report_dir": None,
    "collectonly": False,
    "color": "no",
    "deselect": None,
    "failedfirst": False,
    "htmlpath": None,
    "keyword": "",
    "lf": False,
    "markexpr": "",
    "maxfail": 0,
    "newfirst": False,
    "pastebin": None,
    "report_log": None,
    "reruns": 0,
    "stepwise": False,
    "trace": False,
    "usepdb": False,
    "xmlpath": None,
}


@dataclass(frozen=True)
class SessionPlan:
    """The facts that a process needs for its part of a pytest session.

    ``options`` are values that the controlling session chose and that must be the same here, and
    ``workerinput`` is the data of xdist, if that session is a worker of it. Each process makes its
    own directory in ``temporary``, and one for the cache if pytest ``has_cache``.
    """

    arguments: tuple[str, ...]
    directory: str
    script_arguments: tuple[str, ...]
    files: tuple[str, ...]
    temporary: Path
    options: dict[str, Any]
    workerinput: dict[str, Any] | None
    has_cache: bool


def address_of(item: pytest.Item) -> ItemAddress:
    """Return the place of a test, independent of the command line of pytest."""
    chain = item.listchain()
    files = [number for number, node in enumerate(chain) if isinstance(node, pytest.File)]
    inside = chain[files[-1] + 1 :] if files else chain
    return str(item.path), tuple(node.name for node in inside)


def run_session(channel: Channel, plan: SessionPlan) -> None:
    """Run a pytest session whose tests the pool names one by one."""
    os.chdir(plan.directory)
    sys.argv[:] = plan.script_arguments
    temporary = plan.temporary / f"process-{os.environ['JAX_PROCESS_ID']}"
    arguments = [
        *plan.arguments,
        f"--basetemp={temporary}",
        *([f"--override-ini=cache_dir={temporary}-cache"] if plan.has_cache else []),
    ]
    plugin = _ProcessPlugin(channel, plan)
    code = pytest.main(arguments, plugins=[plugin])
    if not plugin.has_started:
        line = f"pytest could not start in this process, and ended with {code!r}"
        channel.answer("raised", (line, plugin.page.getvalue().strip()))


class _ProcessPlugin:
    def __init__(self, channel: Channel, plan: SessionPlan) -> None:
        self.has_started = False
        self._config: pytest.Config | None = None
        self._channel = channel
        self._plan = plan
        self._session: pytest.Session | None = None
        self._modules: dict[str, list[pytest.Module]] = defaultdict(list)  # not imported yet
        self._items: dict[ItemAddress, pytest.Item] = {}
        self._collection_failures: list[str] = []
        self._reports: list[pytest.TestReport] = []
        self.page = io.StringIO()

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> None:
        if self._plan.workerinput is not None:
            setattr(early_config, "workerinput", self._plan.workerinput)  # noqa: B010

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config
        config.pluginmanager.register(object(), PLUGIN_NAME)  # a name for other plugins to see
        for name, value in {**_NEUTRAL_OPTIONS, **self._plan.options}.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)

    @pytest.hookimpl(trylast=True, specname="pytest_configure")
    def pytest_configure_terminal(self, config: pytest.Config) -> None:
        # Replaced, not removed: other plugins ask it for width and colours. Its own lines would
        # mix with those of the tests.
        reporter = config.pluginmanager.unregister(name="terminalreporter")
        if reporter is not None:
            config.pluginmanager.register(type(reporter)(config, self.page), "terminalreporter")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        items = session.perform_collect(list(self._plan.files))
        self._items = {address_of(item): item for item in items}  # of files that are no modules
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> pytest.CollectReport | None:
        """Collect no tests of a file yet: each is imported before its first test."""
        if self._session is not None or not isinstance(collector, pytest.Module):
            return None
        self._modules[str(collector.path)].append(collector)
        return pytest.CollectReport(collector.nodeid, "passed", None, [])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collection_failures.append(report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.has_started = True
        self._session = session
        self._channel.answer("returned", b"")
        self._channel.serve(self)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)
        has_trouble = report.outcome != "passed" or hasattr(report, "wasxfail")
        setattr(report, TEXT, self._text(report))
        for number, (name, value) in enumerate(report.user_properties):
            plain = value if isinstance(value, _PLAIN) else str(value)
            report.user_properties[number] = name, plain
        config = self._config
        assert config is not None
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        # Hooks of other plugins may have added anything to the report.
        data = {name: value for name, value in data.items() if isinstance(value, _SENT)}
        self._channel.answer("trouble" if has_trouble else "report", data)

    def collect(self, file: str) -> None:
        """Import the tests of a file, unless they were, and answer."""
        session = self._session
        assert session is not None
        config = session.config
        if modules := self._modules.pop(file, ()):
            items = [item for each in modules for item in session.genitems(each)]
            config.hook.pytest_collection_modifyitems(session=session, config=config, items=items)
            self._items.update({address_of(item): item for item in items})
        self._channel.answer("returned", b"")

    def run_test(self, address: ItemAddress, shared: Path) -> None:
        """Run one test with fixtures of its own, and answer."""
        item = self._items.get(address)
        if item is None:
            line = f"this process did not find {'::'.join(address[1])} in {address[0]}"
            self._channel.answer("raised", (line, "\n".join(self._collection_failures)))
            return
        item.config.stash[shared_directory_key] = shared
        self._reports.clear()
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        except BaseException as error:  # pytest.exit and KeyboardInterrupt get this far
            line = f"{type(error).__name__}: {error}"
            self._channel.answer("raised", (line, line))
            return
        outcome = " ".join(
            f"{report.when}:{report.outcome}:{hasattr(report, 'wasxfail')}"
            for report in self._reports
        )
        self._channel.answer("returned", b"", outcome)

    def _text(self, report: pytest.TestReport) -> str:
        """Return the text of pytest for a failure; ``longreprtext`` would lose an indent."""
        if report.longrepr is None or self._config is None:
            return ""
        self.page.seek(0)
        self.page.truncate()
        report.toterminal(self._config.get_terminal_writer())
        return self.page.getvalue().strip("\n")
