import os

import pytest

import gda.testing.pool

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=5"


def pytest_addoption(parser):
    parser.addoption("--scale", type=int, default=1)


@pytest.fixture
def scale(request):
    return request.config.getoption("--scale")


def pytest_runtest_setup(item):
    # If all fail, one may be late; one that waits is to be seen soon.
    gda.testing.pool.GRACE = 3 if item.module.__name__ == "test_deaths" else 30


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    report.detail = lambda: "of another plugin, which cannot be sent to another process"
    return report
