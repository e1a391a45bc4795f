"""The table of quantized formats, and the source of weights for a checkpoint in any of them (`QuantizedSource`).

A weight whose stored form no kernel multiplies is dequantized when it is read, a few rows at a time: memory holds only one stored tensor
beside the packed linears.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.files import read_json
from headrace.tensor.checkpoint.folder import PART_DTYPES, Checkpoint
from headrace.tensor.checkpoint.formats import awq, compressed_tensors, fp8, gptq, modelopt
from headrace.tensor.checkpoint.formats.format import QuantizedWeight, StoredParts, WeightFormat
from headrace.tensor.checkpoint.formats.names import INSTEAD, METHODS, SEPARATE
from headrace.tensor.checkpoint.formats.nibbles import SLAB_ELEMENTS
from headrace.tensor.checkpoint.gguf.checkpoint import GgufFormat
from headrace.tensor.checkpoint.gguf.checkpoint import read_format as read_gguf_format
from headrace.tensor.checkpoint.header import DAMAGED
from headrace.tensor.kernels.rounding import FP8_LIMIT, Precision, RoundedWeight

FORMATS: dict[str, Callable[[ConfigFile], WeightFormat]] = {
    "gptq": gptq.read_format,
    "awq": awq.read_format,
    "compressed-tensors": compressed_tensors.read_format,
    "fp8": fp8.read_format,
    "fbgemm_fp8": fp8.read_format,
    "modelopt": modelopt.read_format,
    "modelopt_fp4": modelopt.read_format,
}
"""By `quant_method`. A reader raises CheckpointError for what its format does not support."""

UNUSED = (
    *("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale", "output_zero_point"),
    *("kv_scale", "q_scale", "k_scale", "v_scale", "q_zero_point", "k_zero_point", "v_zero_point"),
)
"""Parts that say how activations, keys or values may be rounded as they are computed."""

READER_VERSION = 3
"""Part of what names packed weights on disk: another one where a format's weights are read otherwise than before."""

FEW = 16
"""Elements of parts that are read even to check a checkpoint, as formats compare their values with the configuration."""


def read_format(config: ConfigFile) -> WeightFormat | GgufFormat | None:
    if (section := find_section(config)) is None:
        return None
    method = section.text("quant_method", "compressed-tensors" if section.prefix == "compression_config." else None)
    if method == GgufFormat.method:
        return read_gguf_format(section)
    if method not in FORMATS:
        others = f"Supported: {', '.join(FORMATS)}; or use float32, bfloat16 or float16 weights."
        section.refuse("quant_method", "checkpoints of this format are not supported", INSTEAD.get(method, others))
    return FORMATS[method](section)


def find_section(config: ConfigFile) -> ConfigFile | None:
    """Raises CheckpointError."""
    name = next((name for name in ("quantization_config", "compression_config") if config.has(name)), None)
    return read_separate(config) if name is None else config.section(name)


def read_separate(config: ConfigFile) -> ConfigFile | None:
    """Raises CheckpointError naming the file.

    A file that names no method is of its writer's format; AutoAWQ's fields may stand in AutoGPTQ's file, as vLLM allows. A GPTQ file that
    names no version is of version 1: writers that know version 2 name it there.
    """
    folder = Path(config.file).parent
    name = next((name for name in SEPARATE if os.path.lexists(folder / name)), None)
    if name is None:
        return None
    values = read_json(folder, name)
    method = values.get("quant_method") or ("awq" if "w_bit" in values else SEPARATE[name])
    version = {"checkpoint_format": "gptq"} if method == "gptq" and "format" not in values else {}
    return ConfigFile(str(folder / name), {**version, **values, "quant_method": method})


def resolve_precision(quantization: str, stored: WeightFormat | GgufFormat | None) -> Precision:
    """The name of a format rounds nothing; ConfigError where it is not the checkpoint's."""
    is_own = quantization == "fp8" and stored is not None and stored.method == "fp8"
    if quantization not in METHODS:
        return Precision.NONE if is_own else Precision(quantization)
    if stored is None or stored.method != METHODS[quantization]:
        held = "holds plain weights" if stored is None else f"is stored as {stored.title}"
        remedy = "Leave the option out: the format is read from the checkpoint."
        raise ConfigError("quantization", f"{quantization!r}, but the checkpoint {held}", remedy)
    return Precision.NONE


