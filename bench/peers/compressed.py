"""Writes a checkpoint with integer weights in the `compressed-tensors` layout, which vLLM reads: W8A8 (int8) and W4A16 (int4).

Weights are rounded as Headrace rounds them (`kernels.rounding`), so that both compute with the same integers. Source of the layout:
compressed-tensors' `int-quantized` and `pack-quantized` formats.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.tensor.kernels.rounding import Precision, round_weight

INT4_GROUP = 64
NIBBLES_PER_WORD = 8


def write_compressed(model: Path, target: Path, precision: Precision) -> None:
    """`model`: a folder with one or several safetensors files. The vocabulary's tables stay as they are."""
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _tensors(model):
        if name.endswith("_proj.weight"):
            tensors.update(_rounded(name.removesuffix("weight"), tensor, precision))
        else:
            tensors[name] = tensor
    for file in model.glob("*.json"):
        if file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, target)
    for file in model.glob("*.jinja"):
        shutil.copy(file, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_bytes())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": _description(precision)}, indent=1))


def _tensors(model: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                yield name, opened.get_tensor(name)


def _rounded(prefix: str, weight: Tensor, precision: Precision) -> dict[str, Tensor]:
    rounded = round_weight(weight, precision, group=INT4_GROUP)
    scales = rounded.scales.to(torch.bfloat16)
    if precision is Precision.INT8:
        return {f"{prefix}weight": rounded.values, f"{prefix}weight_scale": scales[:, None].contiguous()}
    return {
        f"{prefix}weight_packed": pack_nibbles(rounded.values),
        f"{prefix}weight_scale": scales,
        f"{prefix}weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def pack_nibbles(values: Tensor) -> Tensor:
    """int8 within -8..7 [out, in] -> int32 [out, in / 8]: value + 8, the first input in the lowest nibble."""
    nibbles = (values.to(torch.int64) + 8).reshape(len(values), -1, NIBBLES_PER_WORD)
    words = (nibbles << (4 * torch.arange(NIBBLES_PER_WORD))).sum(dim=2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _description(precision: Precision) -> dict[str, object]:
    is_int8 = precision is Precision.INT8
    weights = {
        "num_bits": 8 if is_int8 else 4,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel" if is_int8 else "group",
        "group_size": None if is_int8 else INT4_GROUP,
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"} if is_int8 else None
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if is_int8 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }
