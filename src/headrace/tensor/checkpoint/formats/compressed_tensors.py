"""compressed-tensors: integers, float8 or float4 with scales, by groups of linears (`config_groups`), as LLM Compressor writes them.

| `format` | part | shape, of a weight [N, K] with G groups | |
|---|---|---|---|
| pack-quantized | `weight_packed` | int32 [N, ceil(K * bits / 32)] | integers plus 2 ** (bits - 1), packed along K |
| | `weight_zero_point` | int32 [ceil(N * bits / 32), G] | as much more, packed along N; where `symmetric` is false |
| | `weight_g_idx` | int32 [K] | group of each input; absent or all -1: consecutive |
| | `weight_shape` | int [2] | N, K |
| int-quantized | `weight` | int8 [N, K] | |
| | `weight_zero_point` | int8, as the scales | where `symmetric` is false |
| float-quantized | `weight` | F8_E4M3 [N, K] | |
| mxfp8-quantized | `weight` | F8_E4M3 [N, K] | `weight_scale` is E8M0 [N, K / 32] |
| nvfp4-pack-quantized | `weight_packed` | uint8 [N, K / 2] | E2M1; `weight_scale` is F8_E4M3 [N, K / 16] |
| | `weight_global_scale` | float32 [1] | divides |
| mxfp4-pack-quantized | `weight_packed` | uint8 [N, K / 2] | E2M1; `weight_scale` is E8M0 [N, K / 32] |

Up to version 0.17 a word of packed integers held 32 // bits of them: with 3, 5, 6 and 7 bits there are more
words, by which such files are known.

weight[n, k] = (value - zero point) * scale / global scale. Other scales are floats: [1] per tensor, [N, 1] per channel, [N, G] in groups,
[ceil(N / rows), ceil(K / columns)] in blocks. naive-quantized is int-quantized or float-quantized, by its `type`.

Linears that `ignore` names are stored as plain weights, and are known by that. Rounding of activations
(`input_activations`, `output_activations`) and of keys and values (`kv_cache_scheme`) changes no weight: it
is the choice of kernel and cache. Source: compressed-tensors' file format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.formats.format import StoredParts
from headrace.tensor.checkpoint.formats.fp8 import read_block_size
from headrace.tensor.checkpoint.formats.nibbles import unpack
from headrace.tensor.checkpoint.formats.patterns import Name, Pattern, read_patterns
from headrace.tensor.checkpoint.formats.scaled import (
    CHANNEL,
    E4M3,
    E8M0,
    NOT_ROUNDED,
    TENSOR,
    Blocks,
    ScaledWeight,
    bytes_with_scales,
    read_any,
    read_e2m1,
    read_e4m3,
    read_scalar,
    read_scales,
    to_float,
)
from headrace.tensor.kernels.rounding import Precision

NVFP4_GROUP, MX_GROUP = 16, 32
MIXED = "mixed-precision"
CLASS = "Linear"
"""Every linear which no other target names."""
PATTERN = "re:"


@dataclass(frozen=True, slots=True)
class Scheme:
    """layout: one of LAYOUTS. bits: of a value. has_order: inputs of a group lie anywhere."""

    layout: str
    bits: int
    blocks: Blocks
    is_symmetric: bool
    has_order: bool

    @property
    def title(self) -> str:
        return f"{self.layout}, {self.bits} bits {self.blocks.title}"

    @property
    def precision(self) -> Precision:
        if self.layout not in INTEGERS:
            return Precision.FP8 if self.layout == "float-quantized" and not self.blocks.columns else Precision.NONE
        return Precision.INT4 if self.bits <= 4 and not self.has_order else Precision.INT8

    def stored_bytes(self, shape: tuple[int, int]) -> float:
        bits = 8 if self.layout == "int-quantized" else self.bits
        scale_bits = 8 if self.layout in FIXED_GROUPS else 16 + (0 if self.is_symmetric else bits)
        return bytes_with_scales(shape, bits, self.blocks, scale_bits)

    def read(self, parts: StoredParts, stem: str, shape: tuple[int, int]) -> ScaledWeight:
        """Raises CheckpointError. Older writers store zero points of symmetric weights too, which are zero."""
        weight = LAYOUTS[self.layout](parts, stem, shape, self)
        if self.is_symmetric and parts.has(name := f"{stem}.weight_zero_point"):
            zeros = parts.read_part(name, parts.stored_shape(name), ("I8", E4M3))
            if bool(zeros.float().any()):
                raise CheckpointError(name, "is not zero, though config.json says that weights are symmetric")
        return weight


@dataclass(frozen=True, slots=True)
class Group:
    """targets: CLASS, names of linears, or PATTERN and a pattern."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class CompressedTensorsFormat:
    """patterns: those of all targets by their texts; none where all groups are stored in the same way."""

    groups: tuple[Group, ...]
    patterns: Mapping[str, Pattern]
    rounds_activations: bool

    method = "compressed-tensors"

    @property
    def title(self) -> str:
        schemes = dict.fromkeys(group.scheme.title for group in self.groups)
        return ", ".join(["compressed-tensors", " or ".join(schemes), *([NOT_ROUNDED] if self.rounds_activations else [])])

    @property
    def precision(self) -> Precision:
        return self.groups[0].scheme.precision

    def precision_of(self, stem: str) -> Precision:
        return self._scheme(stem).precision

    def is_quantized(self, parts: StoredParts, stem: str) -> bool:
        name = f"{stem}.weight"
        return parts.has(f"{stem}.weight_packed") or (parts.has(name) and parts.stored_dtype(name) in (E4M3, "I8"))

    def stored_bytes(self, stem: str, shape: tuple[int, int]) -> float:
        return self._scheme(stem).stored_bytes(shape)

    def open(self, parts: StoredParts, stem: str, shape: tuple[int, int]) -> ScaledWeight:
        return self._scheme(stem).read(parts, stem, shape)

    def _scheme(self, stem: str) -> Scheme:
        if len({group.scheme for group in self.groups}) == 1:
            return self.groups[0].scheme
        name = Name(stem)
        named = [group.scheme for group in self.groups if any(self._is_named(name, target) for target in group.targets)]
        named += [group.scheme for group in self.groups if CLASS in group.targets]
        if not named:
            raise CheckpointError(stem, "is stored quantized, but no group of config_groups has it among its targets")
        return named[0]

    def _is_named(self, name: Name, target: str) -> bool:
        if target.startswith(PATTERN):
            return self.patterns[target.removeprefix(PATTERN)].matches(name)
        return target == name.text


