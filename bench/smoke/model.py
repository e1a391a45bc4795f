"""Makes the model that is timed: a Llama shape of 117 million random bfloat16 weights, so that even 4 bits of each (62 MB) exceed the
caches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.tensor.checkpoint.random_weights import RandomWeights

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1024, 2816, 10, 16, 4, 64, 4096
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of the checkpoint."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{prefix}.mlp.gate_proj.weight", (FFN, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (FFN, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, FFN)


def make_model(folder: Path) -> Path:
    """Write the checkpoint unless it is there. config.json comes last: a folder that has it is whole."""
    config = folder / "config.json"
    if not config.is_file() or json.loads(config.read_bytes()) != CONFIG:
        folder.mkdir(parents=True, exist_ok=True)
        weights = RandomWeights(0, torch.bfloat16, 1.0)
        save_file({name: weights.read(name, shape) for name, shape in shapes()}, folder / "model.safetensors")
        config.write_text(json.dumps(CONFIG, indent=1), encoding="utf-8")
    return folder
