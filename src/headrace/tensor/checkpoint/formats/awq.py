"""AWQ in the "gemm" layout: integers of 4 bits, packed along the outputs, with a scale and a zero point per output and group of inputs.

| part | shape, of a weight [N, K] with G groups | |
|---|---|---|
| `qweight` | int32 [K, N / 8] | integers packed along N, in the order `ORDER` |
| `qzeros` | int32 [G, N / 8] | zero points, packed as the integers are |
| `scales` | float [G, N] | |

weight[n, k] = (integer - zero point) * scale. Groups are consecutive inputs. Source: AutoAWQ's file format, which GPTQModel writes too.

AutoAWQ's other layouts (gemv, gemv_fast, marlin), those of other exporters (`backend`), and weights without zero points are refused.
`modules_to_not_convert` is not needed: those modules are stored as plain weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.formats.format import StoredParts
from headrace.tensor.checkpoint.formats.unpacking import unpack

PER_WORD = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of a word's eight, of each 4 bits from the lowest on."""
SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """words [K, N / 8] int32; scales and zeros float32 [G, N]; G divides K."""

    words: Tensor
    scales: Tensor
    zeros: Tensor

    def dense(self, rows: slice) -> Tensor:
        """See `QuantizedWeight.dense`."""
        first = rows.start // PER_WORD
        values = _unpack_outputs(self.words[:, first : -(-rows.stop // PER_WORD)])
        values = values[:, rows.start - first * PER_WORD : rows.stop - first * PER_WORD]
        grouped = values.reshape(len(self.scales), -1, values.shape[1]).float()  # [G, K / G, rows]
        weight = (grouped - self.zeros[:, None, rows]) * self.scales[:, None, rows]
        return weight.flatten(0, 1).t().contiguous()


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """Implements `WeightFormat`. group: inputs of a group; -1: all."""

    group: int

    method = "awq"

    @property
    def title(self) -> str:
        return "awq, 4 bits" + (f" in groups of {self.group}" if self.group > 0 else "")

    def is_quantized(self, parts: StoredParts, stem: str) -> bool:
        return any(parts.has(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales"))

    def open(self, parts: StoredParts, stem: str, shape: tuple[int, int]) -> AwqWeight:
        """See `WeightFormat.open`."""
        outputs, inputs = shape
        group = inputs if self.group < 0 else self.group
        if inputs % group:
            raise CheckpointError(stem, f"{inputs} inputs do not divide into groups of {group}")
        if outputs % PER_WORD:
            raise CheckpointError(stem, f"{outputs} outputs cannot be packed in words of {PER_WORD}")
        words = parts.read_part(f"{stem}.qweight", (inputs, outputs // PER_WORD), ("I32",))
        zeros = parts.read_part(f"{stem}.qzeros", (inputs // group, outputs // PER_WORD), ("I32",))
        scales = parts.read_part(f"{stem}.scales", (inputs // group, outputs), SCALES)
        return AwqWeight(words, scales.float(), _unpack_outputs(zeros).float())


def _unpack_outputs(words: Tensor) -> Tensor:
    """int32 [R, W] -> uint8 [R, W * 8], in the order of the outputs."""
    places = torch.tensor(ORDER).argsort()
    return unpack(words, 4).view(*words.shape, PER_WORD)[:, :, places].flatten(1)


def read_format(section: ConfigFile) -> AwqFormat:
    """The format that `quantization_config` describes, in the words of AutoAWQ's or GPTQModel's exporter. Raises CheckpointError."""
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
    if not section.flag("zero_point", True):
        section.refuse("zero_point", "weights without zero points are not supported", "Quantize the model with zero_point = true.")
    return AwqFormat(size)
