"""The table of kinds of devices."""

import re
from pathlib import Path

import pytest

from gda.compiled.devices.device_kinds import (
    KINDS,
    kind_named,
    kind_of_device,
    num_devices_of,
    speeds_of_device,
    topologies_of,
)


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


def test_each_kind_has_all_its_figures() -> None:
    for kind in KINDS:
        speeds = kind.speeds
        assert speeds is not None
        assert speeds.flops == speeds.flops_of("bf16") == speeds.flops_of("f16") > 1e13, kind.name
        assert speeds.flops_of("f32", "highest") <= speeds.flops_of("f32") <= speeds.flops
        assert 0.6 < speeds.measured.products < 1
        assert 0.8 < speeds.measured.memory < 1
        assert all(
            0 < fit.part < 1 for fits in speeds.measured.collectives.values() for fit in fits
        )
        assert speeds.links == (1 if kind.gpu else 2 * kind.dimensions)
        assert 1e11 < (kind.memory_bandwidth or 0) < 1e13
        assert speeds.slow_link <= speeds.link


# The figures of the vendors, of one device, in operations a second.
@pytest.mark.parametrize(
    ("name", "dtype", "precision", "teraflops"),
    [
        ("h100", "bf16", "default", 989.4),
        ("h100", "f32", "default", 494.7),
        ("h100", "f32", "high", 494.7),  # XLA takes TF32 for it too
        ("h100", "f32", "highest", 66.9),
        ("h100", "f4e2m1fn", "default", 1979),  # converted to a wider type
        ("a100", "f8e5m2", "default", 312),
        ("v5e", "f32", "default", 197),
        ("v5e", "f32", "high", 197 / 3),
        ("v5e", "f32", "highest", 197 / 6),
        ("v5e", "f8e4m3fn", "highest", 197),
        ("v5e", "f64", "default", 197),
        ("tpu7x", "s8", "default", 1153.5),
    ],
)
def test_products_are_as_fast_as_their_type(
    name: str, dtype: str, precision: str, teraflops: float
) -> None:
    speeds = kind_named(name).speeds
    assert speeds is not None
    assert speeds.flops_of(dtype, precision) == pytest.approx(teraflops * 1e12)


def test_the_fit_of_the_next_smaller_group_is_taken() -> None:
    speeds = speeds_of_device("NVIDIA H100 80GB HBM3")
    assert speeds is not None
    sizes = [speeds.measured.fit("all-reduce", size).devices for size in (2, 3, 4, 7, 8, 64)]
    assert sizes == [2, 2, 4, 4, 8, 8]
    permute = speeds.measured.fit("collective-permute", 8)
    assert permute == speeds.measured.fit("all-gather", 8)


@pytest.mark.parametrize(
    ("name", "topologies"),
    [
        ("v5e", "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"),
        ("v5p", "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16"),
        ("h100", "1 2 4 8 2x8 4x8 8x8 16x8 32x8 64x8 128x8"),
        ("gb200", "1 2 4 8 16 32 64 2x64 4x64 8x64 16x64"),
    ],
)
def test_topologies_of_a_kind_come_by_size(name: str, topologies: str) -> None:
    assert [*topologies_of(name)] == [f"{name}:{each}" for each in topologies.split()]
    counts = [*map(num_devices_of, topologies_of(name))]
    assert counts == sorted({*counts})


def test_the_page_has_the_figures_of_each_kind() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rehearsing.md").read_text(encoding="utf-8")
    tables = page.partition("<!-- kinds -->")[2].partition("<!-- end of kinds -->")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", tables, re.MULTILINE)
    assert [name for name, _ in rows] == [kind.name for kind in KINDS]
    for kind, (_, row) in zip(KINDS, rows, strict=True):
        speeds, cells = kind.speeds, row.replace(",", "").split(" | ")
        assert speeds is not None
        assert float(cells[0]) == pytest.approx(kind.memory_bytes / 2**30, abs=0.06)
        assert float(cells[1]) == pytest.approx((kind.memory_bandwidth or 0) / 1e9, rel=1e-3)
        assert float(cells[2]) == pytest.approx(speeds.flops / 1e12, rel=1e-3)
        narrow = re.findall(r"(\w\d) (\S+)", cells[-3])
        of_types = {name: speeds.flops_by_dtype.get(name) for name in ("f8", "s8", "s4", "f4")}
        expected = {name: each / 1e12 for name, each in of_types.items() if each}
        assert {name: float(figure) for name, figure in narrow} == pytest.approx(expected)
        assert float(cells[-2].split()[-1]) == speeds.link / 1e9
        assert float(cells[-1]) == speeds.slow_link / 1e9
