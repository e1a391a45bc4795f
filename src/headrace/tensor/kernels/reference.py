"""The kernels in plain torch: the reference (test oracle) for every other implementation.

Written for the reader, not for speed. Runs wherever torch runs (cpu, cuda) in float32, bfloat16 and float16. Only the slots that a row may
see are read, so NaN elsewhere cannot leak. The linears of `PACKING` serve every backend without packing of its own; `kernels.rounding`
defines the arithmetic of `RoundedLinear`. Shape letters: see `tensor.batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.core.errors import ConfigError
from headrace.tensor.batch import StepAdapters
from headrace.tensor.host.cpu_features import CpuFeatures
from headrace.tensor.kernels import Backend, LowRankUpdate
from headrace.tensor.kernels.rounding import Precision, RoundedWeight, round_inputs, round_inputs_to_fp8, round_weight, to_fp8


class PlainLinear:
    """x is rounded to the weight's dtype; sums, bias and result have the dtype of x."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype).to(x.dtype), self.weight.to(x.dtype), self.bias)


class RoundedLinear:
    """A rounded weight (INT4, INT8, FP8), multiplied as `kernels.rounding` defines. Sums are exact, in float64."""

    def __init__(self, weight: RoundedWeight, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.values.shape
        self.weight_bytes = weight.packed_bytes

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = round_inputs_to_fp8(x) if self.weight.values.dtype == torch.float8_e4m3fn else round_inputs(x)
        out = torch.zeros((x.shape[0], self.out_features), dtype=torch.float64, device=x.device)
        size = self.weight.group or self.in_features
        own = self.weight.scales.float().reshape(self.out_features, -1)  # [out, groups]
        for group in range(own.shape[1]):
            part = slice(group * size, (group + 1) * size)
            sums = values[:, part].double() @ self.weight.values[:, part].double().T
            if self.weight.zeros is not None:
                sums -= values[:, part].double().sum(1, keepdim=True) * self.weight.zeros[:, group].double()
            out += sums * own[:, group].double()
        out *= scales.double()
        return (out if self.bias is None else out + self.bias.double()).to(x.dtype)


class PlainPacking:
    """Implements `WeightPacking`."""

    keeps_stored = False

    def pack_linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> PlainLinear:
        return PlainLinear(weight.to(dtype or weight.dtype), bias)

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def round_weight(self, weight: Tensor, precision: Precision) -> RoundedWeight:
        return round_weight(weight, precision)

    def can_pack(self, weight: RoundedWeight) -> bool:
        return True

    def pack_rounded(self, weight: RoundedWeight, bias: Tensor | None) -> RoundedLinear:
        return RoundedLinear(weight, bias)


PACKING = PlainPacking()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class ReferenceKernels:
    """Implements `Kernels`."""

    def select(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            x = residual.add_(x)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def rotary(self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
        cos, sin = cos_sin[positions].float().chunk(2, dim=-1)  # [T, rotary_dim / 2] each
        for heads in (query, key):
            _rotate(heads, cos[:, None, :], sin[:, None, :])

    def scatter_kv(self, key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None = None) -> None:
        block_size = cache.shape[2]
        used = slot_mapping >= 0  # negative: a padding row
        slots = slot_mapping[used]
        blocks, offsets = slots // block_size, slots % block_size
        for part, vectors in enumerate((key[used], value[used])):
            if kv_scales is None:
                cache[blocks, part, offsets] = to_fp8(vectors) if cache.dtype == torch.float8_e4m3fn else vectors.to(cache.dtype)
            else:
                whole, scales = round_inputs(vectors)
                cache[blocks, part, offsets], kv_scales[blocks, part, offsets] = whole.to(cache.dtype), scales.squeeze(-1)

    def rotary_scatter(
        self, query: Tensor, key: Tensor, value: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor, slot_mapping: Tensor,
        *, kv_scales: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.rotary(query, key, cos_sin, positions)
        self.scatter_kv(key, value, cache, slot_mapping, kv_scales=kv_scales)

    def attention(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        row_starts: Tensor,
        context_lens: Tensor,
        *,
        scale: float,
        window: int | None = None,
        kv_scales: Tensor | None = None,
        num_decodes: int = 0,
    ) -> Tensor:
        out = torch.zeros_like(query)
        starts, contexts = row_starts.tolist(), context_lens.tolist()
        for row, context in enumerate(contexts):
            start, end = starts[row], starts[row + 1]
            if start == end:
                continue
            first_position = context - (end - start)
            first_seen = 0 if window is None else max(0, first_position - window + 1)
            key, value = gather_context(cache, block_table[row], first_seen, context, kv_scales)
            mask = causal_mask(first_position, first_seen, context, window, query.device)
            out[start:end] = masked_attention(query[start:end], key, value, mask, scale)
        return out

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (ACTIVATIONS[activation](gate.float()) * up.float()).to(gate_up.dtype)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates in place by cos, sin [T, 1, rotary_dim / 2]: the pair is (first half, second half)."""
    half = cos.shape[-1]
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    heads[..., : 2 * half] = rotated.to(heads.dtype)


def gather_context(cache: Tensor, blocks: Tensor, first: int, last: int, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Keys and values of positions [first, last) of one row, each [last - first, K, D], copied out of cache [B, 2, S, K, D].

    With scales [B, 2, S, K] they are float32: each stored vector times its scale. Only blocks that hold a wanted position are read.
    """
    block_size = cache.shape[2]
    positions = torch.arange(first, last, device=cache.device)
    ids = blocks[positions // block_size].long()
    offsets = positions % block_size
    key, value = cache[ids, 0, offsets], cache[ids, 1, offsets]
    if scales is None:
        return key, value
    return key * scales[ids, 0, offsets].unsqueeze(-1), value * scales[ids, 1, offsets].unsqueeze(-1)


def causal_mask(first_position: int, first_seen: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """[count, seen] bool, True where the query at `first_position + i` sees the key at `first_seen + j`."""
    query_position = torch.arange(first_position, context, device=device)[:, None]
    key_position = torch.arange(first_seen, context, device=device)[None, :]
    mask = key_position <= query_position
    if window is not None:
        mask &= key_position > query_position - window
    return mask


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(query key^T * scale) value in float32; query [n, H, D], key and value [seen, K, D], mask [n, seen] -> [n, H, D]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1).float(), value.repeat_interleave(group, dim=1).float()
    scores = torch.einsum("nhd,shd->hns", query.float(), key) * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("hns,shd->nhd", weights, value).to(query.dtype)


@dataclass(frozen=True, slots=True)
class PlainAdapter:
    linears: tuple[tuple[LowRankUpdate, ...], ...]
    num_bytes: int
    address: int = 0


class PlainAdapters:
    """Implements `AdapterKernels`."""

    def pack(self, linears: Sequence[Sequence[LowRankUpdate]]) -> PlainAdapter:
        copied = tuple(tuple(replace(each, down=each.down.clone(), up=each.up.clone()) for each in updates) for updates in linears)
        return PlainAdapter(copied, sum(each.down.nbytes + each.up.nbytes for updates in copied for each in updates))

    def apply(self, y: Tensor, x: Tensor, linear: int, step: StepAdapters) -> Tensor:
        resident, slots = cast("tuple[PlainAdapter | None, ...]", step.resident), step.slots_of(len(x))
        for place in torch.unique(slots[slots > 0]).tolist():
            adapter, rows = resident[place], torch.nonzero(slots == place)[:, 0]
            assert adapter is not None, "a token's place holds no adapter"
            for each in adapter.linears[linear]:
                columns = slice(each.first_row, each.first_row + len(each.up))
                change = each.scale * (x[rows].float() @ each.down.float().T) @ each.up.float().T
                y[rows, columns] = (y[rows, columns].float() + change).to(y.dtype)
        return y


KERNELS = ReferenceKernels()
ADAPTERS = PlainAdapters()
BACKEND = Backend(name="reference", kernels=KERNELS, packing=PACKING, adapters=ADAPTERS)


def make_backend(*, deterministic: bool, features: CpuFeatures) -> Backend:
    if deterministic:
        raise ConfigError(
            "deterministic",
            "reference kernels leave products to a library whose rounding depends on the batch",
            "Use kernels numba, which need device cpu.",
        )
    return BACKEND
