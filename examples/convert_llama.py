"""Convert a Llama between the files of Hugging Face and a tree for `jax.lax.scan`, both ways.

Hugging Face has an array for each layer, with weights as [out, in]. A model that scans its layers
has one array for all of them, with kernels as [in, out]. On the command line:

    gda convert hf scanned --map examples/convert_llama.py:to_scanned --dtype bf16
    gda convert scanned hf --to safetensors --map examples/convert_llama.py:to_hugging_face

On a laptop: python examples/convert_llama.py makes a small model, and converts it there and back.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import gda

LAYER_AXIS = 1  # of the stacked arrays; 1 in MaxText, 0 in most other models

# The names in a layer, there and here. Norms are vectors, all others are matrices.
LAYER = {
    "self_attn.q_proj": ("attention", "query"),
    "self_attn.k_proj": ("attention", "key"),
    "self_attn.v_proj": ("attention", "value"),
    "self_attn.o_proj": ("attention", "out"),
    "mlp.gate_proj": ("mlp", "gate"),
    "mlp.up_proj": ("mlp", "up"),
    "mlp.down_proj": ("mlp", "down"),
    "input_layernorm": ("norms", "before_attention"),
    "post_attention_layernorm": ("norms", "before_mlp"),
}
# The others. A model that shares its embedding has no lm_head.
REST = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}


def to_scanned(tensors: Any) -> dict[str, Any]:
    """Return the tree of a model that scans its layers, from the tensors of Hugging Face."""
    numbers = [
        int(found[1]) for name in tensors if (found := re.match(r"model.layers.(\d+)", name))
    ]
    layers: dict[str, Any] = {}
    used = set()
    for theirs, (group, ours) in LAYER.items():
        names = [f"model.layers.{i}.{theirs}.weight" for i in range(max(numbers) + 1)]
        used.update(names)
        parts = [gda.storage.lazy(tensors[name]).T for name in names]
        axis = min(LAYER_AXIS, parts[0].ndim)
        layers.setdefault(group, {})[ours] = gda.storage.stack(parts, axis=axis)
    rest = {
        name: f"{theirs}.weight" for theirs, name in REST.items() if f"{theirs}.weight" in tensors
    }
    if unknown := {*tensors} - used - {*rest.values()}:
        raise ValueError(f"the model has other weights too: {sorted(unknown)}; add them to REST")
    return {"layers": layers, **{name: tensors[theirs] for name, theirs in rest.items()}}


def to_hugging_face(tree: Any) -> dict[str, Any]:
    """Return the tensors of Hugging Face by name, from the tree of `to_scanned`."""
    tensors = {}
    for theirs, (group, ours) in LAYER.items():
        stacked = gda.storage.lazy(tree["layers"][group][ours])
        axis = min(LAYER_AXIS, stacked.ndim - 1)
        for i in range(stacked.shape[axis]):
            part = stacked[(slice(None),) * axis + (i,)]
            tensors[f"model.layers.{i}.{theirs}.weight"] = part.T
    rest = {f"{theirs}.weight": tree[name] for theirs, name in REST.items() if name in tree}
    return tensors | rest


def model_of(layers: int, width: int, hidden: int, vocabulary: int) -> dict[str, Any]:
    shapes = {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
    for i in range(layers):
        for name in LAYER:
            out = hidden if "gate" in name or "up" in name else width
            out = width // 2 if "k_proj" in name or "v_proj" in name else out  # fewer heads
            shape = (width,) if "norm" in name else (out, hidden if "down" in name else width)
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    shapes["lm_head.weight"] = (vocabulary, width)
    rng = np.random.default_rng(seed=0)
    return {name: rng.normal(size=size).astype(ml_dtypes.bfloat16) for name, size in shapes.items()}


def convert(source: Path, target: Path, function: str, *options: str) -> None:
    command = ["-m", "gda", "convert", source, target, "--map", f"{__file__}:{function}", *options]
    subprocess.run([sys.executable, *command], check=True)


def main(folder: Path) -> None:
    published, scanned, back = folder / "hf", folder / "scanned", folder / "back"
    model = model_of(layers=4, width=64, hidden=160, vocabulary=512)
    gda.storage.save_safetensors(published, model, max_file_bytes=300_000)  # files and an index
    convert(published, scanned, "to_scanned")
    convert(scanned, back, "to_hugging_face", "--to", "safetensors", "--max-file-bytes", "128KiB")
    print(gda.checkpoint.inspect(scanned))
    tensors = gda.storage.open_safetensors(back)
    after = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    print(f"the same bits came back: {gda.fingerprint(after) == gda.fingerprint(model)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
