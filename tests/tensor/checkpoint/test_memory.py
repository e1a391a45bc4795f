"""Tests that loading holds the weights, one unpacked weight, and little else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[3] / "tools" / "measure_load_memory.py"
SIZES = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8}


@pytest.mark.slow
def test_peak_anonymous_memory_while_loading(folder: Any) -> None:
    """About 350 MB of weights: a copy of all of them, or of a whole shard, would break the bound of 64 MiB above what is held."""
    vocab, hidden, wide = SIZES["vocab_size"], SIZES["hidden_size"], SIZES["intermediate_size"]
    folder.config |= {**SIZES, "dtype": "bfloat16"}
    shapes = {"embed_tokens": (vocab, hidden), "norm": (hidden,)}
    for layer in range(SIZES["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= {f"{prefix}{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}_proj": (128 if name in "kv" else hidden, hidden) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj": (wide, hidden) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj": (hidden, wide)}
    folder.tensors = {f"model.{name}.weight": torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    folder.tensors["lm_head.weight"] = torch.full((vocab, hidden), 0.01, dtype=torch.bfloat16)
    folder.write()
    done = subprocess.run([sys.executable, SCRIPT, folder.path], capture_output=True, text=True, timeout=300, check=True)
    report = json.loads(done.stdout)
    assert report["is_within_bound"]
    assert report["weights_bytes"] > 250e6
    assert report["peak_above_before_bytes"] <= report["weights_bytes"] + report["largest_linear_bytes"] + 2**26
