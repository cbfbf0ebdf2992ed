"""The range of measured steps that an estimate is printed with, and the page that lists them."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import gda
from gda.compiled.devices.measured_steps import OVER_SLOW_LINKS, WITHIN
from gda.compiled.rehearsal_facts import AxisTraffic

ROOT = Path(__file__).parents[2]
FIGURES = json.loads((ROOT / "benchmarks/compiled/step_times.json").read_text(encoding="utf-8"))
ROWS = {**FIGURES["published"], **FIGURES["card"]}


def rehearsal(device_kind: str, *, nbytes_slow: int = 0, **of: object) -> gda.Rehearsal:
    found = gda.rehearse(lambda x: x + 1, np.zeros(8, np.float32))
    seconds = gda.StepSeconds(compute=0.5, estimate=1.0, **of)  # type: ignore[arg-type]
    traffic = (AxisTraffic(("data",), 1, 8, nbytes_slow),)
    return dataclasses.replace(found, device_kind=device_kind, seconds=seconds, traffic=traffic)


def test_the_ranges_are_those_of_the_steps_on_the_page() -> None:
    found: defaultdict[tuple[str, bool], list[float]] = defaultdict(list)
    for row in ROWS.values():
        ratio = round(row["measured"] / row["estimate"], 2)
        found[row["kind"], row["is_over_slow_links"]].append(ratio)
    kept = {(kind, False): sorted(ratios) for kind, ratios in WITHIN.items()}
    kept |= {(kind, True): sorted(ratios) for kind, ratios in OVER_SLOW_LINKS.items()}
    assert kept == {key: sorted(ratios) for key, ratios in found.items()}
    page = (ROOT / "docs/step-times.md").read_text(encoding="utf-8")
    for name, row in ROWS.items():
        lines = [each for each in page.splitlines() if each.startswith(f"| {name} |")]
        assert any(f"| {row['estimate'] / row['measured']:.2f} |" in line for line in lines)


def test_an_estimate_is_printed_with_the_range_of_its_kind() -> None:
    found = rehearsal("TPU v6 lite")
    measured = found.measured_range
    assert measured is not None
    assert (measured.low, measured.high) == (min(WITHIN["v6e"]), max(WITHIN["v6e"]))
    assert measured.num_steps == len(WITHIN["v6e"])
    assert "(measured steps of v6e took 1." in str(found)
    assert found.to_dict()["measured_range"]["high"] == measured.high


@pytest.mark.parametrize(("device_kind", "slow"), [("NVIDIA L4", 0), ("TPU v6 lite", 64)])
def test_a_kind_without_measured_steps_says_so(device_kind: str, slow: int) -> None:
    found = rehearsal(device_kind, nbytes_slow=slow)
    assert found.measured_range is None
    assert "(no measured step of such devices is known" in str(found)
    assert found.to_dict()["measured_range"] is None


def test_a_bound_has_no_range() -> None:
    found = rehearsal("TPU v6 lite", not_counted=("the products of the kernel f",))
    assert found.measured_range is None
    assert "measured step" not in str(found)
