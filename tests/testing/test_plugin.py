"""The pytest plugin, by suites that run in a pytest of their own."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest in a process of its own, as strict as one can be, and return its result."""
    for name in list(os.environ):
        if name.startswith("PYTEST_XDIST"):
            monkeypatch.delenv(name)

    def run(*arguments):
        return pytester.runpytest_subprocess(
            "-v",
            "-ra",
            "-Werror",
            "--strict-markers",
            "-pno:cacheprovider",
            *arguments,
            timeout=200,
        )

    return run


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie is none: who reaps those of a killed pytest is not pytest's to say.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_tests_run_in_processes_that_are_kept(pytester, run):
    pytester.makeconftest(
        """
        import os
        import pytest

        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=5"

        def pytest_addoption(parser):
            parser.addoption("--scale", type=int, default=1)

        @pytest.fixture
        def scale(request):
            return request.config.getoption("--scale")

        @pytest.fixture(scope="session")
        def once(tmp_path_factory):
            file = tmp_path_factory.getbasetemp() / "once"
            file.write_text(file.read_text() + "x" if file.exists() else "x")
            yield file
            assert file.read_text() == "x"
        """
    )
    pytester.makepyfile(
        test_first="""
        import os
        import jax
        import numpy as np
        import pytest
        from jax.sharding import NamedSharding, PartitionSpec

        pytestmark = pytest.mark.processes(2, devices=2)

        def test_a_collective(shared_tmp_path):
            assert (jax.process_count(), jax.device_count()) == (2, 4)
            mesh = jax.make_mesh((4,), ("x",))
            x = jax.make_array_from_callback(
                (4,), NamedSharding(mesh, PartitionSpec("x")), lambda i: np.arange(4.0)[i])
            assert float(x.sum()) == 6
            (shared_tmp_path / str(jax.process_index())).touch()
            from jax.experimental.multihost_utils import sync_global_devices
            sync_global_devices("both have written")
            assert sorted(os.listdir(shared_tmp_path)) == ["0", "1"]

        def test_tmp_path_is_each_process_s_own(tmp_path, shared_tmp_path):
            (tmp_path / "file").touch(exist_ok=False)
            assert os.listdir(shared_tmp_path) == []

        @pytest.mark.parametrize("value", [1, 2], ids=["one", "a::b[2]"])
        def test_parameters_and_options(value, scale, monkeypatch, capsys):
            monkeypatch.setenv("VALUE", str(value))
            print(os.environ["VALUE"])
            assert capsys.readouterr().out == f"{value}\\n"
            assert scale == 7

        class TestClass:
            def test_method(self, once, record_property):
                record_property("answer", 42)

            def test_skip(self):
                pytest.skip("not today")

        @pytest.mark.skipif("jax.process_count() == 2")
        def test_skip_if():
            assert False

        @pytest.mark.xfail(reason="one is enough")
        def test_xfail_in_one_process():
            assert jax.process_index() == 0

        @pytest.mark.xfail(strict=True, raises=ZeroDivisionError)
        def test_xfail_strict():
            1 / 0

        @pytest.mark.xfail
        def test_xpass():
            pass
        """,
        test_second="""
        import jax
        import pytest

        def test_here(shared_tmp_path, tmp_path, process_pool):
            assert shared_tmp_path == tmp_path
            pids = process_pool(2, devices=2).run(__import__("os").getpid)
            (shared_tmp_path.parent / "pids").write_text(str(pids))

        @pytest.mark.processes(2, devices=2)
        def test_there(once):
            assert jax.process_count() == 2
        """,
    )
    result = run("--scale=7", "--junitxml=results.xml", "--basetemp=temporary")
    result.assert_outcomes(passed=7, skipped=2, xfailed=2, xpassed=1)
    result.stdout.fnmatch_lines(
        [
            "test_first.py::test_a_collective PASSED*",
            "test_first.py::test_parameters_and_options[[]a::b[[]2[]][]] PASSED*",
            "test_first.py::TestClass::test_skip SKIPPED (not today)*",
            "test_second.py::test_here PASSED*",
            "SKIPPED [[]1[]] test_first.py:*: not today",
            "XFAIL test_first.py::test_xfail_in_one_process - one is enough",
        ]
    )
    cases = ElementTree.parse(pytester.path / "results.xml").findall(".//testcase")
    assert len(cases) == 12
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == 12
    (answer,) = ElementTree.parse(pytester.path / "results.xml").findall(".//property")
    assert answer.attrib == {"name": "answer", "value": "42"}
    # Two: the expected failure came in one process only, so they may have been out of step.
    assert len(list((pytester.path / "temporary").glob("processes0/pool*"))) == 2


