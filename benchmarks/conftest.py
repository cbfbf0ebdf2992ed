"""Options of the benchmarks. The number of virtual devices is fixed before JAX starts."""

import os
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gda benchmarks")
    group.addoption(
        "--virtual-devices",
        type=int,
        default=8,
        choices=[8, 64, 1024],  # more abort in XLA
        help="run the works for so many virtual CPU devices (default: 8)",
    )
    group.addoption(
        "--only", action="append", default=[], help="the works that have this in section or name"
    )
    group.addoption("--quick", action="store_true", help="few rounds: only to see that it runs")


def pytest_configure(config: pytest.Config) -> None:
    count = config.getoption("--virtual-devices")
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}"
    os.environ["JAX_PLATFORMS"] = "cpu"  # where there are other devices too


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "work" in metafunc.fixturenames:
        from benchmarks.works import sections

        option: Any = metafunc.config.getoption
        metafunc.parametrize(
            ("work", "side"),
            [
                pytest.param(work, side, id=f"{work.name}: {way}")
                for works in sections(option("--only"), option("--quick")).values()
                for work in works
                if work.devices == option("--virtual-devices") and work.can_be_measured
                for side, way in enumerate(work.ways)
            ],
        )
