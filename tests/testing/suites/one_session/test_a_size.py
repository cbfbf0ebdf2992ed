import os
import sys

import jax
import numpy as np
import pytest
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import NamedSharding, PartitionSpec

pytestmark = pytest.mark.processes(2, devices=2)


def test_a_collective(shared_tmp_path):
    assert "test_another_file" not in sys.modules  # before a test of it
    assert (jax.process_count(), jax.device_count()) == (2, 4)
    mesh = jax.make_mesh((4,), ("x",))
    x = jax.make_array_from_callback(
        (4,), NamedSharding(mesh, PartitionSpec("x")), lambda i: np.arange(4.0)[i]
    )
    assert float(x.sum()) == 6
    (shared_tmp_path / str(jax.process_index())).touch()
    sync_global_devices("both have written")
    assert sorted(os.listdir(shared_tmp_path)) == ["0", "1"]


def test_tmp_path_is_each_process_s_own(tmp_path, shared_tmp_path):
    (tmp_path / "file").touch(exist_ok=False)
    assert os.listdir(shared_tmp_path) == []


@pytest.mark.parametrize("value", [1, 2], ids=["one", "a::b[2]"])
def test_parameters_and_options(value, scale, monkeypatch, capsys):
    monkeypatch.setenv("VALUE", str(value))
    print(os.environ["VALUE"])
    assert capsys.readouterr().out == f"{value}\n"
    assert scale == 7


class TestClass:
    def test_method(self, record_property):
        record_property("answer", 42)

    def test_skip(self):
        pytest.skip("not today")


@pytest.mark.skipif("jax.process_count() == 2")
def test_skip_if():
    raise AssertionError


@pytest.mark.xfail(strict=True, raises=ZeroDivisionError)
def test_xfail_strict():
    print(1 / 0)


@pytest.mark.xfail
def test_xpass():
    pass
