"""The inputs of a plan: a device, a model, the traffic and its goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.policy.placement.model import ModelShape

WEIGHT_EFFICIENCY = {4.0: 0.80, 2.0: 0.80, 1.0: 0.70, 0.5: 0.60}
"""Bytes of one weight -> share of the sheet's bandwidth at which a decode step reads weights."""

KV_EFFICIENCY = 0.80

COMPUTE_EFFICIENCY = {4.0: 0.65, 2.0: 0.65, 1.0: 0.48, 0.5: 0.65}

LAYER_OVERHEAD_S = 30e-6
"""Seconds that each layer adds to a step whatever its size: gaps between kernels, and kernels that are too small for the device.

This and the efficiencies above were fitted to steps of an 8B model on one H100 (docs/planning.md shows the fit).
"""


FP32_TIMES = 16


ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Link:
    """latency_s: of one sum over its devices, however small; source: of both figures"""

    name: str
    bytes_per_s: float
    latency_s: float
    num_devices: int
    source: str = ASSUMED

    def all_reduce_s(self, num_ranks: int, num_bytes: float) -> float:
        """num_bytes: of the tensor that ranks of one machine add up. By the cost of a ring (Patarasuk and Yuan 2009)."""
        return self.latency_s + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """bytes_per_s      read bandwidth of that memory
    flops            dtype of weights -> FLOP/s of dense products
    price_per_hour   of one device, in dollars; None: not known
    """

    name: str
    title: str
    memory_bytes: float
    bytes_per_s: float
    flops: Mapping[str, float]
    link: Link
    network: Link
    price_per_hour: float | None
    as_of: str
    source: str
    price_source: str = ""
    is_served: bool = True
    layer_overhead_s: float = LAYER_OVERHEAD_S
    weight_efficiency: Mapping[float, float] = field(default_factory=lambda: WEIGHT_EFFICIENCY)
    compute_efficiency: Mapping[float, float] = field(default_factory=lambda: COMPUTE_EFFICIENCY)

    def flops_of(self, dtype: str) -> float:
        return self.flops.get(dtype, self.flops["bf16"] / (FP32_TIMES if dtype == "fp32" else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    ttft_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """tokens_per_s                  rate to generate in all (for an encoder: to read); 0: as much as the devices can
    mean_tokens_per_s             of a day, where tokens_per_s is its peak, for the cost of a token; 0: tokens_per_s is the mean
    """

    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float = 0.0
    mean_tokens_per_s: float = 0.0
    user_tokens_per_s: float = 0.0
    counts_prompts: bool = False

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def decode_context(self) -> float:
        """Tokens before the one that a step computes, in the mean: answers are half done."""
        return self.prompt_tokens + self.output_tokens / 2 if self.counts_prompts else self.context


MAX_NUM_SEQS = 1024

DEFAULT_CONTEXT = 4096

OUTPUT_SHARE = 4
"""Assumed context tokens per answer token."""


def usual_traffic(longest: int) -> Traffic:
    """Where nothing is known of the requests. longest: context in tokens"""
    context = min(DEFAULT_CONTEXT, longest)
    output = max(1, context // OUTPUT_SHARE)
    return Traffic(prompt_tokens=max(1, context - output), output_tokens=output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """compares_all     also layouts that this version does not run may be chosen
    rounding         to which the engine rounds the weights when it loads them; empty: they are as stored, or in 16 or 32 bits
    max_num_seqs     that a replica computes together
    max_replicas     where the devices are given; None: as many as they hold
    max_stages       of a pipeline; None: as many as there are layers
    refused          tensor parallel size -> why the checkpoint's own form does not divide so
    """

    model: ModelShape
    device: Device
    dtype: str
    kv_dtype: str
    traffic: Traffic
    goals: Goals = Goals()
    num_devices: int | None = None
    memory_fraction: float = 1.0
    compares_all: bool = False
    rounding: str = ""
    max_num_seqs: int = MAX_NUM_SEQS
    max_replicas: int | None = None
    max_stages: int | None = None
    refused: Mapping[int, str] = field(default_factory=dict)
