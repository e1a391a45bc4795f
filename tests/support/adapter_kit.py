"""Saves adapters of random weights, as PEFT would, for the linears of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.tensor.backends import load_backend
from headrace.tensor.device import CPU
from headrace.tensor.models import load_model

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")


def save_adapter(
    folder: Path, base: Path, seed: int, rank: int = 4, targets: tuple[str, ...] = ("q_proj", "up_proj"), size: float = 1.0, **fields: Any
) -> Path:
    """size: of the update that a linear's input of size 1 gets, about"""
    drawn = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (outputs, inputs) in _shapes(base).items():
        if name.endswith(targets):
            weights[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=drawn) * (size / inputs**0.5)
            weights[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=drawn) / rank**0.5
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def _shapes(base: Path) -> dict[str, tuple[int, int]]:
    given: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "load_format": "dummy", "seed": 0, "max_model_len": None}
    adapters = load_model(base, backend=load_backend("reference"), enable_lora=True, **given).model.adapters
    assert adapters is not None
    return adapters.shapes
