"""Float8: weights E4M3, with a float scale per tensor, output or block.

| part | shape, of a weight [N, K] | |
|---|---|---|
| `weight` | F8_E4M3 [N, K] | |
| `weight_scale_inv` | float or E8M0 [ceil(N / rows), ceil(K / columns)] | where `weight_block_size` is [rows, columns] |
| `weight_scale` or `weight_scale_inv` | float [], [1], [N] or [N, 1] | elsewhere |

weight[n, k] = value * scale, also where the scale is called an inverse. Linears that `modules_to_not_convert` or `ignored_layers` name are
stored as plain weights, and are known by that. How activations are rounded (`activation_scheme`) is the
kernel's choice. Source: files of DeepSeek-V3, and those that AutoFP8, FBGEMM and transformers
write.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.formats.format import StoredParts
from headrace.tensor.checkpoint.formats.scaled import (
    CHANNEL,
    E8M0,
    FLOATS,
    NOT_ROUNDED,
    TENSOR,
    Blocks,
    ScaledWeight,
    bytes_with_scales,
    is_e4m3,
    read_e4m3,
)
from headrace.tensor.kernels.rounding import Precision

SCHEMES = ("dynamic", "static")


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """blocks: of weights with one scale; None: a scale per tensor or output, as each is stored."""

    method: str
    blocks: Blocks | None

    @property
    def title(self) -> str:
        return f"{self.method}, {self.blocks.title}, {NOT_ROUNDED}" if self.blocks else f"{self.method}, {NOT_ROUNDED}"

    @property
    def precision(self) -> Precision:
        return Precision.NONE if self.blocks else Precision.FP8

    def precision_of(self, stem: str) -> Precision:
        return self.precision

    def is_quantized(self, parts: StoredParts, stem: str) -> bool:
        return is_e4m3(parts, stem)

    def stored_bytes(self, stem: str, shape: tuple[int, int]) -> float:
        return bytes_with_scales(shape, 8, self.blocks or CHANNEL, 32)

    def open(self, parts: StoredParts, stem: str, shape: tuple[int, int]) -> ScaledWeight:
        name = f"{stem}.weight_scale_inv"
        name = name if self.blocks or parts.has(name) else f"{stem}.weight_scale"
        if self.blocks:
            return read_e4m3(parts, stem, shape, scales=name, blocks=self.blocks, dtypes=(*FLOATS, *E8M0))
        return read_e4m3(parts, stem, shape, scales=name, blocks=tensor_or_channel(parts, name))


def tensor_or_channel(parts: StoredParts, name: str) -> Blocks:
    """Raises CheckpointError when they are missing."""
    return TENSOR if parts.stored_shape(name) in ((), (1,), (1, 1)) else CHANNEL


def read_format(section: ConfigFile) -> Fp8Format:
    if section.text("activation_scheme", "dynamic") not in SCHEMES:
        section.refuse("activation_scheme", f"only {' and '.join(SCHEMES)} are supported")
    return Fp8Format(section.text("quant_method"), read_block_size(section, "weight_block_size"))


def read_block_size(section: ConfigFile, name: str) -> Blocks | None:
    if not (sizes := section.items(name)):
        return None
    numbers = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= 1 << 20]
    if len(sizes) != 2 or len(numbers) != 2:
        section.refuse(name, "must be two positive numbers, of outputs and of inputs")
    return Blocks(numbers[0], numbers[1])
