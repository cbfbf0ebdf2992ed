"""Load a small transformer from sharded safetensors files; each process reads only its part.

On a laptop: python examples/load_safetensors.py
In many processes, with a new folder that all of them see:
python -m gda.launch -n 4 --devices-per-process 2 examples/load_safetensors.py --folder FOLDER
"""

import argparse
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import gda
import gda.launch

LAYERS, HEADS, WIDTH, HIDDEN, VOCABULARY = 2, 4, 64, 256, 512

# The spec of each weight, by its name. Weights whose outputs are heads or hidden units are sharded
# by rows, weights with such inputs by columns. A weight is stored as [out, in].
SPECS = {
    r"embed_tokens|lm_head": P("model", None),
    r"[qkv]_proj|gate_proj|up_proj": P("model", "data"),
    r"o_proj|down_proj": P("data", "model"),
    r"norm": P(),
}


def spec_of(name: str, _: Any) -> P:
    return next(spec for pattern, spec in SPECS.items() if re.search(pattern, name))


def make_weights() -> dict[str, np.ndarray[Any, Any]]:
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{kind}_proj.weight": (WIDTH, WIDTH) for kind in "qkvo"}
        shapes |= {f"{layer}.mlp.{kind}_proj.weight": (HIDDEN, WIDTH) for kind in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (WIDTH, HIDDEN)
        shapes[f"{layer}.input_layernorm.weight"] = (WIDTH,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (WIDTH,)
    shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    rng = np.random.default_rng(seed=0)
    return {
        name: (np.ones(shape) if "norm" in name else rng.normal(0, WIDTH**-0.5, shape)).astype(
            ml_dtypes.bfloat16
        )
        for name, shape in shapes.items()
    }


def write_model(folder: Path, weights: dict[str, np.ndarray[Any, Any]], files: int) -> None:
    """Write the weights like a published model: some files and their index."""
    file_of = {
        name: f"model-{1 + i * files // len(weights):05}-of-{files:05}.safetensors"
        for i, name in enumerate(weights)
    }
    for file in sorted(set(file_of.values())):
        part = {name: value for name, value in weights.items() if file_of[name] == file}
        save_file(part, folder / file, metadata={"format": "np"})
    total = sum(value.nbytes for value in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    # Last and at once: other processes wait for it.
    (folder / "index.part").write_text(json.dumps(index))
    (folder / "index.part").rename(folder / "model.safetensors.index.json")


def forward(weights: Any, tokens: Any) -> jax.Array:
    """Return the logits of a transformer, in float32."""

    def weight(name: str) -> Any:
        return jnp.asarray(weights[f"{name}.weight"], jnp.float32)

    def normalised(x: Any, name: str) -> Any:
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight(name)

    x = weight("model.embed_tokens")[tokens]
    length = tokens.shape[0]
    causal = np.tril(np.ones((length, length), bool))
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        h = normalised(x, f"{layer}.input_layernorm")
        q, k, v = (
            (h @ weight(f"{layer}.self_attn.{kind}_proj").T).reshape(length, HEADS, -1)
            for kind in "qkv"
        )
        scores = jnp.einsum("qhd,khd->hqk", q, k) * (WIDTH // HEADS) ** -0.5
        mixing = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        mixed = jnp.einsum("hqk,khd->qhd", mixing, v).reshape(length, WIDTH)
        x = x + mixed @ weight(f"{layer}.self_attn.o_proj").T
        h = normalised(x, f"{layer}.post_attention_layernorm")
        gate, up = (weight(f"{layer}.mlp.{kind}_proj") for kind in ("gate", "up"))
        x = x + (jax.nn.silu(h @ gate.T) * (h @ up.T)) @ weight(f"{layer}.mlp.down_proj").T
    return normalised(x, "model.norm") @ weight("lm_head").T


def main(folder: Path) -> None:
    expected = make_weights()
    if jax.process_index() == 0:
        write_model(folder, expected, files=3)
    gda.check_processes_agree((), name="the files are written")

    axes = {"axis_names": ("data", "model"), "axis_types": (jax.sharding.AxisType.Auto,) * 2}
    mesh = jax.make_mesh((jax.device_count() // 4, 4), **axes)
    read = [0]
    with gda.storage.open_safetensors(folder) as tensors:
        weights = gda.load_tree(
            tensors,
            mesh,
            spec_of,
            progress=lambda done, total: read.__setitem__(0, done),
        )
        total = tensors.nbytes
    held = sum(shard.data.nbytes for leaf in weights.values() for shard in leaf.local_shards)
    print(
        f"process {jax.process_index()} of {jax.process_count()}: {len(weights)} tensors, read "
        f"{read[0]:,} of {total:,} bytes, {held // jax.local_device_count():,} bytes per device"
    )

    tokens = np.arange(16) * 31 % VOCABULARY
    logits = jax.jit(forward, out_shardings=jax.NamedSharding(mesh, P()))(weights, tokens)
    difference = np.abs(np.asarray(logits) - np.asarray(forward(expected, tokens))).max()
    if not difference < 1e-3:
        raise SystemExit(f"the logits differ by {difference} from those of the weights on one host")
    if jax.process_index() == 0:
        print(weights["model.layers.0.self_attn.q_proj.weight"])
        print(f"logits of {len(tokens)} tokens agree with those of the weights on one host")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Load a transformer from files.")
    parser.add_argument(
        "--folder", type=Path, help="folder for the model; all processes must see it"
    )
    options = parser.parse_args()
    if options.folder is not None:
        gda.launch.initialize()
        options.folder.mkdir(parents=True, exist_ok=True)
        main(options.folder)
    else:
        # The CPU plays 8 devices; with accelerators, omit this line.
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
