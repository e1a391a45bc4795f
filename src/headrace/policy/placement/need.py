"""The inputs of a plan: a model, a device, the traffic and its goals."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.policy.placement.device import Device
from headrace.policy.placement.model import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Goals in seconds; None: no goal. ttft_s is for the mean."""

    ttft_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The load to be served.

    prompt_tokens, output_tokens  per request; a sequence's context is their sum
    tokens_per_s                  rate to generate in all (for an encoder: to read); 0: as much as the devices can
    mean_tokens_per_s             of a day, where tokens_per_s is its peak, for the cost of a token; 0: tokens_per_s is the mean
    user_tokens_per_s             rate that each user should see; 0: no wish
    counts_prompts                whether the rate of prompts is known, so that their computation is part of the load
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
        """Tokens before the one that a step computes, in the mean: with random arrivals, answers are half done."""
        return self.prompt_tokens + self.output_tokens / 2 if self.counts_prompts else self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The inputs of a choice.

    num_devices      None: no limit
    memory_fraction  part of a device's memory for weights and cache
    compares_all     also layouts that this version does not run may be chosen
    rounding         to which the engine rounds the weights when it loads them; empty: they are as stored, or in 16 or 32 bits
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
