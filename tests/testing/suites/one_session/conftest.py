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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    report.detail = lambda: "of another plugin, which cannot be sent to another process"
    return report
