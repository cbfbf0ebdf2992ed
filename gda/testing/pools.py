"""The pools of a pytest session, and the run of a test in one."""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import pytest

from gda.testing.answer import ProcessError, raise_first
from gda.testing.marker import size_of, wanted
from gda.testing.merge import failed_setup, merge
from gda.testing.pool import Pool
from gda.testing.session import SessionPlan, address_of

_SESSION_TIMEOUT = 120.0
# The least recently used pools are closed to keep at most this many processes.
MAX_PROCESSES = 16
# Options drawn at random by default: the seed of pytest-randomly.
_CHOSEN_OPTIONS = ("randomly_seed",)
_OVERRIDES = (
    "--capture=no",
    # pytest could not rewrite the asserts of gda.testing, which were imported before and are few.
    "-Wignore::pytest.PytestAssertRewriteWarning",
)

_Size = tuple[int, int]


class Pools:
    """Pools by number of processes and devices of each, shared by all tests of a session."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._config = session.config
        self._pools: dict[_Size, Pool] = {}
        self._numbers = itertools.count()
        self._ending = ExitStack()

    def get(self, num_processes: int, devices: int = 1) -> Pool:
        """Return the pool of a size, and close others if there would be too many processes."""
        size = (num_processes, devices)
        pool = self._pools.pop(size, None) or Pool(*size, prepare=self._start_session)
        self._pools[size] = pool  # now the last, as the most recently used
        others = [other for other in self._pools.values() if other is not pool]
        for other in others:
            if sum(each.num_alive for each in others) + num_processes <= MAX_PROCESSES:
                break
            other.close()
        return pool

    def run_test(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Run a test in all processes of its pool, and return its merged reports."""
        try:
            processes = wanted(item)
            pool = self.get(*processes.size)
            answers = pool.ask(("collect", str(item.path)), _SESSION_TIMEOUT)
            raise_first(answers, f"the import of {item.path}")
            command = "test", address_of(item), self._shared_directory(item)
            answers = pool.ask(command, processes.timeout)
        except (TypeError, ValueError, ProcessError) as error:
            return failed_setup(item, str(error))
        except pytest.fail.Exception as error:
            # From plugins that limit the time of a test. The pool has ended its processes.
            notes = "\n".join(getattr(error, "__notes__", []))
            return failed_setup(item, f"a plugin ended the test: {error}\n{notes}")
        return merge(item, answers, processes.timeout)

    def close(self) -> None:
        """End all processes."""
        try:
            for pool in self._pools.values():
                pool.close()
        finally:
            for pool in self._pools.values():
                pool.kill()
            self._ending.close()

    def _start_session(self, pool: Pool) -> None:
        config = self._config
        arguments = [*map(str, config.invocation_params.args), *_OVERRIDES]
        if hasattr(config.option, "numprocesses"):  # of xdist
            arguments.append("-n0")
        if hasattr(config.option, "no_cov"):  # of pytest-cov
            arguments.append("--no-cov")
        size = pool.num_processes, pool.devices
        items = [item for item in self._session.items if size_of(item) == size]
        plan = SessionPlan(
            arguments=tuple(arguments),
            directory=str(config.invocation_params.dir),
            script_arguments=tuple(sys.argv),
            files=tuple(dict.fromkeys(str(item.path) for item in items)),
            temporary=self._directory / f"pool{next(self._numbers)}",
            options={
                name: getattr(config.option, name)
                for name in _CHOSEN_OPTIONS
                if hasattr(config.option, name)
            },
            workerinput=getattr(config, "workerinput", None),
            has_cache=config.pluginmanager.hasplugin("cacheprovider"),
        )
        plan.temporary.mkdir()
        answers = pool.ask(("session", plan), _SESSION_TIMEOUT)
        raise_first(answers, "the start of pytest")

    def _shared_directory(self, item: pytest.Item) -> Path:
        name = re.sub(r"\W", "_", item.name)[:30]
        directory = self._directory / f"{name}{next(self._numbers)}"
        directory.mkdir()
        return directory

    @cached_property
    def _directory(self) -> Path:
        """A directory beside those of ``tmp_path``."""
        # As in xdist: no public name has the folder of tmp_path.
        factory = getattr(self._config, "_tmp_path_factory", None)
        if isinstance(factory, pytest.TempPathFactory):
            return factory.mktemp("processes")
        ours = tempfile.TemporaryDirectory(prefix="gda-testing-", ignore_cleanup_errors=True)
        return Path(self._ending.enter_context(ours))
