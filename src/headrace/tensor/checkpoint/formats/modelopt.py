"""ModelOpt: float4 with two levels of scales (NVFP4), or float8.

| part | shape, of a weight [N, K] | `quant_algo` |
|---|---|---|
| `weight` | uint8 [N, K / 2] | NVFP4: E2M1, two to a byte |
| `weight_scale` | F8_E4M3 [N, K / 16] | NVFP4 |
| `weight_scale_2` | float32 [] | NVFP4: of the whole tensor |
| `weight` | F8_E4M3 [N, K] | FP8, FP8_PER_CHANNEL_PER_TOKEN |
| `weight_scale` | float [], [1], [N] or [N, 1] | FP8, FP8_PER_CHANNEL_PER_TOKEN |

weight[n, k] = value * scale, in NVFP4 also times `weight_scale_2`. Linears that `ignore` or `exclude_modules` names are stored as plain
weights, and are known by that. How activations, keys and values are rounded (`kv_cache_quant_algo`,
`kv_cache_scheme`) is the choice of kernel and cache. Source:
ModelOpt's export for Hugging Face.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.formats.format import StoredParts
from headrace.tensor.checkpoint.formats.fp8 import tensor_or_channel
from headrace.tensor.checkpoint.formats.scaled import (
    CHANNEL,
    E4M3,
    NOT_ROUNDED,
    Blocks,
    ScaledWeight,
    bytes_with_scales,
    is_e4m3,
    read_e2m1,
    read_e4m3,
    read_scalar,
)
from headrace.tensor.kernels.rounding import Precision

ALGORITHMS = ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
NVFP4_GROUP = 16


@dataclass(frozen=True, slots=True)
class ModelOptFormat:
    """algorithm: one of ALGORITHMS."""

    algorithm: str

    method = "modelopt"

    @property
    def title(self) -> str:
        return f"modelopt, {self.algorithm}, {NOT_ROUNDED}"

    @property
    def precision(self) -> Precision:
        return Precision.NONE if self.algorithm == "NVFP4" else Precision.FP8

    def precision_of(self, stem: str) -> Precision:
        return self.precision

    def is_quantized(self, parts: StoredParts, stem: str) -> bool:
        name = f"{stem}.weight"
        return is_e4m3(parts, stem) or (parts.has(name) and parts.stored_dtype(name) == "U8")

    def stored_bytes(self, stem: str, shape: tuple[int, int]) -> float:
        if self.algorithm == "NVFP4":
            return bytes_with_scales(shape, 4, Blocks(1, NVFP4_GROUP), 8)
        return bytes_with_scales(shape, 8, CHANNEL, 32)

    def open(self, parts: StoredParts, stem: str, shape: tuple[int, int]) -> ScaledWeight:
        if self.algorithm != "NVFP4":
            name = f"{stem}.weight_scale"
            return read_e4m3(parts, stem, shape, scales=name, blocks=tensor_or_channel(parts, name))
        weight = read_e2m1(parts, stem, shape, codes=f"{stem}.weight", group=NVFP4_GROUP, dtypes=(E4M3,))
        return replace(weight, last=partial(torch.mul, read_scalar(parts, f"{stem}.weight_scale_2")))


def read_format(section: ConfigFile) -> ModelOptFormat:
    """hf_quant_config.json has the fields of `quantization_config` in `quantization`. Raises CheckpointError."""
    fields = section.section("quantization") if section.has("quantization") else section
    algorithm = fields.text("quant_algo").upper()
    if algorithm not in ALGORITHMS:
        fields.refuse("quant_algo", f"only {', '.join(ALGORITHMS)} are supported")
    if algorithm == "NVFP4" and fields.integer("group_size", 1, 1 << 20, default=NVFP4_GROUP) != NVFP4_GROUP:
        fields.refuse("group_size", f"NVFP4 has groups of {NVFP4_GROUP}")
    return ModelOptFormat(algorithm)
