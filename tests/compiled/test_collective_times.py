"""The times of collectives, counted by hand, and beside measured ones."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gda
from gda.compiled.collective_times import Interconnect, collective_seconds
from gda.compiled.devices.device_kinds import kind_named
from gda.compiled.devices.device_speeds import DeviceSpeeds, Fit, Measured
from gda.compiled.torus import Torus

SPEEDS = DeviceSpeeds(
    {"bf16": 1e15},
    link=100.0,
    slow_link=10.0,
    measured=Measured(1, 1, 1, {"any": (Fit(2, 2.0, 0.5),)}),
    hop_seconds=1.0,
    slow_hop_seconds=3.0,
)


def collective(kind: str, nbytes: int, nbytes_output: int, **facts: Any) -> gda.Collective:
    groups = facts.pop("groups", ((0, 1, 2, 3),))
    shapes = ((nbytes,),), ("int8",), ((nbytes_output,),), ("int8",)
    return gda.Collective(
        kind, ("x",), *shapes, nbytes=nbytes, nbytes_output=nbytes_output, groups=groups, **facts
    )


def links_of_kind(name: str, *hosts: int) -> Interconnect:
    speeds = kind_named(name).speeds
    assert speeds is not None
    return Interconnect(speeds, hosts=hosts)


# Of four devices, each has a part of 100 bytes, or 400 bytes; two and two are on a host.
@pytest.mark.parametrize(
    ("found", "within", "between"),
    [
        (collective("all-gather", 100, 400), 300, 200 / 2),
        (collective("reduce-scatter", 400, 100), 300, 200 / 2),
        (collective("all-reduce", 400, 400), 600, 400 / 2),
        (collective("all-to-all", 400, 400), 300, 200),
        (collective("ragged-all-to-all", 400, 400), 0, 0),
        (collective("collective-permute", 400, 400, groups=(), pairs=((0, 1), (1, 2))), 400, 400),
        (collective("collective-permute", 400, 400, groups=(), pairs=((0, 1), (2, 3))), 400, 0),
        (collective("collective-permute", 400, 400, groups=(), pairs=((0, 0), (2, 2))), 0, 0),
        (collective("all-reduce", 400, 400, groups=((0, 1), (2, 3))), 400, 0),
        (collective("all-reduce", 400, 400, groups=((0,), (1,))), 0, 0),
        (collective("all-gather", 400, 800, groups=()), 400, 0),  # unknown groups
    ],
)
def test_bytes_over_links_within_and_between_hosts(
    found: gda.Collective, within: int, between: float
) -> None:
    seconds = collective_seconds(found, Interconnect(SPEEDS, hosts=(0, 0, 0, 0)))
    start = 2 if found.groups != ((0,), (1,)) and found.pairs != ((0, 0), (2, 2)) else 0
    assert seconds == (within / 100, start + within / 50)
    bound = collective_seconds(found, Interconnect(SPEEDS, hosts=(0, 0, 1, 1))).bound
    # A device may send over both ways at once.
    assert bound == max(within / (110 if between else 100), between / 10)


def test_between_hosts_each_of_them_is_a_step() -> None:
    seconds = collective_seconds(
        collective("all-reduce", 400, 400), Interconnect(SPEEDS, hosts=(0, 1, 2, 3))
    )
    assert seconds == (60, pytest.approx(2 + 3 * 3 + 60 / 0.85))


def test_a_switch_that_adds_halves_an_all_reduce() -> None:
    found = collective("all-reduce", 900, 900, groups=(tuple(range(9)),))
    adds = Interconnect(SPEEDS._replace(reduces_in_switch=True), hosts=(0,) * 9)
    assert collective_seconds(found, Interconnect(SPEEDS, hosts=(0,) * 9)).bound == 16
    assert collective_seconds(found, adds).bound == 9
    assert kind_named("h100").speeds.reduces_in_switch  # pyright: ignore[reportOptionalMemberAccess]
    for name in ("a100", "h100-pcie", "l40s"):
        speeds = kind_named(name).speeds
        assert speeds is not None
        assert not speeds.reduces_in_switch


def test_a_bridge_connects_two_gpus() -> None:
    pair = collective("all-gather", 10**9, 2 * 10**9, groups=((0, 1), (2, 3)))
    four = collective("all-gather", 10**9, 4 * 10**9)
    over_pcie = links_of_kind("a100-pcie", 0, 0, 0, 0)
    assert collective_seconds(pair, over_pcie).bound == pytest.approx(1 / 332)
    # Each pair receives 2 GB over the slots of both.
    assert collective_seconds(four, over_pcie).bound == pytest.approx(1 / 32)
    assert collective_seconds(four, over_pcie).estimate > 3 / 32


def test_parts_between_slices_go_over_slow_links() -> None:
    found = collective("all-reduce", 400, 400, groups=(), is_between_slices=True)
    torus = Torus(((0, 0),), (False, False))
    two, four = (Interconnect(SPEEDS, torus=torus, slices={"x": n}) for n in (2, 4))
    assert collective_seconds(found, two) == (40, pytest.approx(3 + 40 / 0.85))
    assert collective_seconds(found, four) == (60, pytest.approx(9 + 60 / 0.85))


def test_a_torus_has_the_time_of_its_busiest_link_and_of_its_hops() -> None:
    line = Interconnect(SPEEDS, torus=Torus(((0,), (1,), (2,), (3,)), (False,)))
    for found, load, hops in (
        (collective("all-gather", 100, 400), 300, 3),
        (collective("all-reduce", 400, 400), 600, 6),
    ):
        seconds = collective_seconds(found, line)
        assert seconds == pytest.approx((load / 100, 2 + hops + load / 50))
    unknown = collective("all-gather", 400, 800, groups=())
    assert collective_seconds(unknown, line).bound == 4
    alone = collective("all-reduce", 400, 400, groups=((0,), (1,)))
    assert collective_seconds(alone, line) == (0, 0)


def test_two_devices_of_a_chip_have_a_link_of_their_own() -> None:
    chips = Torus(((0,), (0,), (1,), (1,)), (False,))
    found = collective("all-gather", 100, 200, groups=((0, 1), (2, 3)))
    assert collective_seconds(found, Interconnect(SPEEDS, 1000.0, chips)) == (0.1, 2.2)


# Times of NCCL on 8 H100, 8 B200 and 64 GB200, in microseconds, as the compiler's table has them.
@pytest.mark.parametrize(
    ("name", "size", "kind", "mib", "microseconds"),
    [
        ("h100", 8, "all-gather", 16, 82),
        ("h100", 8, "all-gather", 1024, 2730),
        ("h100", 8, "all-reduce", 1, 52),
        ("h100", 8, "all-reduce", 128, 670),
        ("h100", 8, "all-reduce", 1024, 4721),
        ("h100", 8, "reduce-scatter", 128, 412),
        ("h100", 8, "all-to-all", 1024, 2797),
        ("h100", 2, "all-reduce", 1024, 20 + 2**30 / 242e3),
        ("h100", 4, "all-gather", 1024, 17 + 2**30 / 434e3),
        ("b200", 8, "all-reduce", 1024, 50 + 2**30 / 345e3),
        ("gb200", 64, "all-reduce", 1024, 100 + 2**30 / 381e3),
        ("gb200", 64, "all-to-all", 1024, 2**30 / 648e3),
    ],
)
def test_estimates_are_those_that_were_measured(
    name: str, size: int, kind: str, mib: int, microseconds: float
) -> None:
    whole = mib * 2**20
    shard = whole // size if kind == "all-gather" else whole
    found = collective(kind, shard, whole, groups=(tuple(range(size)),))
    seconds = collective_seconds(found, links_of_kind(name, *[0] * size))
    assert seconds.bound < seconds.estimate
    assert seconds.estimate * 1e6 == pytest.approx(microseconds, rel=0.2)


@pytest.mark.topology
@pytest.mark.parametrize(
    ("topology", "shape", "axis", "over_gigabytes"),
    [
        ("v5e:4x4", {"data": 4, "model": 4}, "model", 2 * 3 / 4 / 50),  # a line
        ("v5e:16x16", {"data": 16, "model": 16}, "model", 15 / 16 / 50),  # a ring
        ("v5e:4x4", {"all": 16}, "all", 2 * 15 / 16 / 2 / 50),  # a corner has two links
        ("v5p:4x4x4", {"all": 64}, "all", 2 * 63 / 64 / 6 / 100),
        ("v5p:4x4x4", {"data": 16, "model": 4}, "model", 3 / 4 / 100),
        ("tpu7x:2x2x1", {"data": 4, "model": 2}, "model", 1 / 600),  # within a chip
        # Two devices of a chip share its links.
        ("tpu7x:2x2x1", {"data": 4, "model": 2}, "data", 2 * 2 * 3 / 4 / 2 / 100),
    ],
)
def test_an_all_reduce_on_tpus(
    topology: str, shape: dict[str, int], axis: str, over_gigabytes: float
) -> None:
    mesh = gda.rehearsal_mesh(topology, shape)
    x = gda.abstract(jax.ShapeDtypeStruct((2**13, 2**13), np.float32), mesh, P())

    def add(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, axis)

    add_all = jax.shard_map(add, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    (traffic,) = gda.rehearse(add_all, x).traffic
    assert (traffic.axes, traffic.nbytes) == ((axis,), 2**28)
    assert traffic.least_seconds == pytest.approx(2**28 * over_gigabytes / 1e9)
