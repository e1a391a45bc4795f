"""Predicts a step's time: the larger of bytes read / bandwidth and FLOPs / (FLOP/s), plus collectives and gaps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from headrace.policy.placement.model import KV_BYTES, WEIGHT_BYTES, ModelShape
from headrace.policy.placement.need import KV_EFFICIENCY, Device

CHUNK_TOKENS = 2048

ACTIVATION_BYTES = 2


READING_WEIGHTS, COMPUTING, READING_KV, GAPS, COLLECTIVES = "reading weights", "computing", "reading KV", "gaps", "collectives"


class StepLatency(Protocol):
    def prefill_s(self, num_tokens: int, context: int = 0) -> float:
        """Seconds from a prompt's first to its last token. context: tokens of it that are computed already"""
        ...

    def decode_s(self, num_sequences: float, context: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Layout:
    tp: int = 1
    pp: int = 1

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP {self.tp}" + (f" x PP {self.pp}" if self.pp > 1 else "")


@dataclass(frozen=True, slots=True)
class Roofline:
    """A `StepLatency` of one replica. dtype: of the weights, kv_dtype: of the cache; names of `model.WEIGHT_BYTES` and `model.KV_BYTES`"""

    model: ModelShape
    device: Device
    layout: Layout
    dtype: str
    kv_dtype: str

    @property
    def weights_bytes(self) -> float:
        return self.model.weights_bytes(self.dtype)

    @property
    def kv_bytes_per_token(self) -> float:
        """Heads held by several devices count once for each."""
        return self.model.num_kv_values * KV_BYTES[self.kv_dtype] * self._kv_copies

    def kv_bytes(self, num_tokens: float) -> float:
        return self.model.num_resident_kv_values(num_tokens) * KV_BYTES[self.kv_dtype] * self._kv_copies

    @property
    def _kv_copies(self) -> float:
        return self.layout.tp / self.model.kv_shards(self.layout.tp)

    def prefill_s(self, num_tokens: int, context: int = 0) -> float:
        num_chunks = math.ceil(num_tokens / CHUNK_TOKENS)
        return self.prefill_busy_s(num_tokens, context) * (1 + (self.layout.pp - 1) / num_chunks)

    def prefill_busy_s(self, num_tokens: float, context: float = 0.0) -> float:
        return sum(self.prefill_terms(num_tokens, context).values())

    def prefill_terms(self, num_tokens: float, context: float = 0.0) -> dict[str, float]:
        pp = self.layout.pp
        flops = num_tokens * (2 * self.model.num_active_params + self.model.attention_flops(context + num_tokens / 2))
        num_chunks = max(1.0, num_tokens / CHUNK_TOKENS)
        read_s = num_chunks * self.read_weights_s(num_tokens / num_chunks)
        return _longer(read_s / pp, flops / (self.layout.tp * self.compute_rate) / pp) | {
            GAPS: num_chunks * self.model.num_layers * self.device.layer_overhead_s / pp,
            COLLECTIVES: num_chunks * self.collectives_s(num_tokens / num_chunks) / pp,
        }

    def decode_s(self, num_sequences: float, context: float) -> float:
        return sum(self.decode_terms(num_sequences, context).values())

    def decode_terms(self, num_sequences: float, context: float) -> dict[str, float]:
        batch = self._batch(num_sequences)
        compute_s = 2 * batch * self.model.num_active_params / (self.layout.tp * self.compute_rate)
        return _longer(self.read_weights_s(batch), compute_s) | {
            READING_KV: self.read_kv_s(batch, context),
            GAPS: self.model.num_layers * self.device.layer_overhead_s,
            COLLECTIVES: self.collectives_s(batch),
        }

    def read_weights_s(self, num_tokens: float) -> float:
        rate = self.device.bytes_per_s * self.device.weight_efficiency[WEIGHT_BYTES[self.dtype]]
        return self.model.read_bytes(self.dtype, num_tokens) / (self.layout.tp * rate)

    def read_kv_s(self, num_sequences: float, context: float) -> float:
        rate = self.device.bytes_per_s * KV_EFFICIENCY
        return num_sequences * self.kv_bytes(context) / (self.layout.tp * rate)

    def collectives_s(self, num_tokens: float) -> float:
        """Two all-reduces per layer within a group (Shoeybi et al. 2019), and one transfer from each group to the next."""
        message = num_tokens * self.model.hidden_size * ACTIVATION_BYTES
        tp, link, network = self.layout.tp, self.device.link, self.device.network
        reduce_s = 2 * self.model.num_layers * link.all_reduce_s(tp, message) if tp > 1 else 0.0
        between = link if self.layout.num_devices <= link.num_devices else network
        return reduce_s + (self.layout.pp - 1) * (between.latency_s + message / (tp * between.bytes_per_s))

    def decode_bytes(self, num_sequences: float, context: float) -> float:
        batch = self._batch(num_sequences)
        weights = self.model.read_bytes(self.dtype, batch) * num_sequences / batch
        return weights + num_sequences * self.kv_bytes(context)

    def bandwidth_tokens_per_s(self, num_sequences: float, context: float) -> float:
        return num_sequences * self.layout.num_devices * self.device.bytes_per_s / self.decode_bytes(num_sequences, context)

    def _batch(self, num_sequences: float) -> float:
        return max(num_sequences / self.layout.pp, min(num_sequences, 1.0))

    @property
    def compute_rate(self) -> float:
        return self.device.flops_of(self.dtype) * self.compute_efficiency

    @property
    def compute_efficiency(self) -> float:
        """Weights of a dtype that the device cannot multiply are multiplied in 16 bits, at the share for 16 bits."""
        size = WEIGHT_BYTES[self.dtype] if self.dtype in self.device.flops else WEIGHT_BYTES["bf16"]
        return self.device.compute_efficiency[size]


def _longer(read_s: float, compute_s: float) -> dict[str, float]:
    return {READING_WEIGHTS: read_s} if read_s >= compute_s else {COMPUTING: compute_s}


LOAD_BYTES_PER_S = 2e9
"""Rate at which a replica reads its weights, assumed: a network volume."""

START_S = 20.0
"""Seconds that a start takes beside reading weights, assumed."""


def load_seconds(weights_bytes: float, bytes_per_s: float = LOAD_BYTES_PER_S) -> float:
    return START_S + weights_bytes / bytes_per_s
