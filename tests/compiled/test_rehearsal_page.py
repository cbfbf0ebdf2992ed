"""Rehearsals as pictures, and as they are in a browser."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from browser import measure
from meshes import abstract, mesh_of

import gda
from gda.compiled.report.rehearsal_page import _parts, page_of

HOSTILE = "<script>alert(1)</script>&\"'"


@pytest.fixture(scope="module")
def rehearsal() -> gda.Rehearsal:
    """A step with a donated and another argument, an all-reduce and a result."""
    mesh = mesh_of({"x": 4, "y": 2})

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: ((x @ w) ** 2).sum())(w), x @ w

    w, x = abstract((64, 128), mesh, None, "y"), abstract((32, 64), mesh, "x")
    return gda.rehearse(jax.jit(step, donate_argnums=0), w, x)


@pytest.fixture(scope="module")
def too_large(rehearsal: gda.Rehearsal) -> gda.Rehearsal:
    """The answer of a compiler without enough memory, with hostile names everywhere."""
    assert rehearsal.peak_bytes is not None
    assert rehearsal.collectives is not None
    axes = (HOSTILE, "y")
    return dataclasses.replace(
        rehearsal,
        name=HOSTILE,
        device_kind=HOSTILE,
        mesh_shape={HOSTILE: 4, "y": 2},
        fits=False,
        capacity_bytes=rehearsal.peak_bytes // 2,
        arguments=tuple(
            each._replace(name=HOSTILE, dtype=HOSTILE, spec=(HOSTILE,))
            for each in rehearsal.arguments
        ),
        traffic=(gda.AxisTraffic(axes, 2, 4096, 1024), gda.AxisTraffic(None, None, None, 0)),
        collectives=gda.Collectives(
            tuple(
                dataclasses.replace(each, axes=axes, op_name=HOSTILE, source_file=HOSTILE)
                for each in rehearsal.collectives
            ),
            {HOSTILE: 4, "y": 2},
        ),
        temporaries=(gda.Temporary(HOSTILE, (8, 8), 256, HOSTILE, HOSTILE, 3),),
        message=f"RESOURCE_EXHAUSTED {HOSTILE}",
    )


def test_the_parts_add_up_to_the_peak(rehearsal: gda.Rehearsal) -> None:
    assert rehearsal.peak_bytes is not None
    parts = _parts(rehearsal)
    assert sum(parts.values()) == rehearsal.peak_bytes
    assert parts["arguments, donated"] == 64 * 64 * 4
    assert parts["arguments, not donated"] == 8 * 64 * 4
    too_large = dataclasses.replace(rehearsal, output_bytes=None, peak_bytes=2**20)
    assert sum(_parts(too_large).values()) == 2**20
    unknown = dataclasses.replace(too_large, peak_bytes=None)
    assert sum(_parts(unknown).values()) == rehearsal.argument_bytes


def test_everything_is_in_words_too(rehearsal: gda.Rehearsal, too_large: gda.Rehearsal) -> None:
    page = rehearsal._repr_html_()
    for words in ("capacity unknown", "arguments, donated 16.0 KiB", "P(None, &#x27;y&#x27;)"):
        assert words in page
    roomy = dataclasses.replace(rehearsal, fits=True, capacity_bytes=2**20)
    assert re.search(r"peak [\d.]+ KiB of 1.0 MiB, \d+%: [\d.]+ KiB free<", roomy._repr_html_())
    assert "too much (hatched)" in too_large._repr_html_()
    silent = dataclasses.replace(too_large, peak_bytes=None, capacity_bytes=None)
    assert "the compiler does not tell the peak" in silent._repr_html_()


def test_names_are_escaped(too_large: gda.Rehearsal) -> None:
    page = page_of([too_large, too_large])
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 20
    assert "http" not in page
    assert page.startswith("<!doctype html>")


MEASURE = """
const rect = (e) => {
  const {left, top, right, bottom} = e.getBoundingClientRect();
  return {left, top, right, bottom};
};
const [memory] = document.querySelectorAll(".gda-show h4 ~ div");
const [bar, excess] = memory.children;
return {
  memory: [...bar.children].map(rect),
  bar: rect(bar),
  excess: rect(excess),
  wide: document.documentElement.scrollWidth,
  requests: performance.getEntriesByType("resource").length,
};
"""


@pytest.mark.docs
def test_the_excess_is_behind_the_end_of_the_memory(
    tmp_path: Path, too_large: gda.Rehearsal
) -> None:
    assert too_large.peak_bytes is not None
    shown = dataclasses.replace(too_large, capacity_bytes=too_large.peak_bytes // 4)
    found = measure(shown._repr_html_(), MEASURE, tmp_path, width=800)
    bar, excess = found["bar"], found["excess"]
    end = bar["left"] + (bar["right"] - bar["left"]) / 4
    assert excess["left"] == pytest.approx(end, abs=2)
    assert excess["right"] == pytest.approx(bar["right"], abs=1)
    assert bar["right"] == pytest.approx(found["memory"][-1]["right"], abs=2)
    assert found["wide"] <= 800
    assert found["requests"] == 0
