"""Load a model from sharded safetensors files; each process reads only its part.

On a laptop: python examples/load_safetensors.py
In many processes, with a new folder that all of them see:
python -m gda.launch -n 4 --devices-per-process 2 examples/load_safetensors.py FOLDER
"""

import os
import re
import sys
import tempfile
from typing import Any

# The CPU plays 8 devices; with accelerators, omit this line.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

import gda
import gda.launch

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


def weights_of_a_model(layers: int, width: int, hidden: int, vocabulary: int) -> dict[str, Any]:
    shapes = {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{kind}_proj.weight": (width, width) for kind in "qkvo"}
        shapes |= {f"{layer}.mlp.{kind}_proj.weight": (hidden, width) for kind in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (width, hidden)
        shapes[f"{layer}.input_layernorm.weight"] = (width,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
    shapes["lm_head.weight"] = (vocabulary, width)
    rng = np.random.default_rng(seed=0)
    return {name: rng.normal(size=size).astype(ml_dtypes.bfloat16) for name, size in shapes.items()}


def main(folder: str) -> None:
    model = weights_of_a_model(layers=2, width=64, hidden=256, vocabulary=512)
    gda.storage.save_safetensors(folder, model, max_file_bytes=160_000)  # three files, an index

    mesh = jax.make_mesh((jax.device_count() // 4, 4), ("data", "model"))
    read = 0

    def count(done: int, total: int) -> None:
        nonlocal read
        read = done

    tensors = gda.storage.open_safetensors(folder)
    weights = gda.load_tree(tensors, mesh, spec_of, plain=True, progress=count)
    print(
        f"process {jax.process_index()} of {jax.process_count()}: {len(weights)} tensors, "
        f"read {read:,} of {tensors.nbytes:,} bytes"
    )
    equal = gda.fingerprint(weights) == gda.fingerprint(model)
    if jax.process_index() == 0:
        print(weights["model.layers.0.self_attn.q_proj.weight"].sharding)
        print(f"the fingerprints of the arrays and of the model are equal: {equal}")


if __name__ == "__main__":
    if sys.argv[1:]:
        gda.launch.initialize()
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
