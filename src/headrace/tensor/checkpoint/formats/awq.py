"""AWQ in the "gemm" layout: integers of 4 bits, packed along the outputs, with a scale and a zero point per output and group of inputs.

| part | shape, of a weight [N, K] with G groups | |
|---|---|---|
| `qweight` | int32 [K, N / 8] | integers packed along N, in the order of `SHIFTS` |
| `qzeros` | int32 [G, N / 8] | zero points, packed as the integers are |
| `scales` | float [G, N] | |

weight[n, k] = (integer - zero point) * scale. Groups are consecutive inputs. Source: AutoAWQ's file format, which GPTQModel writes too.

Weights without zero points (`zero_point` false, AutoRound's symmetric ones) are stored with the middle of the range as every zero point,
or with none. `modules_to_not_convert` is not needed: those modules are stored as plain weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.formats.format import StoredParts
from headrace.tensor.checkpoint.formats.nibbles import decoded, nibbles
from headrace.tensor.checkpoint.formats.scaled import Blocks, bytes_with_scales
from headrace.tensor.kernels.rounding import Precision, RoundedWeight

PER_WORD = 8
MIDDLE = 8.0
SHIFTS = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)
"""Lowest bit of each of a word's eight outputs: the even ones are stored first."""
SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """words [K, N / 8] int32; scales and zeros float32 [N, G]; G divides K."""

    words: Tensor
    scales: Tensor
    zeros: Tensor

    def dense(self, rows: slice) -> Tensor:
        values = self._values(rows).float()
        grouped = values.view(len(values), self.scales.shape[1], -1)
        return grouped.sub_(self.zeros[rows, :, None]).mul_(self.scales[rows, :, None]).flatten(1)

    def rounded(self, rows: slice) -> RoundedWeight | None:
        values = decoded(rows, len(self.words), self._values)
        return nibbles(values.sub_(8), self.scales[rows], self.zeros[rows] - 8)

    def _values(self, rows: slice) -> Tensor:
        first = rows.start // PER_WORD
        values = _by_output(self.words[:, first : -(-rows.stop // PER_WORD)])
        return values[rows.start - first * PER_WORD : rows.stop - first * PER_WORD].to(torch.int8)


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """group: inputs of a group; -1: all. is_symmetric: all zero points are the middle of the range."""

    group: int
    is_symmetric: bool

    method = "awq"

    @property
    def title(self) -> str:
        return "awq, 4 bits" + (f" in groups of {self.group}" if self.group > 0 else "")

    @property
    def precision(self) -> Precision:
        return Precision.INT4

    def precision_of(self, stem: str) -> Precision:
        return Precision.INT4

    def is_quantized(self, parts: StoredParts, stem: str) -> bool:
        return any(parts.has(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales"))

    def stored_bytes(self, stem: str, shape: tuple[int, int]) -> float:
        return bytes_with_scales(shape, 4, Blocks(1, max(self.group, 0)), 16 + 4)

    def open(self, parts: StoredParts, stem: str, shape: tuple[int, int]) -> AwqWeight:
        outputs, inputs = shape
        group = inputs if self.group < 0 else self.group
        if inputs % group:
            raise CheckpointError(stem, f"{inputs} inputs do not divide into groups of {group}")
        if outputs % PER_WORD:
            raise CheckpointError(stem, f"{outputs} outputs cannot be packed in words of {PER_WORD}")
        words = parts.read_part(f"{stem}.qweight", (inputs, outputs // PER_WORD), ("I32",))
        scales = parts.read_part(f"{stem}.scales", (inputs // group, outputs), SCALES)
        zeros = self._zeros(parts, f"{stem}.qzeros", (inputs // group, outputs))
        return AwqWeight(words, scales.float().t().contiguous(), zeros)

    def _zeros(self, parts: StoredParts, name: str, shape: tuple[int, int]) -> Tensor:
        middle = torch.full((shape[1], shape[0]), MIDDLE)
        if self.is_symmetric and not parts.has(name):
            return middle
        zeros = _by_output(parts.read_part(name, (shape[0], shape[1] // PER_WORD), ("I32",))).float()
        if self.is_symmetric and parts.has_values and not torch.equal(zeros, middle):
            reason = "its zero points are not the middle of the range, though config.json has zero_point = false"
            raise CheckpointError(name, reason, 'Write "zero_point": true into quantization_config if they are meant.')
        return zeros


def _by_output(words: Tensor) -> Tensor:
    """int32 [R, W] -> int32 [W * 8, R], one row per output."""
    return ((words.t().contiguous()[:, None, :] >> SHIFTS[:, None]) & 15).flatten(0, 1)


def read_format(section: ConfigFile) -> AwqFormat:
    bits = "w_bit" if section.has("w_bit") else "bits"
    group = "q_group_size" if section.has("q_group_size") else "group_size"
    if section.integer(bits, 1, 16) != 4:
        section.refuse(bits, "only 4 is supported")
    size = section.integer(group, -1, 1 << 20)
    if size == 0:
        section.refuse(group, "must be -1, for one group, or positive")
    layout = "version" if section.has("version") else "checkpoint_format"
    if section.text(layout, "gemm").lower() != "gemm":
        section.refuse(layout, "only gemm is supported", "Convert the checkpoint to it.")
    if section.text("backend", "autoawq") != "autoawq":
        section.refuse("backend", "only autoawq's layout is supported", "Quantize the model with AutoAWQ.")
    return AwqFormat(size, is_symmetric=not section.flag("zero_point", True))
