"""The decoder all architectures share: embeddings, blocks around one residual stream, a final norm, a head.

Adding a branch (attention, feed-forward) to the residual stream is fused into the next norm, so a block receives the previous branch, not
added yet. How a step's layers are run, at once, deferred or recorded: `models.steps`. Shape letters: `tensor.batch`, E hidden size, V
vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headrace.core.model_info import KvGroup
from headrace.tensor.batch import ForwardBatch, GroupBatch, KvCache, LayerKv
from headrace.tensor.kernels import Kernels
from headrace.tensor.layers import can_be_deferred
from headrace.tensor.layers.attention import Attention
from headrace.tensor.layers.mlp import Mlp, MlpSpec
from headrace.tensor.layers.moe import SparseMoe
from headrace.tensor.layers.rope import RopeSpec, rope_table
from headrace.tensor.layers.weights import Part, WeightReader, no_reduce
from headrace.tensor.models.spec import DecoderSpec, LayerSpec
from headrace.tensor.models.steps import RecordedSteps

log = logging.getLogger(__name__)

PROGRESS_S = 5.0
"""Between two lines of the log while layers are loaded."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square, with the weight [E]."""

    runs_only_kernels: ClassVar = True

    kernels: Kernels
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """norm(x), or residual += x in place and norm(residual)."""
        return self.kernels.rms_norm(x, self.weight, self.eps, residual=residual)


