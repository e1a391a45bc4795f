"""Makes a model folder of TinyLlama's shape: a config of 1.1 billion weights, which `--load-format dummy` draws, and the bundled
tokenizer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from headrace.bundled import bundled_path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 2560,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 2,
}
"""The shape of TinyLlama with the bundled model's vocabulary."""


def write_tinyllama(folder: Path) -> None:
    """Write the folder, over one that is there."""
    bundled = bundled_path("headrace-tiny")
    assert bundled is not None, "this installation has the bundled model"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(bundled / name, folder / name)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