def _read_packed_integers(parts: StoredParts, stem: str, shape: tuple[int, int], scheme: Scheme) -> ScaledWeight:
    (outputs, inputs), bits = shape, scheme.bits
    stated = read_any(parts, name := f"{stem}.weight_shape", [(2,)], ("I64", "I32")).tolist()
    if stated != list(shape):
        raise CheckpointError(name, f"says {stated}, config.json makes it {list(shape)}")
    width, is_padded = _packing(parts, packed := f"{stem}.weight_packed", 1, inputs, bits)
    words = parts.read_part(packed, (outputs, width), ("I32",))
    return _with_integer_scales(parts, stem, shape, scheme, words, partial(_signed, bits=bits, count=inputs, is_padded=is_padded))


def _packing(parts: StoredParts, name: str, dim: int, count: int, bits: int) -> tuple[int, bool]:
    """Words that hold `count` integers along a dimension of a packed part, and whether each word is padded.

    Raises CheckpointError where the two ways of packing give the same shape.
    """
    per_word = 32 // bits
    stream, padded = -(-count * bits // 32), -(-count // per_word)
    if 32 % bits and stream == padded > 1:
        reason = f"{count} integers of {bits} bits fill {stream} words in either of two ways of packing"
        raise CheckpointError(name, reason, "Save the model again as int-quantized.")
    if parts.stored_shape(name)[dim : dim + 1] == (padded,):
        return padded, stream != padded
    return stream, False


def _read_integers(parts: StoredParts, stem: str, shape: tuple[int, int], scheme: Scheme) -> ScaledWeight:
    codes = parts.read_part(name := f"{stem}.weight", shape, ("I8",))
    limit = 1 << (scheme.bits - 1)
    if scheme.bits < 8 and not -limit <= int(codes.min()) <= int(codes.max()) < limit:
        raise CheckpointError(name, f"holds integers beyond {scheme.bits} bits, which config.json says they have")
    return _with_integer_scales(parts, stem, shape, scheme, codes, to_float)


def _with_integer_scales(
    parts: StoredParts, stem: str, shape: tuple[int, int], scheme: Scheme, codes: Tensor, decode: Callable[[Tensor], Tensor]
) -> ScaledWeight:
    shapes = scheme.blocks.stored_shapes(shape)
    scales = read_scales(parts, f"{stem}.weight_scale", shapes)
    zeros = None if scheme.is_symmetric else _zeros(parts, stem, shapes, scheme.bits)
    order = _order(parts, f"{stem}.weight_g_idx", shape[1], scheme.has_order, scales.shape[1])
    return ScaledWeight(codes, decode, scales, scheme.blocks, order, zeros, bits=scheme.bits)


def _zeros(parts: StoredParts, stem: str, shapes: list[tuple[int, ...]], bits: int) -> Tensor:
    name, (rows, columns) = f"{stem}.weight_zero_point", shapes[0]
    if parts.stored_dtype(name) != "I32":
        return read_any(parts, name, shapes, ("I8",)).float()
    height, is_padded = _packing(parts, name, 0, rows, bits)
    words = parts.read_part(name, (height, columns), ("I32",))
    return _signed(words.t().contiguous(), bits, rows, is_padded=is_padded).t().contiguous()


def _order(parts: StoredParts, name: str, inputs: int, is_needed: bool, count: int) -> Tensor | None:
    """Each input's group, int64 [K]; None where the inputs of a group are consecutive."""
    if not is_needed and not parts.has(name):
        return None
    groups = parts.read_part(name, (inputs,), ("I32",)).long()
    low, high = int(groups.min()), int(groups.max())
    if low == high == -1:
        return None
    if low < 0 or high >= count:
        raise CheckpointError(name, f"names groups {low} to {high}, but there are {count}")
    return groups


def _signed(words: Tensor, bits: int, count: int, *, is_padded: bool) -> Tensor:
    """int32 [R, W] -> the first `count` integers of each row, float32 [R, count]. is_padded: each word holds whole integers alone."""
    rows = words.reshape(-1, 1) if is_padded else words
    return unpack(rows, bits).reshape(len(words), -1)[:, :count].float() - (1 << (bits - 1))


def _read_float8(parts: StoredParts, stem: str, shape: tuple[int, int], scheme: Scheme) -> ScaledWeight:
    return read_e4m3(parts, stem, shape, scales=f"{stem}.weight_scale", blocks=scheme.blocks)


def _read_mxfp8(parts: StoredParts, stem: str, shape: tuple[int, int], scheme: Scheme) -> ScaledWeight:
    return read_e4m3(parts, stem, shape, scales=f"{stem}.weight_scale", blocks=scheme.blocks, dtypes=E8M0)


def _read_nvfp4(parts: StoredParts, stem: str, shape: tuple[int, int], scheme: Scheme) -> ScaledWeight:
    weight = read_e2m1(parts, stem, shape, codes=f"{stem}.weight_packed", group=NVFP4_GROUP, dtypes=(E4M3,))
    divisor = read_scalar(parts, name := f"{stem}.weight_global_scale")
    if float(divisor) == 0.0:
        raise CheckpointError(name, "is zero, and divides all weights")
    return replace(weight, last=partial(torch.div, other=divisor))


def _read_mxfp4(parts: StoredParts, stem: str, shape: tuple[int, int], scheme: Scheme) -> ScaledWeight:
    return read_e2m1(parts, stem, shape, codes=f"{stem}.weight_packed", group=MX_GROUP, dtypes=E8M0)


LAYOUTS: dict[str, Callable[[StoredParts, str, tuple[int, int], Scheme], ScaledWeight]] = {
    "pack-quantized": _read_packed_integers,
    "int-quantized": _read_integers,
    "float-quantized": _read_float8,
    "mxfp8-quantized": _read_mxfp8,
    "nvfp4-pack-quantized": _read_nvfp4,
    "mxfp4-pack-quantized": _read_mxfp4,
}
BITS = {"pack-quantized": (2, 8), "int-quantized": (2, 8), "float-quantized": (8, 8), "mxfp8-quantized": (8, 8)}
"""Layout -> fewest and most bits; of the others 4."""
FIXED_GROUPS = {"mxfp8-quantized": MX_GROUP, "nvfp4-pack-quantized": NVFP4_GROUP, "mxfp4-pack-quantized": MX_GROUP}
INTEGERS = ("pack-quantized", "int-quantized")
IN_ORDER, IN_ANY_ORDER = (None, False, "weight", "static"), ("group", "dynamic", True)


def read_format(section: ConfigFile) -> CompressedTensorsFormat:
    _refuse_changed_results(section)
    shared = section.text("format", MIXED)
    groups: list[Group] = []
    patterns: dict[str, Pattern] = {}
    rounds_activations = False
    sections = section.section("config_groups")
    for name in sections.values:
        group = sections.section(name)
        rounds_activations |= group.has("input_activations") or group.has("output_activations")
        if group.has("weights"):
            groups.append(Group(_targets(group), _read_scheme(group, shared)))
    if not groups:
        section.refuse("config_groups", "no group says how weights are stored")
    if len({group.scheme for group in groups}) > 1:
        texts = [target.removeprefix(PATTERN) for group in groups for target in group.targets if target.startswith(PATTERN)]
        patterns = read_patterns(section.file, texts)
    return CompressedTensorsFormat(tuple(groups), patterns, rounds_activations)


def _refuse_changed_results(section: ConfigFile) -> None:
    """Refuse what makes another model of the weights than they are by themselves."""
    if section.section("transform_config").section("config_groups").values:
        section.refuse("transform_config", "rotated weights are not supported")
    sparsity = section.section("sparsity_config")
    if sparsity.values and sparsity.text("format", "dense") != "dense":
        sparsity.refuse("format", "weights that are stored sparse are not supported")
    if section.has("moe_sparsity_config"):
        section.refuse("moe_sparsity_config", "mixtures without some of their experts are not supported")


def _targets(group: ConfigFile) -> tuple[str, ...]:
    targets = tuple(target for target in group.items("targets") if isinstance(target, str))
    if len(targets) != len(group.items("targets")):
        group.refuse("targets", "must be a list of strings")
    return targets


def _read_scheme(group: ConfigFile, shared: str) -> Scheme:
    weights = group.section("weights")
    kind = weights.text("type", "int").lower()
    layout = group.text("format", shared)
    if layout == "naive-quantized":
        layout = "int-quantized" if kind == "int" else "float-quantized"
    if layout not in LAYOUTS:
        group_format = ConfigFile(group.file, {"format": layout}, group.prefix)
        group_format.refuse("format", f"only {', '.join(LAYOUTS)} and naive-quantized are supported")
    if kind != ("int" if layout in INTEGERS else "float"):
        weights.refuse("type", f"contradicts the format, {layout}")
    bits = weights.integer("num_bits", *BITS.get(layout, (4, 4)), default=8)
    is_symmetric = weights.flag("symmetric", True)
    if not is_symmetric and layout not in INTEGERS:
        weights.refuse("symmetric", f"{layout} has no zero points")
    if weights.has("dynamic") and weights.flag("dynamic", False):
        weights.refuse("dynamic", "weights have stored scales")
    order = weights.values.get("actorder")
    if order not in (*IN_ORDER, *IN_ANY_ORDER):
        weights.refuse("actorder", "only group, dynamic, weight and static are supported")
    return Scheme(layout, bits, _read_blocks(weights, layout), is_symmetric, has_order=order in IN_ANY_ORDER)


def _read_blocks(weights: ConfigFile, layout: str) -> Blocks:
    """Without a `strategy` the group size says which weights have one scale, as compressed-tensors has it."""
    group = weights.integer("group_size", -1, 1 << 20, default=FIXED_GROUPS.get(layout, 0))
    strategy = weights.text("strategy", "group" if group > 0 else "channel" if group else "tensor").lower()
    if layout in FIXED_GROUPS:
        if group != FIXED_GROUPS[layout]:
            weights.refuse("group_size", f"{layout} has groups of {FIXED_GROUPS[layout]}")
        return Blocks(1, group)
    if strategy in ("group", "tensor_group") and group > 0:
        return Blocks(1, group)
    if strategy == "block" and (blocks := read_block_size(weights, "block_structure")):
        return blocks
    if strategy not in ("tensor", "channel"):
        weights.refuse("strategy", "only tensor, channel, group with a group_size and block with a block_structure are supported")
    return TENSOR if strategy == "tensor" else CHANNEL
