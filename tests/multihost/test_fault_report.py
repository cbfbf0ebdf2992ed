"""The facts for a report of a fault."""

import platform
from importlib.metadata import version

import jax
import pytest
from running import python

import gda
from gda.cli import main


def test_it_has_versions_devices_and_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jax.device_count() == 8  # which an XLA_FLAGS of later does not change
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=\x1b[31m")
    packages, machine, devices, *settings = gda.report().split("\n")
    assert packages.startswith(f"jax-gda {version('jax-gda')}, jax {version('jax')}, jaxlib ")
    assert f"numpy {version('numpy')}" in packages
    assert machine.startswith(f"Python {platform.python_version()}, Linux {platform.machine()}, ")
    assert devices == "8 x cpu (cpu); process 0 of 1"
    assert r"XLA_FLAGS=--xla_dump_to=\x1b[31m" in settings  # beside those of who runs this
    assert main(["report"]) == 0
    assert capsys.readouterr().out == gda.report() + "\n"


def test_it_names_the_reason_why_there_are_no_devices() -> None:
    program = "import gda, jax; jax.config.update('jax_platforms', 'rocket'); print(gda.report())"
    done = python("-c", program)
    devices = done.stdout.splitlines()[2]
    assert devices.startswith("no devices: Unable to initialize backend 'rocket'")
