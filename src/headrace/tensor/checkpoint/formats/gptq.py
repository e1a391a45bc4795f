"""GPTQ: integers of 2, 3, 4 or 8 bits, packed along the inputs, with a scale and a zero point per output and group of inputs.

| part | shape, of a weight [N, K] with G groups | |
|---|---|---|
| `qweight` | int32 [K * bits / 32, N] | integers packed along K |
| `qzeros` | int32 [G, N * bits / 32] | zero points packed along N; version 1 stores them less one |
| `scales` | float [G, N] | |
| `g_idx` | int32 [K] | group of each input; absent: consecutive |

weight[n, k] = (integer - zero point) * scale. With `desc_act` groups are not consecutive, and `g_idx` is needed. The version is
`checkpoint_format`: "gptq" is version 1, "gptq_v2" stores zero points as they are. Source: AutoGPTQ's and GPTQModel's file format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.formats.format import StoredParts
from headrace.tensor.checkpoint.formats.unpacking import unpack

BITS = (2, 3, 4, 8)
SCALES = ("F16", "BF16", "F32")
VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""`checkpoint_format` -> what is added to a stored zero point."""


@dataclass(frozen=True, slots=True)
class GptqWeight:
    """words [K * bits / 32, N] int32; scales and zeros float32 [G, N]; groups int64 [K]: each input's group."""

    words: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    bits: int

    def dense(self, rows: slice) -> Tensor:
        """See `QuantizedWeight.dense`."""
        values = unpack(self.words[:, rows].t().contiguous(), self.bits).float()
        scales, zeros = self.scales[:, rows].t(), self.zeros[:, rows].t()
        return (values - zeros[:, self.groups]) * scales[:, self.groups]


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """Implements `WeightFormat`. group: inputs of a group; -1: all. added: to a stored zero point."""

    bits: int
    group: int
    added: int

    method = "gptq"

    @property
    def title(self) -> str:
        return f"gptq, {self.bits} bits" + (f" in groups of {self.group}" if self.group > 0 else "")

    def is_quantized(self, parts: StoredParts, stem: str) -> bool:
        return parts.has(f"{stem}.qweight")

    def open(self, parts: StoredParts, stem: str, shape: tuple[int, int]) -> GptqWeight:
        """See `WeightFormat.open`."""
        (outputs, inputs), bits = shape, self.bits
        group = self.group if self.group > 0 else inputs
        if inputs * bits % 32 or outputs * bits % 32:
            raise CheckpointError(stem, f"a weight of shape {list(shape)} cannot be packed in words of {bits} bits each")
        count = -(-inputs // group)
        words = parts.read_part(f"{stem}.qweight", (inputs * bits // 32, outputs), ("I32",))
        packed = parts.read_part(f"{stem}.qzeros", (count, outputs * bits // 32), ("I32",))
        scales = parts.read_part(f"{stem}.scales", (count, outputs), SCALES)
        if parts.has(name := f"{stem}.g_idx"):
            groups = parts.read_part(name, (inputs,), ("I32",)).long()
            if int(groups.min()) < 0 or int(groups.max()) >= count:
                raise CheckpointError(name, f"names groups {int(groups.min())} to {int(groups.max())}, but there are {count}")
        else:
            groups = torch.arange(inputs) // group
        return GptqWeight(words, scales.float(), unpack(packed, bits).float() + self.added, groups, bits)


def read_format(section: ConfigFile) -> GptqFormat:
    """The format that `quantization_config` describes. Raises CheckpointError."""
    bits = section.integer("bits", 2, 8)
    if bits not in BITS:
        section.refuse("bits", f"only {', '.join(map(str, BITS))} are supported")
    group = section.integer("group_size", -1, 1 << 20, default=128)
    if group == 0:
        section.refuse("group_size", "must be -1, for one group, or positive")
    version = section.text("checkpoint_format", "gptq")
    if version not in VERSIONS:
        section.refuse("checkpoint_format", f"only {' and '.join(VERSIONS)} are supported", "Convert the checkpoint to one of them.")
    return GptqFormat(bits, group, VERSIONS[version])
