"""Estimates beside published and measured steps: the tables of ``docs/step-times.md``.

    python -m benchmarks.compiled.step_times card published order

``card`` has programs that one H100 ran, and needs JAX's plugin for CUDA. ``published`` has steps
that others published, and needs libtpu and that plugin; ``published=v6e`` has those whose names
contain it. ``order`` measures meshes of CPU devices, on a machine that does nothing else. Each
keeps its figures in ``step_times.json``, and writes the page.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
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
from gda.compiled.programs import stage_of

HERE = Path(__file__).parent
FIGURES, MEASURED = HERE / "step_times.json", HERE / "steps_on_h100.jsonl"
PAGE = HERE.parents[1] / "docs" / "step-times.md"


class Published(NamedTuple):
    """A step that somebody measured.

    Attributes:
      model, training, topology, data, tensor: the program and its mesh; ``fsdp`` has the rest.
      slices: of TPUs.
      seconds: of a step; or None.
      teraflops: a second and chip, of the operations that MaxText counts.
      rate: tokens a second and device.
      is_fit: constants of gda, or of these programs, were chosen with this step.
    """

    model: Model
    training: Training
    topology: str
    tensor: int = 1
    data: int = 1
    slices: int = 1
    seconds: float | None = None
    teraflops: float = 0.0
    rate: float = 0.0
    is_fit: bool = False

    @property
    def measured(self) -> float:
        if self.rate:
            return self.training.batch * self.training.tokens / self.rate
        return self.seconds or operations(self.model, self.training) / self.teraflops / 1e12


_QKV = ("query", "key", "value")
_MINIMAL = (*_QKV, "context", "out", "gate", "up")  # each product, but not the last of the MLP
_8B = Model(32, 4096, 32, 8, 14_336, 128_256)
_70B = Model(80, 8192, 64, 8, 28_672, 128_256)
_2_7B = Model(32, 4096, 32, 32, 11_008, 32_000)
_16B, _32B, _64B = (
    Model(layers, width, 64, 64, 28_672, 32_000)
    for layers, width in ((32, 4096), (32, 8192), (64, 8192))
)
_22B = Model(48, 6144, 24, 24, 24_576, 32_000, size=256, is_gated=False)
_52B = Model(32, 12_288, 32, 32, 49_152, 32_000, size=256, is_gated=False)
_MPT = {
    size: Model(layers, width, heads, heads, 4 * width, 50_368, width // heads, is_gated=False)
    for size, layers, width, heads in (
        ("7B", 32, 4096, 32),
        ("13B", 40, 5120, 40),
        ("30B", 48, 7168, 56),
        ("70B", 80, 8192, 64),
    )
}
_OF_8B = Training(3, 8192, ("input", *_QKV, "out"), is_offloaded=True)
_OF_70B = Training(2, 8192, ("input", *_QKV), is_offloaded=True)
_ON_V5P = (*_QKV, "gate", "up")
# Every second product is computed again, as torchtitan's selective option does.
_SELECTIVE = (*_QKV, "context", "up")
# github.com/AI-Hypercomputer: tpu-recipes, training/trillium and training/ironwood; maxtext,
# configs/tpu/v4, v5e and v5p. 16B to 64B have the sizes of MaxText's global_parameter_scale.
ON_TPUS = {
    "Llama 3.1 8B, 8 v6e": Published(_8B, _OF_8B, "v6e:2x4", seconds=3.443, is_fit=True),
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
    "22B, 64 v4": Published(_22B, Training(13, 2048), "v4:4x4x4", teraflops=156),
    "52B, 192 v4": Published(_52B, Training(7, 2048), "v4:4x4x12", teraflops=154),
    "22B, 2 x 64 v4": Published(
        _22B, Training(13, 2048), "v4:4x4x4", data=2, slices=2, teraflops=152
    ),
    "16B, 256 v5e": Published(_16B, Training(6, 2048), "v5e:16x16", teraflops=120),
    "32B, 256 v5e": Published(_32B, Training(4, 2048), "v5e:16x16", teraflops=132),
    "64B, 256 v5e": Published(_64B, Training(2, 2048), "v5e:16x16", teraflops=118),
    "16B, 2 x 256 v5e": Published(
        _16B, Training(6, 2048), "v5e:16x16", data=2, slices=2, teraflops=117
    ),
    "32B, 2 x 256 v5e": Published(
        _32B, Training(4, 2048), "v5e:16x16", data=2, slices=2, teraflops=128
    ),
    "32B, 64 v5p": Published(_32B, Training(7, 2048, _ON_V5P), "v5p:4x4x4", 4, teraflops=328),
    "64B, 64 v5p": Published(_64B, Training(3, 2048, _ON_V5P), "v5p:4x4x4", 4, teraflops=323),
    "32B, 2 x 64 v5p": Published(
        _32B, Training(7, 2048, _ON_V5P), "v5p:4x4x4", 4, data=2, slices=2, teraflops=319
    ),
    "Llama 3.1 70B, 64 tpu7x": Published(
        _70B, Training(2, 8192, ("input", *_QKV)), "tpu7x:4x4x4", seconds=12.20
    ),
}
# github.com/mosaicml/llm-foundry (scripts/train/benchmarking); pytorch/torchtitan (benchmarks);
# NVIDIA/JAX-Toolbox (docs/frameworks/maxtext). Of llm-foundry a step is a microbatch.
ON_GPUS = {
    "MPT 7B, 8 h100": Published(
        _MPT["7B"], Training(6, 2048, _MINIMAL), "h100:8", rate=10_643, is_fit=True
    ),
    "MPT 13B, 8 h100": Published(_MPT["13B"], Training(2, 2048, _MINIMAL), "h100:8", rate=4792),
    "Llama 2 7B, 8 h100": Published(_2_7B, Training(2, 4096, _MINIMAL), "h100:8", seconds=0.721),
    "MPT 30B, 16 h100": Published(
        _MPT["30B"], Training(10, 2048), "h100:2x8", rate=2263, is_fit=True
    ),
    "MPT 13B, 64 h100": Published(
        _MPT["13B"], Training(2, 2048, _MINIMAL), "h100:8x8", rate=4800, is_fit=True
    ),
    "MPT 7B, 128 h100": Published(
        _MPT["7B"], Training(6, 2048, _MINIMAL), "h100:16x8", rate=10_475
    ),
    "MPT 30B, 256 h100": Published(_MPT["30B"], Training(8, 2048), "h100:32x8", rate=2148),
    "MPT 70B, 64 h100": Published(_MPT["70B"], Training(8, 2048), "h100:8x8", rate=1039),
    "MPT 70B, 512 h100": Published(_MPT["70B"], Training(8, 2048), "h100:64x8", rate=1007),
    "Llama 3.1 8B, 8 h100-96": Published(
        _8B, Training(2, 8192, _SELECTIVE), "h100-96:8", rate=6667, is_fit=True
    ),
    "Llama 3.1 8B, 128 h100-96": Published(
        _8B, Training(2, 8192, _SELECTIVE), "h100-96:16x8", rate=6514
    ),
    "Llama 3.1 8B, 64 h100-96": Published(
        _8B, Training(12 / 8, 8192, _SELECTIVE), "h100-96:8x8", 8, rate=4378
    ),
    "Llama 3.1 70B, 256 h100-96": Published(
        _70B, Training(16 / 8, 8192), "h100-96:32x8", 8, rate=597
    ),
    "MPT 7B, 8 a100": Published(
        _MPT["7B"], Training(6, 2048, _MINIMAL), "a100:8", rate=4641, is_fit=True
    ),
    "MPT 13B, 8 a100": Published(_MPT["13B"], Training(2, 2048, _MINIMAL), "a100:8", rate=2262),
    "MPT 70B, 32 a100": Published(_MPT["70B"], Training(2, 2048), "a100:4x8", rate=373),
    "MPT 70B, 64 a100": Published(_MPT["70B"], Training(8, 2048), "a100:8x8", rate=410),
    "MPT 7B, 8 a100-40": Published(_MPT["7B"], Training(12, 2048), "a100-40:8", rate=3679),
    "MPT 7B, 128 a100-40": Published(
        _MPT["7B"], Training(18, 2048), "a100-40:16x8", rate=3623, is_fit=True
    ),
    "MPT 30B, 32 a100-40": Published(_MPT["30B"], Training(4, 2048), "a100-40:4x8", rate=857),
    "MPT 70B, 64 a100-40": Published(_MPT["70B"], Training(2, 2048), "a100-40:8x8", rate=276),
    "MPT 70B, 128 a100-40": Published(_MPT["70B"], Training(4, 2048), "a100-40:16x8", rate=376),
}
PUBLISHED = ON_TPUS | ON_GPUS
# MaxText's runs on v6e of 8B and 70B have this option; the compiler is much faster with it.
_OPTIONS: dict[str, str | bool] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
_ON_GPUS: dict[str, str | bool] = {"xla_gpu_enable_latency_hiding_scheduler": True}


# Figures: for each program its seconds, measured and estimated, and the bound.


def published(only: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name, row in PUBLISHED.items():
        if only in name:
            devices = num_devices_of(row.topology) * row.slices
            fsdp = devices // row.tensor // row.data
            shape = {"data": row.data, "fsdp": fsdp, "tensor": row.tensor}
            mesh = gda.rehearsal_mesh(row.topology, shape, num_slices=row.slices)
            fun, args = step(mesh, row.model, row.training)
            options = _ON_GPUS if name in ON_GPUS else _OPTIONS
            lowered: Any = stage_of(fun, args, {})
            compiled = lowered.lower().compile(compiler_options=options)
            found[name] = figures(gda.rehearse(compiled), row.measured)
            print(name, found[name], flush=True)
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


def of_publishers(found: dict[str, dict[str, Any]]) -> str:
    """Return the table of the rows that constants were chosen with, and that of the others."""
    fits, tests = (
        {
            name: found[name]
            for name, row in PUBLISHED.items()
            if name in found and row.is_fit is is_fit
        }
        for is_fit in (True, False)
    )
    names = (name.replace(", ", " on ") for name in PUBLISHED if name not in found)
    missing = textwrap.fill(", ".join(names), 104)
    return (
        f"{times(fits, 'fit: constants were chosen with these steps')}\n"
        f"{times(tests, 'test: nothing was chosen with these steps')}\n"
        f"Not rehearsed here, since the compiler takes too long or refuses:\n{missing}.\n"
    )


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
    "published": (published, of_publishers),
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
