"""The table of kinds of devices."""

import re

import pytest

from gda.planning.device_kinds import KINDS, kind_named, kind_of_device, speeds_of_device

pytestmark = pytest.mark.no_jax


def test_a_kind_is_found_by_name_and_by_the_word_of_jax() -> None:
    assert kind_named("V6e ") is kind_of_device("TPU v6 lite")
    assert kind_of_device("TPU v5") is kind_named("v5p")
    assert kind_of_device("NVIDIA H100 80GB HBM3") is kind_named("h100")
    assert kind_of_device("cpu") is speeds_of_device("cpu") is None


def test_names_and_words_of_jax_are_unique() -> None:
    words = [word for kind in KINDS for word in kind.device_kinds]
    assert len(set(words)) == len(words)
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert all(kind.name == kind.name.lower() for kind in KINDS)


def test_jax_takes_a_part_of_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    kind = kind_named("h100")
    assert kind.capacity_bytes == kind.memory_bytes * 3 // 4
    for name, given in (
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5"),
        ("XLA_CLIENT_MEM_FRACTION", ".25"),
    ):
        monkeypatch.setenv(name, given)
        assert kind.capacity_bytes == int(kind.memory_bytes * float(given))
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(ValueError, match=r"must be a number such as 0\.9, not 'most'"):
        _ = kind.capacity_bytes
    assert kind_named("v5e").capacity_bytes == int(15.75 * 2**30)


def test_the_memory_of_an_h200_is_that_of_its_driver() -> None:
    # nvidia-smi has 143,771 MiB, and 97,871 MiB for a GH200 of 96 GB.
    assert kind_named("h200").memory_bytes == 143_771 * 2**20
    assert kind_of_device("NVIDIA GH200 480GB") is kind_named("gh200")
    assert kind_named("gh200").memory_bytes == 97_871 * 2**20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5", "no kind of device has the name 'v5'; did you mean v5p or v5e? known are v2,"),
        ("v7x", "no kind of device has the name 'v7x'; did you mean tpu7x? known are v2,"),
        ("abacus", "no kind of device has the name 'abacus'; known are v2,"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        kind_named(name)
