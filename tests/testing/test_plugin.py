"""The pytest plugin, by the suites of `suites/`, each in a pytest of its own."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from running import USUAL, is_running, python, wait_for, wait_until_gone

from gda.testing.forking import Forked

SUITES = Path(__file__).with_name("suites")
# As strict as one can be, and without plugins that take long to import and are not used.
OPTIONS = ["-v", "-ra", "-Werror", "--strict-markers", "--basetemp=temporary"]
OPTIONS += [f"-pno:{name}" for name in ("cacheprovider", "benchmark", "zarr", "jaxtyping")]
# Forked with JAX and gda imported. Its own pools are forked from it.
FORKED = [*OPTIONS, "-Wignore::pytest.PytestAssertRewriteWarning"]

# A group, because most tests look at one run.
pytestmark = pytest.mark.xdist_group("plugin")


def copy(suite: str, folder: Path) -> Path:
    return shutil.copytree(SUITES / suite, folder, dirs_exist_ok=True)


def run(suite: str, folder: Path, *options: str) -> pytest.LineMatcher:
    """Run a suite in a new interpreter and return what pytest printed."""
    names = ("PYTEST_", "XLA_FLAGS", "JAX_PLATFORMS")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *options],
        cwd=copy(suite, folder),
        env={k: v for k, v in os.environ.items() if not k.startswith(names)} | {"COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=550,
    )
    print(done.stdout)
    return pytest.LineMatcher(done.stdout.splitlines())


def outcomes(printed: pytest.LineMatcher, file: str = "") -> dict[str, int]:
    """Count what pytest says of the tests of a file, or of all, while they run."""
    words = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
    line = rf"^(?:\[gw\d\] \[ *\d+%\] )?(?:({words}) )?{file}\S*::.*?(?: ({words})\b.*)?$"
    summary = printed.str().partition("short test summary")[0]
    found = (first or second for first, second in re.findall(line, summary, re.M))
    return dict(Counter(filter(None, found)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("suite")


@pytest.fixture(scope="module")
def printed(folder: Path) -> pytest.LineMatcher:
    """All the files of one session, which share their processes as tests of one suite do."""
    options = ["--tb=short", "--scale=7", "--junitxml=results.xml"]
    words, cwd = [*FORKED, *options], copy("one_session", folder)
    done = python(*words, how="pytest", cwd=cwd, timeout=550, COLUMNS="200")
    print(done.stdout, done.stderr)
    return pytest.LineMatcher(done.stdout.splitlines())


def test_tests_run_in_processes(printed: pytest.LineMatcher, folder: Path) -> None:
    counts = {"PASSED": 5, "SKIPPED": 2, "XFAIL": 1, "XPASS": 1}
    assert outcomes(printed, "test_a_size") == counts
    assert outcomes(printed, "test_another_file") == {"PASSED": 2, "XFAIL": 1}
    assert outcomes(printed, "below/test_first") == outcomes(printed, "below/test_second")
    assert outcomes(printed, "below/test_second") == {"PASSED": 1}
    printed.fnmatch_lines_random(
        [
            "test_a_size.py::test_a_collective PASSED*",
            "test_a_size.py::test_parameters_and_options[[]a::b[[]2[]][]] PASSED*",
            "test_a_size.py::TestClass::test_skip SKIPPED (not today)*",
            "test_another_file.py::test_here PASSED*",
            "SKIPPED [[]1[]] test_a_size.py:*: not today",
            "XFAIL test_another_file.py::test_xfail_in_one_process - one is enough",
        ]
    )
    results = ElementTree.parse(folder / "results.xml")
    cases = {(case.get("classname"), case.get("name")) for case in results.iter("testcase")}
    assert (
        len([name for name in cases if name[0].startswith(("test_a_size", "test_another"))]) == 12
    )
    properties = {each.get("name"): each.get("value") for each in results.iter("property")}
    assert properties["answer"] == "42"


def test_processes_are_kept_unless_they_may_be_out_of_step(
    folder: Path, printed: pytest.LineMatcher
) -> None:
    # Of 2 x 2: at first, and in test_too_many after a failure in one process.
    # Of 2 x 1: at first, after each of three deaths and hangs, after a failure and a skip in one
    # process. Of 1 x 1: once, in test_too_many, for which the pools used longest ago are closed.
    assert outcomes(printed, "test_too_many") == {"PASSED": 1}
    assert len(list(folder.glob("temporary/processes0/pool*"))) == 2 + 6 + 1


def test_failures_are_those_of_a_process(printed: pytest.LineMatcher) -> None:
    counts = {"PASSED": 3, "FAILED": 4, "ERROR": 6}
    assert outcomes(printed, "test_failures") == counts
    printed.re_match_lines_random(
        [
            r"test_failures.py::test_assertion FAILED",
            r"test_failures.py::test_setup ERROR",
            r"process 1 of 2 failed:",
            r"test_failures.py:16: in test_assertion",
            r"E   AssertionError: not here",
            r"E   assert 1 == 0",
            r"-+ output of process 1 of 2 -+",
            r"some output",
            r"-+ Captured log call of process 1 of 2 -+",
            r"WARNING  root:.*some log",
            r"also failed: process [01] of 2: (Assertion.*)?assert 2 == 3.* \(.*py:20\)",
            r"E   OSError: cannot tear down",
            r"process 1 of 2 skipped this test, but others did not: Skipped: only here",
            r"E   SystemExit: 4",
            r"@pytest.mark.processes is not valid: .*argument 'device'.*; give the number of p",
            r"num_processes must be a positive integer, not 0",
            r"@given under @pytest.mark.processes would draw other examples in each process.",
            r".*process_pool is not for tests under @pytest.mark.processes, which run in process",
            r"FAILED .*test_assertion - process 1 of 2: AssertionError: not here.*",
        ]
    )


def test_processes_that_die_or_hang_are_named(printed: pytest.LineMatcher) -> None:
    assert outcomes(printed, "test_deaths") == {"PASSED": 2, "FAILED": 2, "ERROR": 1}
    printed.re_match_lines(
        [
            r"_+ ERROR at teardown of test_ends_late _+",
            r"process . of 2 exited with code 5",
            r"_+ test_dies _+",
            r"process 1 of 2 was killed by SIGSEGV",
            r"The end of its output:",
            r"last words",
            r".* in test_dies",
            r"process 0 of 2 was still running 3 s later. Its stack:",
            r".*, line \d+ in wait_for_godot",
            r".*, line \d+ in test_dies",
            r"_+ test_hangs _+",
            r"process 0 of 2 gave no answer in time \(timeout=5\)",
            r"Its stack:",
            r".*, line \d+ in wait_for_godot",
            r".*, line \d+ in test_hangs",
            r"process 1 of 2 succeeded.",
        ]
    )
    printed.no_re_match_line(r'  File ".*_pytest.*')


def test_collection_error_of_a_process_is_shown(printed: pytest.LineMatcher) -> None:
    assert outcomes(printed, "test_not_in_processes") == {"ERROR": 1}
    printed.re_match_lines_random(
        [
            r"process . of 2: this process did not find test_it in /.*\.py",
            r"E   OSError: no such volume",
        ]
    )


def test_hypothesis_calls_functions_in_a_pool(printed: pytest.LineMatcher) -> None:
    assert outcomes(printed, "test_hypothesis") == {"PASSED": 2, "FAILED": 2}
    printed.re_match_lines(
        [
            r"E .*ProcessError: process . of 2: AssertionError: assert 3 < 3",
            r"E .*where 3 = sum\(\[1, 1, 1\]\)",
        ]
    )


@pytest.fixture(scope="module")
def in_workers(tmp_path_factory: pytest.TempPathFactory) -> tuple[pytest.LineMatcher, Path]:
    """A session in two workers of xdist: what pytest printed, and its folder."""
    folder = tmp_path_factory.mktemp("workers")
    return run("workers", folder, "-n2", "--dist=loadgroup", "--gda-update-golden"), folder


def test_each_size_starts_in_one_worker_of_xdist(
    in_workers: tuple[pytest.LineMatcher, Path],
) -> None:
    printed, folder = in_workers
    assert outcomes(printed, "test_workers") == {"PASSED": 8, "FAILED": 1}
    printed.re_match_lines([r"process 0 of 1 failed:", r"E  .*assert 1 == 2"])
    assert len(set(re.findall(r"^\[(gw\d)\] .*@processes-1x1", printed.str(), re.M))) == 1
    assert len(list((folder / "temporary").glob("popen-*/processes0/pool*"))) == 1


def test_the_option_for_golden_files_reaches_workers_and_processes(
    in_workers: tuple[pytest.LineMatcher, Path],
) -> None:
    printed, _ = in_workers
    assert outcomes(printed, "test_golden") == {"PASSED": 2}
    printed.fnmatch_lines(["GDA_UPDATE_GOLDEN is restored"])


def test_no_process_outlives_pytest(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        process = Forked(
            "forked_program:pytest",
            *FORKED,
            process_group=os.getpgrp(),
            env={**os.environ, **USUAL},
            stdin=out.fileno(),
            stdout=out.fileno(),
            stderr=out.fileno(),
            cwd=copy("endless", tmp_path),
        )
    try:
        wait_for([tmp_path / "pid"])
        pids = [int((tmp_path / "pid").read_text())]
        assert is_running(pids[0])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    wait_until_gone(pids)


def test_a_suite_without_the_marker_imports_little_and_keeps_its_environment(
    tmp_path: Path,
) -> None:
    printed = run("light", tmp_path, "-pno:hypothesispytest", "-pno:xdist")
    assert outcomes(printed) == {"PASSED": 1}
