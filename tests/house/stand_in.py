"""Provides a model for tests that need any: the bundled one, or random weights of the same kind in a checkout from before it was made."""

from __future__ import annotations

import json
from pathlib import Path

import text_kit

from headrace.bundled import DEFAULT_MODEL, bundled_path

TINY = {
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


def stand_in(folder: Path) -> tuple[str, str] | None:
    """(model, load format) made in `folder`; None when the bundled model is there, which needs neither."""
    if bundled_path(DEFAULT_MODEL) is not None:
        return None
    text_kit.save_byte_level(folder / DEFAULT_MODEL)
    (folder / DEFAULT_MODEL / "config.json").write_text(json.dumps(TINY))
    return str(folder / DEFAULT_MODEL), "dummy"