class _Expected:
    """Gives zeros, and reads nothing but the smallest parts: what a format asks for is checked to be there."""

    has_values = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.has, self.stored_dtype, self.stored_shape = checkpoint.has, checkpoint.stored_dtype, checkpoint.stored_shape

    def read_part(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Tensor:
        if prod(shape) <= FEW:
            return self._checkpoint.read_part(name, shape, dtypes)
        self._checkpoint.expect(name, shape, dtypes)
        return torch.zeros(1, dtype=PART_DTYPES[self.stored_dtype(name)]).expand(shape)


class QuantizedSource:
    def __init__(self, checkpoint: Checkpoint, stored: WeightFormat) -> None:
        self._checkpoint, self._format = checkpoint, stored

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name) or self._stem(name) is not None

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        self._pass_unused(name)
        if self._stem(name) is None:
            self._checkpoint.expect(name, shape)
        else:
            self._open(name, shape, _Expected(self._checkpoint))

    def read(self, name: str, shape: tuple[int, ...], region: tuple[slice, ...] = ()) -> Tensor:
        """As `Checkpoint.read`; a quantized weight's region is float32."""
        self._pass_unused(name)
        if self._stem(name) is None:
            return self._checkpoint.read(name, shape, region)
        weight = self._open(name, shape, self._checkpoint)
        rows, columns = (*region, slice(None), slice(None))[:2]
        first, last, _ = rows.indices(shape[0])
        wanted = len(range(*columns.indices(shape[1])))
        found = torch.empty((last - first, wanted), dtype=torch.float32)
        step = max(1, SLAB_ELEMENTS // shape[1])
        for begin in range(first, last, step):
            end = min(begin + step, last)
            found[begin - first : end - first] = weight.dense(slice(begin, end))[:, columns]
        if not bool(found.isfinite().all()):
            self._checkpoint.refuse(name, f"weight {name} holds values that are NaN or infinite", DAMAGED)
        return found

    def precision_of(self, name: str) -> Precision:
        stem = self._stem(name)
        return Precision.NONE if stem is None else self._format.precision_of(stem)

    def rounded(self, name: str, shape: tuple[int, ...], rows: slice) -> RoundedWeight | None:
        self._pass_unused(name)
        first, last, _ = rows.indices(shape[0])
        weight = self._open(name, shape, self._checkpoint).rounded(slice(first, last))
        if weight is None or weight.values.dtype != torch.float8_e4m3fn:
            return weight
        has_nan = bool(((weight.values.view(torch.uint8) & 127) == 127).any())
        if has_nan or not bool((weight.scales * FP8_LIMIT).isfinite().all()):
            self._checkpoint.refuse(name, f"weight {name} holds values that are NaN or infinite", DAMAGED)
        return weight

    def _open(self, name: str, shape: tuple[int, ...], parts: StoredParts) -> QuantizedWeight:
        stem = name.removesuffix(".weight")
        if len(shape) != 2:
            self._checkpoint.refuse(name, f"{name} stacks the experts of a mixture, which no quantized format here does")
        return self._format.open(parts, stem, (shape[0], shape[1]))

    def _pass_unused(self, name: str) -> None:
        stem = name.removesuffix(".weight")
        for holder in (stem, stem.rpartition(".")[0]):
            for part in (f"{holder}.{unused}" for unused in UNUSED):
                if self._checkpoint.has(part):
                    self._checkpoint.expect(part, self._checkpoint.stored_shape(part), (self._checkpoint.stored_dtype(part),))

    def _stem(self, name: str) -> str | None:
        """The linear of a weight that is stored in the format; None for any other tensor."""
        stem = name.removesuffix(".weight")
        return stem if stem != name and self._format.is_quantized(self._checkpoint, stem) else None