def test_failures_are_those_of_a_process(pytester, run):
    pytester.makepyfile(
        test_it="""
        import logging
        import os
        import sys
        import time
        import jax
        import pytest
        from hypothesis import given, strategies as st

        pytestmark = pytest.mark.processes(2)

        def test_assertion():
            print("some output")
            logging.getLogger().warning("some log")
            where = jax.process_index()
            assert where == 0, "not here"

        def test_both():
            assert jax.process_count() == 3

        @pytest.fixture
        def broken():
            yield
            raise OSError("cannot tear down")

        def test_teardown(broken):
            pass

        @pytest.fixture
        def missing():
            raise OSError("cannot set up")

        def test_setup(missing):
            pass

        def test_skip_in_one():
            if jax.process_index() == 1:
                pytest.skip("only here")

        def test_exit():
            sys.exit(4)

        @pytest.mark.parametrize("word", ["on", "off"])
        def test_still_works(word):
            pass

        @pytest.mark.processes(2, device=2)
        def test_unknown_keyword():
            pass

        @pytest.mark.processes(0)
        def test_no_processes():
            pass

        @given(st.integers())
        def test_hypothesis(value):
            pass

        def test_wrong_fixture(process_pool):
            pass
        """
    )
    result = run("--tb=short")
    result.assert_outcomes(passed=3, failed=4, errors=6)
    result.stdout.re_match_lines_random(
        [
            r"test_it.py::test_assertion FAILED",
            r"test_it.py::test_setup ERROR",
            r"process 1 of 2 failed:",
            r"test_it.py:15: in test_assertion",
            r"E   AssertionError: not here",
            r"E   assert 1 == 0",
            r"-+ output of process 1 of 2 -+",
            r"some output",
            r"-+ Captured log call of process 1 of 2 -+",
            r"WARNING  root:.*some log",
            r"also failed: process [01] of 2: (Assertion.*)?assert 2 == 3.* \(.*py:18\)",
            r"E   OSError: cannot tear down",
            r"process 1 of 2 skipped this test, and others did not: Skipped: only here",
            r"E   SystemExit: 4",
            r"@pytest.mark.processes\(2, device=2\) is not understood; give the number of",
            r"@pytest.mark.processes\(0\) is not understood",
            r"@given under @pytest.mark.processes would draw other examples in each process.",
            r".*process_pool is not for tests under @pytest.mark.processes: they run in process",
            r"FAILED .*test_assertion - process 1 of 2: AssertionError: not here.*",
        ]
    )


def test_processes_that_die_or_hang_are_named(pytester, run):
    pytester.makepyfile(
        """
        import os
        import signal
        import time
        import jax
        import pytest

        def wait_for_godot():
            time.sleep(600)

        @pytest.mark.processes(2)
        def test_dies():
            print("last words", flush=True)
            if jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            wait_for_godot()

        @pytest.mark.processes(2, timeout=5)
        def test_hangs():
            if jax.process_index() == 0:
                wait_for_godot()

        @pytest.fixture
        def leaves():
            yield
            os._exit(5)

        @pytest.mark.processes(2)
        def test_ends_late(leaves):
            pass

        @pytest.mark.processes(2)
        def test_works_again():
            pass
        """
    )
    result = run()
    result.assert_outcomes(passed=2, failed=2, errors=1)
    result.stdout.re_match_lines(
        [
            r"_+ ERROR at teardown of test_ends_late _+",
            r"process . of 2 exited with code 5",
            r"_+ test_dies _+",
            r"process 1 of 2 was killed by SIGSEGV",
            r"The end of its output:",
            r"last words",
            r".* in test_dies",
            r"process 0 of 2 was still running 3 s later. Where it stood:",
            r".*, line 8 in wait_for_godot",
            r".*, line 15 in test_dies",
            r"_+ test_hangs _+",
            r"process 0 of 2 gave no answer in time \(timeout=5\)",
            r"Where it stood:",
            r".*, line 8 in wait_for_godot",
            r".*, line 20 in test_hangs",
            r"process 1 of 2 ended well.",
        ]
    )
    result.stdout.no_re_match_line(r'  File ".*_pytest.*')


def test_what_a_process_cannot_collect_is_told(pytester, run):
    pytester.makepyfile(
        """
        import os
        import pytest

        if "JAX_PROCESS_ID" in os.environ:
            raise OSError("no such volume")

        @pytest.mark.processes(1)
        def test_it():
            pass
        """
    )
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.re_match_lines(
        [
            r"process 0 of 1: this process did not find test_it in /.*\.py",
            r"E   OSError: no such volume",
        ]
    )


