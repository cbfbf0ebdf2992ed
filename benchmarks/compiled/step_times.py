"""Estimates beside published and measured steps: the tables of ``docs/step-times.md``.

    python -m benchmarks.compiled.step_times card published order

``card`` has programs that one H100 ran, and needs JAX's plugin for CUDA. ``published`` has steps of
MaxText, and needs libtpu; ``published=v6e`` has those whose names contain it. ``order`` measures
meshes of CPU devices, on a machine that does nothing else. Each keeps its figures in
``step_times.json``, and writes the page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gda
from benchmarks.compiled import order_of_meshes, steps
from benchmarks.compiled.llama import BF16, Model, Training, operations, step
from gda.compiled.devices.device_kinds import kind_of_device, num_devices_of

HERE = Path(__file__).parent
FIGURES, MEASURED = HERE / "step_times.json", HERE / "steps_on_h100.jsonl"
PAGE = HERE.parents[1] / "docs" / "step-times.md"


class Published(NamedTuple):
    """A step that somebody measured.

    Attributes:
      model, training, topology, tensor: the program and its mesh, ``fsdp`` and ``tensor``.
      seconds: of a step; or None.
      teraflops: a second and chip, of the operations that MaxText counts.
    """

    model: Model
    training: Training
    topology: str
    tensor: int = 1
    seconds: float | None = None
    teraflops: float = 0.0

    @property
    def measured(self) -> float:
        return self.seconds or operations(self.model, self.training) / self.teraflops / 1e12


_QKV = ("query", "key", "value")
_8B = Model(32, 4096, 32, 8, 14_336, 128_256)
_70B = Model(80, 8192, 64, 8, 28_672, 128_256)
_16B, _32B, _64B = (
    Model(layers, width, 64, 64, 28_672, 32_000)
    for layers, width in ((32, 4096), (32, 8192), (64, 8192))
)
_OF_8B = Training(3, 8192, ("input", *_QKV, "out"), is_offloaded=True)
_OF_70B = Training(2, 8192, ("input", *_QKV), is_offloaded=True)
_ON_V5P = (*_QKV, "gate", "up")
# github.com/AI-Hypercomputer: tpu-recipes, training/trillium and training/ironwood; maxtext,
# MaxText/configs/v5e and v5p. 16B to 64B have the sizes of MaxText's global_parameter_scale.
PUBLISHED = {
    "Llama 3.1 8B, 8 v6e": Published(_8B, _OF_8B, "v6e:2x4", seconds=3.443),
    "Llama 3.1 8B, 16 v6e": Published(_8B, _OF_8B, "v6e:4x4", seconds=3.393),
    "Llama 3.1 70B, 32 v6e": Published(
        _70B, _OF_70B._replace(weights=BF16), "v6e:4x8", seconds=17.790
    ),
    "Llama 3.1 70B, 64 v6e": Published(_70B, _OF_70B, "v6e:8x8", seconds=18.688),
    "Llama 3.1 70B, 128 v6e": Published(
        _70B, _OF_70B._replace(batch=4), "v6e:8x16", seconds=34.786
    ),
    "Llama 3.1 70B, 256 v6e": Published(
        _70B, _OF_70B._replace(batch=5), "v6e:16x16", seconds=42.656
    ),
    "Llama 2 70B, 256 v6e": Published(
        Model(80, 8192, 64, 8, 28_672, 32_000),
        Training(3, 4096, _QKV, is_offloaded=True),
        "v6e:16x16",
        seconds=9.052,
    ),
    "GPT-3 175B, 256 v6e": Published(
        Model(96, 12_288, 96, 96, 49_152, 50_304, is_gated=False),
        Training(3, 2048),
        "v6e:16x16",
        seconds=17.182,
    ),
    "16B, 256 v5e": Published(_16B, Training(6, 2048), "v5e:16x16", teraflops=120),
    "32B, 256 v5e": Published(_32B, Training(4, 2048), "v5e:16x16", teraflops=132),
    "64B, 256 v5e": Published(_64B, Training(2, 2048), "v5e:16x16", teraflops=118),
    "32B, 64 v5p": Published(_32B, Training(7, 2048, _ON_V5P), "v5p:4x4x4", 4, teraflops=328),
    "64B, 64 v5p": Published(_64B, Training(3, 2048, _ON_V5P), "v5p:4x4x4", 4, teraflops=323),
    "Llama 3.1 70B, 64 tpu7x": Published(_70B, _OF_70B, "tpu7x:4x4x4", seconds=12.20),
}
# MaxText's runs on v6e of 8B and 70B have this option; the compiler is much faster with it.
_OPTIONS: dict[str, str | bool] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


# Figures: for each program its seconds, measured and estimated, and the bound.


def published(only: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name, row in PUBLISHED.items():
        if only in name:
            devices = num_devices_of(row.topology)
            shape = {"fsdp": devices // row.tensor, "tensor": row.tensor}
            mesh = gda.rehearsal_mesh(row.topology, shape)
            fun, args = step(mesh, row.model, row.training)
            compiled = fun.lower(*args).compile(compiler_options=_OPTIONS)
            found[name] = figures(gda.rehearse(compiled), row.measured)
    return found


def card(only: str) -> dict[str, dict[str, Any]]:
    lines = MEASURED.read_text(encoding="utf-8").splitlines()
    measured = {each["name"]: each["seconds"] for each in map(json.loads, lines)}
    sharding = NamedSharding(gda.rehearsal_mesh("h100:1", {"x": 1}), P())
    found = {}
    for name, make in steps.programs().items():
        if only not in name or name == "transformer_cudnn":  # it is traced with cuDNN only
            continue
        program, args = _abstract(make)
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
        )
        donated = tuple(range(program.donated))
        rehearsal = gda.rehearse(jax.jit(program.step, donate_argnums=donated), *args)
        found[name] = figures(rehearsal, measured[name])
    return found


def _abstract(make: Callable[[], steps.Program]) -> tuple[steps.Program, Any]:
    """Return a program, and the shapes of its arguments, which are not made."""
    made = []

    def arguments() -> Any:
        made.append(make())
        return made[0].arguments

    return (args := jax.eval_shape(arguments)) and made[0], args


def figures(rehearsal: gda.Rehearsal, measured: float) -> dict[str, Any]:
    seconds = rehearsal.seconds
    return {
        "measured": measured,
        "estimate": seconds.estimate,
        "bound": seconds.bound,
        "by": seconds.bounded_by,
        "kind": getattr(kind_of_device(rehearsal.device_kind), "name", None),
        "is_over_slow_links": any(each.nbytes_slow for each in rehearsal.traffic),
    }


def order(_: str) -> dict[str, dict[str, Any]]:
    jax.config.update("jax_num_cpu_devices", 8)
    found = order_of_meshes.order()[0]
    return {each.mesh: {"measured": each.measured, "estimate": each.estimate} for each in found}


# The page.


def times(found: dict[str, dict[str, Any]], head: str) -> str:
    return _table(
        [head, "measured", "estimate", "estimate / measured", "bound"],
        (
            [
                name,
                _seconds(each["measured"]),
                _seconds(each["estimate"]),
                f"{each['estimate'] / each['measured']:.2f}",
                f"{_seconds(each['bound'])}, {each['by']}",
            ]
            for name, each in found.items()
        ),
    )


def ranks(found: dict[str, dict[str, Any]]) -> str:
    rows = sorted(found.items(), key=lambda row: row[1]["estimate"])
    slowest = sorted(each["measured"] for each in found.values())
    columns = zip(*((each["estimate"], each["measured"]) for _, each in rows), strict=True)
    correlation = order_of_meshes.spearman(*map(list, columns))
    table = _table(
        ["mesh", "estimate", "measured", "place by estimate", "place measured"],
        (
            [
                f"`{name}`",
                _seconds(each["estimate"]),
                _seconds(each["measured"]),
                str(place),
                str(slowest.index(each["measured"]) + 1),
            ]
            for place, (name, each) in enumerate(rows, start=1)
        ),
    )
    return f"{table}\nSpearman's rank correlation is {correlation:.2f}.\n"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    first, *others = (f"| {' | '.join(cells)} |\n" for cells in (head, *rows))
    return first + "|---" * (first.count("|") - 1) + "|\n" + "".join(others)


TABLES: dict[str, tuple[Callable[[str], dict[str, dict[str, Any]]], Callable[..., str]]] = {
    "published": (published, lambda found: times(found, "step of MaxText")),
    "card": (card, lambda found: times(found, "program on one H100")),
    "order": (order, ranks),
}


def page(text: str, figures: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the page with the tables of these figures."""
    for name, (_, table_of) in TABLES.items():
        block = rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)"
        table = table_of(figures[name])
        text = re.sub(block, lambda _, table=table: table, text, flags=re.DOTALL)
    return text


def main(arguments: Iterable[str]) -> None:
    for argument in arguments:
        name, _, only = argument.partition("=")
        found = TABLES[name][0](only)
        kept = json.loads(FIGURES.read_text(encoding="utf-8"))
        kept[name] = kept[name] | found if only else found
        FIGURES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    kept = json.loads(FIGURES.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    main(sys.argv[1:])
