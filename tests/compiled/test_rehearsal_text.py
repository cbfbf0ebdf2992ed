"""The tables of rehearsals as HTML."""

import dataclasses
import re
from typing import Any
from xml.etree import ElementTree

import jax
import pytest
from meshes import abstract, mesh_of

import gda
from gda.compiled.report.rehearsal_text import page_of

HOSTILE = "<script>alert(1)</script>&\"'"


@pytest.fixture(scope="module")
def rehearsal() -> gda.Rehearsal:
    """A step with a donated and another argument, an all-reduce and a result."""
    mesh = mesh_of({"x": 4, "y": 2})

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: ((x @ w) ** 2).sum())(w), x @ w

    w, x = abstract((64, 128), mesh, None, "y"), abstract((32, 64), mesh, "x")
    made = gda.rehearse(jax.jit(step, donate_argnums=0), w, x)
    # Of a program in JAX's cache, XLA writes none.
    product = gda.Temporary("float32", (8, 128), 4096, "dot", "step.py", 3)
    return dataclasses.replace(made, temporaries=(product,))


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


def test_all_tables_are_in_the_page(rehearsal: gda.Rehearsal, too_large: gda.Rehearsal) -> None:
    page = rehearsal._repr_html_()
    ElementTree.fromstring(page)
    assert page.count("<table") == 5
    for words in (": capacity unknown</p>", "P(None, &#x27;y&#x27;)", ">donated<", "all-reduce"):
        assert words in page
    assert ": does not fit</p>" in too_large._repr_html_()
    assert re.search(r"<td>of [\d.]+ KiB, 2\d\d%</td>", too_large._repr_html_())


def test_names_are_escaped(too_large: gda.Rehearsal) -> None:
    page = page_of([too_large, too_large])
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 20
    assert "http" not in page
    assert page.startswith("<!doctype html>")
