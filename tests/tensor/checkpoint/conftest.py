"""Writes small checkpoints by hand, so that every byte can be wrong on purpose."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.tensor.backends import load_backend
from headrace.tensor.device import CPU
from headrace.tensor.models import LoadedModel, load_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "dtype": "float32",
}
SHAPES = {
    "model.embed_tokens.weight": (13, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.mlp.gate_proj.weight": (6, 8),
    "model.layers.0.mlp.up_proj.weight": (6, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 6),
    "model.norm.weight": (8,),
    "lm_head.weight": (13, 8),
}


class Folder:
    """A checkpoint folder that can be rewritten piece by piece; right as it is made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = dict(CONFIG)
        generator = torch.Generator().manual_seed(0)
        self.tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        self.weights = path / "model.safetensors"
        self.write()

    def write(self) -> None:
        self.write_config()
        save_file(self.tensors, self.weights)

    def write_config(self) -> None:
        (self.path / "config.json").write_text(json.dumps(self.config))

    def shard(self, count: int) -> dict[str, str]:
        """Split the weights over `count` files with an index; returns the index's weight_map."""
        self.weights.unlink(missing_ok=True)
        names = sorted(self.tensors)
        weight_map = {}
        for number in range(count):
            file = f"model-{number + 1:05}-of-{count:05}.safetensors"
            part = {name: self.tensors[name] for name in names[number::count]}
            save_file(part, self.path / file)
            weight_map.update(dict.fromkeys(part, file))
        self.write_index(weight_map)
        return weight_map

    def write_index(self, weight_map: object) -> None:
        (self.path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def read_header(self) -> dict[str, Any]:
        raw = self.weights.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header: dict[str, Any] = json.loads(raw[8 : 8 + length])
        return header

    def write_header(self, header: object, *, claimed: int | None = None, text: bytes | None = None) -> None:
        """Put another header before the data as it is."""
        raw = self.weights.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        new = json.dumps(header).encode() if text is None else text
        self.weights.write_bytes(struct.pack("<Q", len(new) if claimed is None else claimed) + new + raw[8 + length :])

    def load(self, **options: Any) -> LoadedModel:
        given: dict[str, Any] = {"dtype": None, "device": CPU, "load_format": "auto", "seed": 0, "max_model_len": None, **options}
        return load_model(self.path, backend=load_backend("reference"), **given)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def edit_header(folder: Folder) -> Callable[[str, str, object], None]:
    """edit_header(tensor, field, value): the header says something else about one tensor."""

    def edit(tensor: str, field: str, value: object) -> None:
        header = folder.read_header()
        header[tensor][field] = value
        folder.write_header(header)

    return edit