class Block:
    """One layer. The constructor reads all its weights."""

    runs_only_kernels = True

    def __init__(self, reader: WeightReader, spec: DecoderSpec, layer: LayerSpec, index: int, cos_sin: Tensor) -> None:
        names, prefix = spec.names, spec.names.layer.format(index)

        def norm(name: str) -> Norm:
            weight = reader.norm(f"{prefix}{name}.weight", spec.hidden_size, plus=spec.norm_plus)
            return Norm(reader.kernels, weight, spec.norm_eps)

        self.attention_norm = norm(names.attention_norm)
        self.attention = Attention(
            reader, prefix, layer.attention, names.attention, spec.hidden_size, spec.norm_eps, spec.norm_plus, cos_sin
        )
        self.attention_output_norm = norm(names.attention_output_norm) if names.attention_output_norm else None
        self.mlp_norm = norm(names.mlp_norm)
        self.mlp = (
            Mlp(reader, prefix, layer.mlp, names.mlp, spec.hidden_size)
            if isinstance(layer.mlp, MlpSpec)
            else SparseMoe(reader, prefix, layer.mlp, names.moe, spec.hidden_size)
        )
        self.mlp_output_norm = norm(names.mlp_output_norm) if names.mlp_output_norm else None

    @property
    def parts(self) -> tuple[object, ...]:
        norms = (self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm)
        return self.attention, self.mlp, *(norm for norm in norms if norm is not None)

    def __call__(
        self, branch: Tensor, residual: Tensor, batch: ForwardBatch, group: GroupBatch, cache: LayerKv, selected: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add `branch` and the attention's output to residual [T, E] in place; return (feed-forward branch, not added yet, residual).

        selected  for the last layer, the tokens [W] whose hidden states are needed: both results are then [W, E]. The keys and values of
                  all T tokens are written all the same
        """
        branch = self.attention(self.attention_norm(branch, residual), batch, group, cache, selected)
        if selected is not None:
            residual = self.attention.kernels.select(residual, selected)
            if not len(selected):
                return branch, residual
        if self.attention_output_norm is not None:
            branch = self.attention_output_norm(branch)
        branch = self.mlp(self.mlp_norm(branch, residual), batch)
        return branch if self.mlp_output_norm is None else self.mlp_output_norm(branch), residual

    def weight_bytes(self, *, one_token: bool) -> int:
        attention = sum(linear.weight_bytes for linear in self.attention.linears)
        return attention + self.mlp.weight_bytes(one_token=one_token)


class DecoderModel:
    """A loaded decoder model on one rank: embeddings, blocks and head.

    dtype           of the linears' products
    activations     dtype of everything between them
    adapters        None: no token may have an adapter
    kv_groups       layers that share a block table: same window, heads and head size
    group_of        per layer, index into kv_groups
    kv_shapes       per layer, (kv_heads, head_dim) held by this rank
    weight_bytes    read by one decode step of one sequence, with the chosen experts only and without norms
    resident_bytes  a tied table counts twice, as rows and as packed head
    """

    runs_only_kernels = True

    def __init__(self, reader: WeightReader, spec: DecoderSpec) -> None:
        assert reader.world == 1 or reader.reduce is not no_reduce, "several ranks need a reduce that sums over them"
        self.spec, self.dtype, self.activations = spec, reader.dtype, reader.activations
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        names = spec.names
        self.embedding = reader.table(f"{names.embedding}.weight", spec.vocab_size, spec.hidden_size)
        self._embedding_scale = float(torch.tensor(spec.embedding_scale).to(reader.dtype))  # rounded to the model's dtype, as in training
        tables: dict[RopeSpec, Tensor] = {}
        said = time.monotonic()
        self.blocks: list[Block] = []
        for index, layer in enumerate(spec.layers):
            rope = layer.attention.rope
            if rope not in tables:
                tables[rope] = rope_table(rope, spec.max_positions, reader.device.name)
            self.blocks.append(Block(reader, spec, layer, index, tables[rope]))
            return_freed_memory()
            if time.monotonic() - said >= PROGRESS_S:
                said = time.monotonic()
                log.info("loaded %d of %d layers", index + 1, len(spec.layers))
        final = reader.norm(f"{names.final_norm}.weight", spec.hidden_size, plus=spec.norm_plus)
        self.final_norm = Norm(reader.kernels, final, spec.norm_eps)
        head = f"{names.head}.weight"
        # A tied model stores one table; it is packed a second time for the head, since a lookup needs the plain rows.
        self.head = (
            reader.tied_linear(names.embedding, self.embedding, spec.vocab_size, spec.hidden_size)
            if spec.is_tied and not reader.source.has(head)
            else reader.whole_linear(Part(head, spec.vocab_size), spec.hidden_size)
        )
        return_freed_memory()
        self.adapters = reader.adapters
        self.kv_groups, self.group_of = group_layers(spec, reader.world, reader.dtype.itemsize)
        is_deferred = reader.world == 1 and can_be_deferred(self)  # a sum over ranks is no kernel
        self._steps = RecordedSteps(reader.backend.executor if is_deferred else None, self._layers)
        self.kv_shapes = [(block.attention.kv_heads, block.attention.spec.head_dim) for block in self.blocks]

    @property
    def parts(self) -> tuple[object, ...]:
        return *self.blocks, self.final_norm

    @property
    def weight_bytes(self) -> int:
        return sum(block.weight_bytes(one_token=True) for block in self.blocks) + self.head.weight_bytes

    @property
    def resident_bytes(self) -> int:
        blocks = sum(block.weight_bytes(one_token=False) for block in self.blocks)
        return blocks + self.head.weight_bytes + self.embedding.resident_bytes

    @property
    def recorded_bytes(self) -> int:
        """Upper bound of the memory that recorded steps hold beside the weights."""
        return self._steps.most_bytes

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """ids [T] int64 -> hidden [T, E], or [W, E] for `batch.selected`, ready for `logits`. Writes keys and values into `kv`."""
        branch = self.embedding.rows(ids).to(self.activations)
        if self._embedding_scale != 1.0:
            branch *= self._embedding_scale
        return self._steps.run(branch, batch, kv)

    def _layers(self, branch: Tensor, residual: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        if self.adapters is not None:
            self.adapters.step = batch.adapters
        for block, group, cache in zip(self.blocks, self.group_of, kv.layers, strict=True):
            self._steps.next_layer()
            selected = batch.selected if block is self.blocks[-1] else None
            branch, residual = block(branch, residual, batch, batch.groups[group], cache, selected)
        if self.adapters is not None:
            self.adapters.step = None  # it holds adapters that may leave meanwhile
        return self.final_norm(branch, residual) if len(residual) else residual

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, E], rows of what `forward` returned -> [N, V] float32."""
        return self.head(hidden).float()


def group_layers(spec: DecoderSpec, world: int, dtype_bytes: int) -> tuple[tuple[KvGroup, ...], tuple[int, ...]]:
    """(KV groups in the order of their first layer, index of each layer's group). A group's layers share window, heads and head size."""
    members: dict[tuple[int | None, int, int], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        attention = layer.attention
        members.setdefault((attention.window, attention.kv_heads // world, attention.head_dim), []).append(index)
    groups = tuple(
        KvGroup(layers=tuple(layers), kv_heads=heads, head_dim=dim, dtype_bytes=dtype_bytes, window=window)
        for (window, heads, dim), layers in members.items()
    )
    owner = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    return groups, tuple(owner[index] for index in range(len(spec.layers)))


def return_freed_memory() -> None:
    """Packing frees temporaries of tens of megabytes between weights that stay, and glibc keeps these holes: hundreds of megabytes."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
