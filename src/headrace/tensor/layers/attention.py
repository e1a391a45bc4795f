"""Self-attention over the paged cache: one fused q/k/v linear, optional head norms, rotary, attention, output linear.

Shape letters: see `tensor.batch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.tensor.batch import ForwardBatch, GroupBatch, LayerKv
from headrace.tensor.kernels import Linear
from headrace.tensor.layers.rope import RopeSpec
from headrace.tensor.layers.weights import Part, WeightReader, stacked_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """scale: factor of query key^T. window: tokens that a query attends to, itself included; None = all before it."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False

    def kv_heads_of(self, tp: int) -> int:
        """On each of `tp` ranks: where there are fewer KV heads, neighbours hold the same one, that of their query heads."""
        return max(1, self.kv_heads // tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNames:
    """Tensor names below the layer's prefix, without ".weight".

    qkv             three names, or one whose rows are q, k and v in this order
    q_norm, k_norm  None: heads are not normalised
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    q_norm: str | None = None
    k_norm: str | None = None


class Attention:
    """This rank's heads. Each call writes the step's keys and values into the cache."""

    runs_only_kernels = True

    def __init__(self, reader: WeightReader, prefix: str, spec: AttentionSpec, names: AttentionNames, hidden_size: int, eps: float,
                 norm_plus: float, cos_sin: Tensor) -> None:  # fmt: skip
        self.spec, self.kernels, self.cos_sin, self.eps, self.reduce = spec, reader.kernels, cos_sin, eps, reader.peers.reduce
        self.heads, self.kv_heads = spec.heads // reader.tp, spec.kv_heads_of(reader.tp)
        query, key = reader.share(spec.heads), reader.share(spec.kv_heads, copies=self.kv_heads * reader.tp // spec.kv_heads)
        shares = [range(own.start * spec.head_dim, own.stop * spec.head_dim) for own in (query, key, key)]
        rows = [n * spec.head_dim for n in (spec.heads, spec.kv_heads, spec.kv_heads)]
        self.qkv = reader.column_linear(stacked_parts(prefix, names.qkv, rows), hidden_size, bias=spec.qkv_bias, shares=shares)
        self.output = reader.row_linear(Part(f"{prefix}{names.output}.weight", hidden_size), rows[0], bias=spec.output_bias)
        self.q_norm = reader.norm(f"{prefix}{names.q_norm}.weight", spec.head_dim, plus=norm_plus) if names.q_norm else None
        self.k_norm = reader.norm(f"{prefix}{names.k_norm}.weight", spec.head_dim, plus=norm_plus) if names.k_norm else None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output

    @property
    def parts(self) -> tuple[object, ...]:
        return self.linears

    def __call__(self, x: Tensor, batch: ForwardBatch, group: GroupBatch, cache: LayerKv, selected: Tensor | None = None) -> Tensor:
        """x [T, E] -> [T, E], or [W, E] for the selected tokens, summed over ranks. The cache is written in place, for all T tokens."""
        kernels, spec = self.kernels, self.spec
        qkv = self.qkv(x).view(-1, self.heads + 2 * self.kv_heads, spec.head_dim)
        query, key, value = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None:
            query = kernels.rms_norm(query, self.q_norm, self.eps)
        if self.k_norm is not None:
            key = kernels.rms_norm(key, self.k_norm, self.eps)
        kernels.rotary_scatter(query, key, value, self.cos_sin, batch.positions, cache.values, group.slot_mapping, kv_scales=cache.scales)
        if selected is not None and not len(selected):
            return x[:0]
        seen = kernels.attention(
            query,
            cache.values,
            group.block_table,
            batch.row_starts,
            batch.context_lens,
            scale=spec.scale,
            window=spec.window,
            kv_scales=cache.scales,
            num_decodes=batch.num_decodes,
        )
        if selected is not None:
            seen = kernels.select(seen, selected)
        return self.reduce(self.output(seen.reshape(-1, self.heads * spec.head_dim)))
