"""Sizings that are often asked for, each computed by the planner from shapes and devices: docs/planning.md and docs/cost.md print them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.lab.plan.catalogue import Catalogue
from headrace.lab.plan.plan import CapacityPlan, dollars_per_1m_tokens, make_plan
from headrace.lab.plan.shapes import find_model
from headrace.policy.placement.layout import Goals, Need, Traffic, capacity
from headrace.policy.placement.model import KV_BYTES, WEIGHT_BYTES, ModelShape
from headrace.policy.placement.roofline import Layout, Roofline


@dataclass(frozen=True, slots=True)
class Sizing:
    """said: what common texts say; found: what the planner computes; how: from what"""

    question: str
    said: str
    found: str
    how: str


def shape(catalogue: Catalogue, name: str) -> ModelShape:
    return find_model(name, catalogue.models)[0]


def kv_bytes(model: ModelShape, num_tokens: int, dtype: str = "fp16") -> float:
    """KV cache of one sequence."""
    return model.num_resident_kv_values(num_tokens) * KV_BYTES[dtype]


def weights_bytes(model: ModelShape, dtype: str) -> float:
    return model.num_params * WEIGHT_BYTES[dtype]


def resident(catalogue: Catalogue, name: str, device: str, tp: int, context: int, *, memory_fraction: float = 1.0) -> tuple[int, int]:
    """Tokens and sequences of `context` tokens that one replica over `tp` devices holds, fp16."""
    need = Need(
        model=shape(catalogue, name),
        device=catalogue.device(device),
        dtype="fp16",
        kv_dtype="fp16",
        traffic=Traffic(prompt_tokens=context - 1, output_tokens=1),
        memory_fraction=memory_fraction,
    )
    return capacity(need, Layout(tp))


def fleet(
    catalogue: Catalogue,
    name: str,
    device: str,
    *,
    context: int,
    tokens_per_s: float,
    user_tokens_per_s: float = 0.0,
    tpot_s: float | None = None,
    output_tokens: int = 0,
    dtype: str = "fp16",
) -> CapacityPlan:
    """What generates `tokens_per_s` in all. output_tokens: of an answer; 0: prompts are not counted"""
    output = output_tokens or context // 4
    return make_plan(
        Need(
            model=shape(catalogue, name),
            device=catalogue.device(device),
            dtype=dtype,
            kv_dtype="fp16",
            traffic=Traffic(
                prompt_tokens=context - output,
                output_tokens=output,
                tokens_per_s=tokens_per_s,
                user_tokens_per_s=user_tokens_per_s,
                counts_prompts=bool(output_tokens),
            ),
            goals=Goals(tpot_s=tpot_s),
        ),
        catalogue.prices,
    )


def standby_replicas(*, requests_per_s: float, replica_requests_per_s: float, running: int, load_s: float, patience_s: float) -> int:
    """Replicas that must be warm beside those that run, so that a spike times no client out while further ones load for `load_s`.

    Requests that come while the load takes and are not served then wait in a queue. The last of them waits for the whole queue, and may not
    wait longer than `patience_s`, also if no further replica helps: rate x load / (load + patience) is what must be served meanwhile.
    """
    wanted = requests_per_s * load_s / (load_s + patience_s) / replica_requests_per_s
    return max(0, math.ceil(wanted - 1e-9) - running)


def routing_saving(share_small: float, cost_ratio: float) -> float:
    """Share of the costs that is saved where this share of the tokens goes to a model that costs 1/`cost_ratio` of the large one."""
    return share_small * (1 - 1 / cost_ratio)


def known_sizings(catalogue: Catalogue) -> Iterator[Sizing]:
    """The figures that most texts about serving quote."""
    large, small = shape(catalogue, "llama-70b"), shape(catalogue, "llama-2-7b")
    giant, grouped = shape(catalogue, "llama-3-405b"), shape(catalogue, "mistral-7b")
    tokens, sequences = resident(catalogue, "llama-70b", "h100", 4, 2048)
    yield Sizing("Resident tokens, 70B fp16 on 4 H100", "560k", f"{tokens:,}", "(4 x 80 GB - 138 GB) / 320 KiB")
    yield Sizing("Sequences of 2K tokens there", "270", f"{sequences:,}", "resident tokens / 2,048")
    users = fleet(catalogue, "llama-70b", "h100", context=2048, tokens_per_s=30_000, user_tokens_per_s=30)
    yield Sizing(
        "1,000 users at 30 tokens/s, 70B on H100",
        "30,000 tok/s, 8 x 4 = 32 H100",
        f"{users.best.replicas} x {users.best.layout.num_devices} = {users.best.num_devices} H100",
        f"{users.best.batch} users per replica at TPOT {users.best.tpot_s * 1e3:.1f} ms, 80 % of 33.3 ms; prompts not counted",
    )
    first, second = mixed_fleet(catalogue)
    yield Sizing(
        "200,000 tokens/s, 40 % by 70B and 60 % by 7B, on A100",
        "80 + 30 A100",
        f"{first.best.num_devices} + {second.best.num_devices} A100",
        f"70B with 640 tokens of context: {first.best.tokens_per_s / first.best.num_devices:,.0f} tok/s per A100; 7B with 2K: "
        f"{second.best.tokens_per_s / second.best.num_devices:,.0f}",
    )
    for name, said, model in (("7B with 8 KV heads", "128 KB", grouped), ("70B", "320 KB", large), ("405B", "~500 KB", giant)):
        yield Sizing(
            f"KV of one token, {name}, fp16", said, f"{kv_bytes(model, 1) / 1024:,.0f} KiB", "2 x layers x KV heads x 128 x 2 bytes"
        )
    yield Sizing("KV of 128K tokens, 70B", "40 GB", f"{kv_bytes(large, 131_072) / 2**30:.1f} GiB", "320 KiB x 131,072 = 42.9e9 bytes")
    yield Sizing("KV of 4,096 tokens, 7B with 32 KV heads", "2 GB", f"{kv_bytes(small, 4096) / 2**30:.1f} GiB", "512 KiB x 4,096")
    for name, said, model, dtype in (
        ("70B fp16", "140 GB", large, "fp16"),
        ("70B int4", "35 GB", large, "int4"),
        ("405B fp16", "810 GB", giant, "fp16"),
        ("405B fp8", "405 GB", giant, "fp8"),
        ("7B fp16", "14 GB", small, "fp16"),
    ):
        yield Sizing(f"Weights, {name}", said, f"{weights_bytes(model, dtype) / 1e9:,.1f} GB", f"{model.num_params / 1e9:.2f}e9 weights")
    cost = dollars_per_1m_tokens(2.0, 1000.0) / 1000
    yield Sizing("1K tokens at $2 per hour and 1,000 tokens/s", "$0.0002 to $0.002", f"${cost:.5f}", "2 / 3600 / 1,000 x 1,000")
    ratio = catalogue.device("h100").bytes_per_s / catalogue.device("a100").bytes_per_s
    yield Sizing(
        "Decoding on H100 against A100", "5 x", f"{ratio:.2f} x", "3,350 / 1,935 GB/s: decoding reads memory; 5 x needs FP8 and prompts"
    )


def mixed_fleet(catalogue: Catalogue) -> tuple[CapacityPlan, CapacityPlan]:
    """200,000 tokens/s: 40 % of them by 70B, 60 % by 7B."""
    large = fleet(catalogue, "llama-70b", "a100", context=640, tokens_per_s=80_000, tpot_s=0.05)
    return large, fleet(catalogue, "mistral-7b", "a100", context=2048, tokens_per_s=120_000, tpot_s=0.05)


@dataclass(frozen=True, slots=True)
class Lever:
    """One step of making a bill smaller. factor: what the costs are multiplied by"""

    name: str
    how: str
    factor: float


def levers(catalogue: Catalogue) -> Iterator[Lever]:
    """From fp16 70B, 32 sequences at a time on A100, to what the steps make of it; each applies to what the steps before left."""
    before = _dollars_per_1m(catalogue, "llama-70b", "fp16", 32)
    quantized = _dollars_per_1m(catalogue, "llama-70b", "int8", 32)
    yield Lever("Quantize", "int8 weights: half the bytes, half the devices of a replica", quantized / before)
    batched = _dollars_per_1m(catalogue, "llama-70b", "int8")
    yield Lever("Batch", "continuous batching fills a replica up to a TPOT of 48 ms, instead of 32 sequences", batched / quantized)
    yield Lever("Cache", "15 % of the requests are answered from the response cache", 0.85)
    small = _dollars_per_1m(catalogue, "mistral-7b", "int8")
    yield Lever("Route", f"60 % of the tokens by a 7B model, {batched / small:.1f} times cheaper", 1 - routing_saving(0.6, batched / small))
    yield Lever("Spot", "40 % of the devices are spot instances at 35 % of the price", 1 - 0.4 * 0.65)
    yield Lever("Scale down", "half of the replicas for 8 of 24 hours", 1 - 0.5 * 8 / 24)


def _dollars_per_1m(catalogue: Catalogue, name: str, dtype: str, batch: int | None = None) -> float:
    """Device time of 1M tokens on A100 with 2K of context. batch: sequences of a replica; None: as many as keep the goal"""
    plan = fleet(catalogue, name, "a100", context=2048, tokens_per_s=0, tpot_s=0.06, dtype=dtype)
    best, need = plan.best, plan.need
    assert best.price_per_hour is not None, "the catalogue's A100 has a price"
    rate = best.tokens_per_s
    if batch is not None:
        rate = best.replicas * batch / Roofline(need.model, need.device, best.layout, dtype, "fp16").decode_s(batch, need.traffic.context)
    return dollars_per_1m_tokens(best.price_per_hour, rate)