def test_hypothesis_calls_functions_in_a_pool(pytester, run):
    pytester.makepyfile(
        """
        import os
        import jax
        import pytest
        from hypothesis import given, settings, strategies as st

        pids = []

        def check(values):
            assert sum(values) < 3
            return os.getpid()

        @settings(max_examples=10, deadline=None, database=None)
        @given(st.lists(st.integers(0, 1)))
        def test_many_examples(process_pool, values):
            process_pool(2).run(check, values)

        @settings(max_examples=10, deadline=None, database=None)
        @given(st.just([0]))
        def test_one_example(process_pool, values):
            pids[:] = process_pool(2).run(check, values)

        @pytest.mark.processes(2)
        def test_marked():
            print("pid", os.getpid())
            assert False

        def test_same_processes(process_pool):
            assert process_pool(2).run(os.getpid) == pids
        """
    )
    result = run()
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.re_match_lines(
        [
            r"E .*ProcessError: process . of 2: AssertionError: assert 3 < 3",
            r"E .*where 3 = sum\(\[1, 1, 1\]\)",
        ]
    )


def test_every_worker_of_xdist_has_pools_of_its_own(pytester, run):
    pytester.makepyfile(
        """
        import os
        import jax
        import pytest

        @pytest.fixture(scope="module")
        def module_fixture():
            return os.getpid()

        @pytest.mark.parametrize("number", range(4))
        @pytest.mark.processes(2)
        def test_one_size(number, module_fixture, worker_id, shared_tmp_path):
            assert jax.process_count() == 2
            assert worker_id.startswith("gw")

        @pytest.mark.processes(1, devices=3)
        def test_another_size():
            assert jax.device_count() == 3

        @pytest.mark.processes(1, devices=3)
        def test_fails():
            assert jax.device_count() == 2

        def test_unmarked(request):
            groups = {
                item.name.partition("[")[0]: mark.args
                for item in request.session.items
                if (mark := item.get_closest_marker("xdist_group"))
            }
            assert groups == {
                "test_one_size": ("processes-2x1",),
                "test_another_size": ("processes-1x3",),
                "test_fails": ("processes-1x3",),
            }
        """
    )
    result = run("-n2", "--dist=loadgroup")
    result.assert_outcomes(passed=6, failed=1)
    result.stdout.re_match_lines([r"process 0 of 1 failed:", r"E  .*assert 3 == 2"])


def test_no_process_outlives_pytest(pytester):
    pytester.makepyfile(
        """
        import os
        import time
        import pytest

        @pytest.mark.processes(2)
        def test_sleeps(shared_tmp_path):
            file = shared_tmp_path / f"{os.getpid()}.tmp"
            file.touch()
            file.rename(file.with_suffix(".pid"))
            time.sleep(600)
        """
    )
    for number in (signal.SIGKILL, signal.SIGINT):
        base = pytester.path / f"temporary-{number}"
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", f"--basetemp={base}", "-pno:cacheprovider"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=pytester.path,
            env={**os.environ, "TMPDIR": str(pytester.path)},
        )
        deadline = time.monotonic() + 60
        while (
            len(files := list(base.glob("processes0/*/*.pid"))) < 2 and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        pids = [int(file.stem) for file in files]
        assert len(pids) == 2
        process.send_signal(number)
        process.wait(20)
        deadline = time.monotonic() + 5
        while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(is_running(pid) for pid in pids)


def test_pools_used_longest_ago_are_closed_when_there_are_too_many_processes(pytester, run):
    pytester.makepyfile(
        """
        import os
        import pytest
        from gda.testing import pools

        def test_few(process_pool, monkeypatch):
            monkeypatch.setattr(pools, "_MAX_PROCESSES", 4)
            one, two = process_pool(1), process_pool(2)
            one.run(os.getpid)
            pids = two.run(os.getpid)
            assert one.num_alive == 1
            assert process_pool(2, devices=2) is not two
            assert process_pool(2) is two
            process_pool(2, devices=2).run(os.getpid)
            assert (one.num_alive, two.num_alive) == (0, 2)
            assert two.run(os.getpid) == pids
        """
    )
    run().assert_outcomes(passed=1)


def test_a_suite_without_the_marker_pays_nothing(pytester, run):
    pytester.makepyfile(
        """
        import sys

        def test_light():
            assert "gda.testing.plugin" in sys.modules
            loaded = {"jax", "numpy", "hypothesis.strategies", "gda.testing.pool", "gda.launch"}
            assert not loaded & set(sys.modules)
        """
    )
    others = [
        "-pno:hypothesispytest",
        "-pno:benchmark",
        "-pno:xdist",
        "-pno:zarr",
        "-pno:jaxtyping",
    ]
    result = run(*others)
    result.assert_outcomes(passed=1)
    help_text = re.sub(r"\s+", " ", run("--markers").stdout.str())
    assert "@pytest.mark.processes(num_processes, *, devices=1, timeout=60): run the" in help_text
