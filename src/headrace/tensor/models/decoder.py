"""The decoder all architectures share: embeddings, blocks around one residual stream, a final norm, a head.

Adding a branch (attention, feed-forward) to the residual stream is fused into the next norm, so a block receives the previous branch, not
added yet. Shape letters: `tensor.batch`, E hidden size, V vocabulary.
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
from torch.nn import functional as F

from headrace.core.model_info import KvGroup
from headrace.core.parallelism import Place
from headrace.tensor.batch import ForwardBatch, GroupBatch, KvCache, LayerKv
from headrace.tensor.kernels import Kernels, Linear
from headrace.tensor.layers import can_be_deferred
from headrace.tensor.layers.attention import Attention
from headrace.tensor.layers.mlp import Mlp, MlpSpec
from headrace.tensor.layers.moe import SparseMoe
from headrace.tensor.layers.rope import RopeSpec, rope_table
from headrace.tensor.layers.table import Table
from headrace.tensor.layers.weights import Part, WeightReader
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
    """What one rank holds of a loaded decoder: its share of its stage's blocks, and of embedding or head.

    dtype           of the linears' products
    activations     dtype of everything between them
    adapters        None: no token may have an adapter
    embedding       of the first stage alone
    final_norm, head  of the last stage alone
    kv_groups       layers that share a block table: same window, heads and head size. The same groups on every rank, with this stage's
                    layers: a group may have none, and its blocks then no bytes
    group_of        per layer of the stage, index into kv_groups
    kv_shapes       per layer of the stage, (kv_heads, head_dim) held by this rank
    weight_bytes    read by one decode step of one sequence, with the chosen experts only and without norms
    resident_bytes  a tied table counts twice, as rows and as packed head
    """

    runs_only_kernels = True
    embedding: Table
    final_norm: Norm
    head: Linear

    def __init__(self, reader: WeightReader, spec: DecoderSpec) -> None:
        self.spec, self.place, self.peers, self.device = spec, reader.place, reader.peers, reader.device
        self.dtype, self.activations = reader.dtype, reader.activations
        self.vocab_size, self.hidden_size, self._vocabulary = spec.vocab_size, spec.hidden_size, reader.vocabulary(spec.vocab_size)
        if self.place.is_first:
            self.embedding = reader.table(f"{spec.names.embedding}.weight", spec.vocab_size, spec.hidden_size)
        self._embedding_scale = float(torch.tensor(spec.embedding_scale).to(reader.dtype))  # rounded to the model's dtype, as in training
        tables: dict[RopeSpec, Tensor] = {}
        said = time.monotonic()
        layers = self.place.layers(len(spec.layers))
        self.blocks: list[Block] = []
        for index in layers:
            layer = spec.layers[index]
            rope = layer.attention.rope
            if rope not in tables:
                tables[rope] = rope_table(rope, spec.max_positions, reader.device.name)
            self.blocks.append(Block(reader, spec, layer, index, tables[rope]))
            return_freed_memory()
            if time.monotonic() - said >= PROGRESS_S:
                said = time.monotonic()
                log.info("loaded %d of %d layers", len(self.blocks), len(layers))
        if self.place.is_last:
            final = reader.norm(f"{spec.names.final_norm}.weight", spec.hidden_size, plus=spec.norm_plus)
            self.final_norm, self.head = Norm(reader.kernels, final, spec.norm_eps), self._read_head(reader)
        return_freed_memory()
        self.adapters = reader.adapters
        self.kv_groups, self.group_of = group_layers(spec, self.place, reader.dtype.itemsize)
        is_deferred = can_be_deferred(self.peers) and can_be_deferred(self)
        self._steps = RecordedSteps(reader.backend.executor if is_deferred else None, self._layers)
        self.kv_shapes = [(block.attention.kv_heads, block.attention.spec.head_dim) for block in self.blocks]

    def _read_head(self, reader: WeightReader) -> Linear:
        """A tied model stores one table; it is packed a second time for the head, since a lookup needs the plain rows."""
        spec, stored = self.spec, f"{self.spec.names.head}.weight"
        if not spec.is_tied or reader.source.has(stored):
            return reader.head(Part(stored, spec.vocab_size), spec.hidden_size)
        table = self.embedding if self.place.is_first else None
        return reader.tied_head(spec.names.embedding, table, spec.vocab_size, spec.hidden_size)

    @property
    def parts(self) -> tuple[object, ...]:
        return (*self.blocks, self.final_norm) if self.place.is_last else (*self.blocks,)

    @property
    def weight_bytes(self) -> int:
        return sum(block.weight_bytes(one_token=True) for block in self.blocks) + self._head_bytes

    @property
    def resident_bytes(self) -> int:
        blocks = sum(block.weight_bytes(one_token=False) for block in self.blocks)
        return blocks + self._head_bytes + (self.embedding.resident_bytes if self.place.is_first else 0)

    @property
    def _head_bytes(self) -> int:
        return self.head.weight_bytes if self.place.is_last else 0

    @property
    def expert_tokens(self) -> dict[int, list[int]]:
        """By layer of the stage, the tokens that chose each expert since the start (`SparseMoe.expert_tokens`); those are counted on."""
        layers = zip(self.place.layers(len(self.spec.layers)), self.blocks, strict=True)
        return {index: block.mlp.expert_tokens for index, block in layers if isinstance(block.mlp, SparseMoe)}

    @property
    def recorded_bytes(self) -> int:
        """Upper bound of the memory that recorded steps hold beside the weights."""
        return self._steps.most_bytes

    def forget_steps(self) -> None:
        self._steps.forget()

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """ids [T] int64 -> hidden [T, E], or [W, E] for `batch.selected`, ready for `logits`. Writes keys and values into `kv`.

        Of a stage that another follows: [0, E]; its results are sent.
        """
        if self.place.is_first:
            branch = self._embedded(ids)
            residual = torch.zeros_like(branch)
        else:
            branch, residual = (self._received(len(ids)) for _ in range(2))
        out = self._steps.run(branch, residual, batch, kv)
        if self.place.is_last:
            return out[0]
        for each in out:
            self.peers.send(each.cpu())
        return out[0][:0]

    def _received(self, num_tokens: int) -> Tensor:
        """Stages exchange host memory, whatever they compute on."""
        received = torch.empty((num_tokens, self.hidden_size), dtype=self.activations)
        self.peers.receive(received)
        return received.to(self.device.name)

    def _embedded(self, ids: Tensor) -> Tensor:
        """A rank has zeros for the tokens of the other ranks' vocabulary."""
        own = self._vocabulary
        if len(own) == self.vocab_size:
            branch = self.embedding.rows(ids).to(self.activations)
        else:
            is_others = (ids < own.start) | (ids >= own.stop)
            rows = self.embedding.rows((ids - own.start).masked_fill_(is_others, 0))
            branch = self.peers.reduce(rows.to(self.activations).masked_fill_(is_others[:, None], 0.0))
        if self._embedding_scale != 1.0:
            branch *= self._embedding_scale
        return branch

    def _layers(self, branch: Tensor, residual: Tensor, batch: ForwardBatch, kv: KvCache) -> tuple[Tensor, ...]:
        if self.adapters is not None:
            self.adapters.step = batch.adapters
        last = self.blocks[-1] if self.place.is_last else None
        for block, group, cache in zip(self.blocks, self.group_of, kv.layers, strict=True):
            self._steps.next_layer()
            selected = batch.selected if block is last else None
            branch, residual = block(branch, residual, batch, batch.groups[group], cache, selected)
        if self.adapters is not None:
            self.adapters.step = None  # it holds adapters that may leave meanwhile
        if last is None:
            return branch, residual
        return (self.final_norm(branch, residual) if len(residual) else residual,)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, E], rows of what `forward` returned -> [N, V] float32; [0, V] on all ranks of the last stage but the first, to which
        they give their parts. All of them call it.
        """
        own, tp = self.head(hidden), self.place.parallelism.tp
        if tp > 1:
            own = self.peers.gather(F.pad(own, (0, -(-self.vocab_size // tp) - own.shape[1])))[:, : self.vocab_size].contiguous()
        return own.float()


def group_layers(spec: DecoderSpec, place: Place, dtype_bytes: int) -> tuple[tuple[KvGroup, ...], tuple[int, ...]]:
    """(KV groups in the order of their first layer, index of the group of each layer of the stage). A group's layers share window, heads
    and head size."""
    tp, own = place.parallelism.tp, place.layers(len(spec.layers))
    kinds = [(layer.attention.window, layer.attention.kv_heads_of(tp), layer.attention.head_dim) for layer in spec.layers]
    order = list(dict.fromkeys(kinds))
    groups = tuple(
        KvGroup(
            layers=tuple(index for index in own if kinds[index] == kind),
            kv_heads=kind[1],
            head_dim=kind[2],
            dtype_bytes=dtype_bytes,
            window=kind[0],
        )
        for kind in order
    )
    return groups, tuple(order.index(kinds[index]) for index in own)


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
