"""Makes a small configuration of every architecture, for engines over random weights (`load_format="dummy"`): no weights, no tokenizer.

All have 8 heads of 16 and linears whose widths every kernel takes. The linears of "llama-wide" are so wide that a library splits their sums
by the number of rows, and its vocabulary is so large that threads share the rows of a draw. Oracles in transformers have configurations of
their own: tests/tensor/models/test_oracle.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 512
"""Tokens of every model but the wide one, which has more."""
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 96},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": True,
              "sliding_window": 21, "max_window_layers": 1},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6, "norm_topk_prob": True,
                  "moe_intermediate_size": 64, "num_experts_per_tok": 3, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "sliding_window": 90,
                "num_experts_per_tok": 2, "intermediate_size": 64},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 24,
               "query_pre_attn_scalar": 20, "hidden_activation": "gelu_pytorch_tanh",
               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "llama-wide": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 1024,
                   "intermediate_size": 2816, "vocab_size": 16384},
}  # fmt: skip

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}
"""A plain Llama, as small as it may be."""


def save_tiny_model(name: str, folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_SHAPE, **MODELS[name], **changes}))
    return folder
