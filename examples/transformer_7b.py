"""Print the parameters of a transformer of 7 billion parameters, for ``gda plan --tree``.

python examples/transformer_7b.py | gda plan --tree - --devices-per-process 8

The shapes and names are those of Llama 2 7B as published in safetensors files: 32 layers of width
4096 with 32 heads, an MLP of width 11008, a vocabulary of 32,000. Each matrix is sharded in
both dimensions, as in fully sharded training (axis 'data') with tensor parallelism (axis 'model'):
a matrix that is multiplied from the left, [out, in], is sharded by 'model' along its heads or its
MLP, and by 'data' along the other dimension. The scales of the norms are small, and replicated.
"""

import json

VOCABULARY, WIDTH, LAYERS, MLP = 32_000, 4096, 32, 11_008

OUT_SPEC = ["model", "data"]  # its outputs stay on the devices that made them
IN_SPEC = ["data", "model"]  # its outputs are summed over 'model'


def parameter(shape: list[int], spec: list[str]) -> dict[str, list[int] | list[str]]:
    return {"shape": shape, "spec": spec}


parameters = {"model.embed_tokens.weight": parameter([VOCABULARY, WIDTH], OUT_SPEC)}
for layer in range(LAYERS):
    prefix = f"model.layers.{layer}"
    parameters |= {
        f"{prefix}.input_layernorm.weight": parameter([WIDTH], []),
        f"{prefix}.mlp.down_proj.weight": parameter([WIDTH, MLP], IN_SPEC),
        f"{prefix}.mlp.gate_proj.weight": parameter([MLP, WIDTH], OUT_SPEC),
        f"{prefix}.mlp.up_proj.weight": parameter([MLP, WIDTH], OUT_SPEC),
        f"{prefix}.post_attention_layernorm.weight": parameter([WIDTH], []),
        f"{prefix}.self_attn.k_proj.weight": parameter([WIDTH, WIDTH], OUT_SPEC),
        f"{prefix}.self_attn.o_proj.weight": parameter([WIDTH, WIDTH], IN_SPEC),
        f"{prefix}.self_attn.q_proj.weight": parameter([WIDTH, WIDTH], OUT_SPEC),
        f"{prefix}.self_attn.v_proj.weight": parameter([WIDTH, WIDTH], OUT_SPEC),
    }
parameters["model.norm.weight"] = parameter([WIDTH], [])
parameters["lm_head.weight"] = parameter([VOCABULARY, WIDTH], OUT_SPEC)

lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(p)}" for name, p in parameters.items())
print(
    f"""{{
 "about": "Llama 2 7B; printed by transformer_7b.py",
 "mesh": {{"data": 16, "model": 4}},
 "dtype": "bfloat16",
 "parameters": {{
{lines}
 }}
}}"""
)
