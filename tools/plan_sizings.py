"""Lists sizings that are often asked for, each computed by the planner from shapes and devices. docs/sizings.md and docs/cost.md print
them. They compare every layout, also those that this version does not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.lab.plan.catalogue import Catalogue
from headrace.lab.plan.plan import CapacityPlan, dollars_per_1m_tokens, make_plan
from headrace.lab.plan.shapes import find_entry
from headrace.policy.placement.layout import capacity, judge, layouts
from headrace.policy.placement.model import KV_BYTES, ModelShape
from headrace.policy.placement.need import Goals, Need, Traffic
from headrace.policy.placement.roofline import Layout, Roofline


@dataclass(frozen=True, slots=True)
class Sizing:
    """One question of sizing. said: the answer in common texts; found: the planner's answer; how: its calculation"""

    question: str
    said: str
    found: str
    how: str


def shape(catalogue: Catalogue, name: str) -> ModelShape:
    return find_entry(name, catalogue.models)[0]


def kv_bytes(model: ModelShape, num_tokens: int, dtype: str = "fp16") -> float:
    """Bytes of one sequence's KV cache."""
    return model.num_resident_kv_values(num_tokens) * KV_BYTES[dtype]


def weights_bytes(model: ModelShape, dtype: str) -> float:
    return model.weights_bytes(dtype)


def resident(catalogue: Catalogue, name: str, device: str, tp: int, context: int, *, memory_fraction: float = 1.0) -> tuple[int, int]:
    """(tokens, sequences of `context` tokens) that one fp16 replica over `tp` devices holds."""
    need = Need(
        model=shape(catalogue, name),
        device=catalogue.device(device),
        dtype="fp16",
        kv_dtype="fp16",
        traffic=Traffic(prompt_tokens=context - 1, output_tokens=1),
        memory_fraction=memory_fraction,
        compares_all=True,
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
    """The plan for generating `tokens_per_s` in all. output_tokens: per answer; 0: prompts are not counted"""
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
            compares_all=True,
        ),
        catalogue.prices,
    )


def standby_replicas(*, requests_per_s: float, replica_requests_per_s: float, running: int, load_s: float, patience_s: float) -> int:
    """Replicas to keep warm beside the running ones, so that no client times out while further replicas load for `load_s` seconds.

    Requests that arrive while replicas load, and are not served at once, queue. The last of them waits for the whole queue, and must not
    wait longer than `patience_s`. So rate x load / (load + patience) must be served meanwhile, whether or not further replicas help later.
    Arrivals are taken as even: where they bunch, some requests wait longer.
    """
    wanted = requests_per_s * load_s / (load_s + patience_s) / replica_requests_per_s
    return max(0, math.ceil(wanted - 1e-9) - running)


def routing_saving(share_small: float, cost_ratio: float) -> float:
    """Share of the costs saved if this share of the tokens goes to a model at 1/`cost_ratio` of the large one's cost."""
    return share_small * (1 - 1 / cost_ratio)


def known_sizings(catalogue: Catalogue) -> Iterator[Sizing]:
    """The figures that most texts about serving quote."""
    yield from _fleets(catalogue)
    yield from _memory(catalogue)
    yield from _costs(catalogue)


def _fleets(catalogue: Catalogue) -> Iterator[Sizing]:
    each = [
        fleet(catalogue, name, "a100", context=2048, tokens_per_s=200_000, user_tokens_per_s=200).best
        for name in ("mistral-7b", "llama-70b")
    ]
    found = ["not on A100" if best.reason else f"{best.num_devices} A100" for best in each]
    yield Sizing(
        "200,000 tokens/s for 1,000 users",
        "200 tok/s each",
        f"yes: 7B {found[0]}, 70B {found[1]}",
        f"a TPOT of 5 ms; 70B over {each[1].layout}: {each[1].reason or 'it is'}",
    )


def _memory(catalogue: Catalogue) -> Iterator[Sizing]:
    large, small = shape(catalogue, "llama-70b"), shape(catalogue, "llama-2-7b")
    giant, grouped = shape(catalogue, "llama-3-405b"), shape(catalogue, "mistral-7b")
    for name, said, model in (("7B with 8 KV heads", "128 KB", grouped), ("70B", "320 KB", large), ("405B", "~500 KB", giant)):
        yield Sizing(
            f"KV of one token, {name}, fp16", said, f"{kv_bytes(model, 1) / 1024:,.0f} KiB", "2 x layers x KV heads x 128 x 2 bytes"
        )
    yield Sizing("KV of 128K tokens, 70B", "40 GB", f"{kv_bytes(large, 131_072) / 2**30:.1f} GiB", "320 KiB x 131,072 = 42.9e9 bytes")
    yield Sizing("KV of 4,096 tokens, 7B with 32 KV heads", "2 GB", f"{kv_bytes(small, 4096) / 2**30:.1f} GiB", "512 KiB x 4,096")
    for name, said, key, dtype, device in (
        ("70B fp16", "140 GB, 2 A100", "llama-70b", "fp16", "a100"),
        ("70B int4", "35 GB, 1 A100", "llama-70b", "int4", "a100"),
        ("405B fp16", "810 GB, 8 H100", "llama-3-405b", "fp16", "h100"),
        ("405B fp8", "405 GB, 8 H100", "llama-3-405b", "fp8", "h100"),
        ("7B fp16", "14 GB", "llama-2-7b", "fp16", "rtx4090"),
    ):
        model, layout, memory = shape(catalogue, key), smallest_layout(catalogue, key, device, dtype), catalogue.device(device).memory_bytes
        weights = weights_bytes(model, dtype)
        yield Sizing(
            f"Weights, {name}, and what they fit on",
            said,
            f"{weights / 1e9:,.1f} GB, {layout.num_devices} x {device} ({layout})",
            f"{model.num_params / 1e9:.2f}e9 weights; 1 device has {memory / 1e9:g} GB, 8 have {8 * memory / 1e9:,g} GB",
        )
    sizes = {dtype: weights_bytes(large, dtype) for dtype in ("fp32", "fp16", "int8", "int4")}
    yield Sizing(
        "Weights in int8 and int4 against fp16; fp32",
        "2 x, 4 x; 4 x, 8 x smaller",
        "; ".join(", ".join(f"{sizes[wide] / sizes[narrow]:.0f} x" for narrow in ("int8", "int4")) for wide in ("fp16", "fp32")),
        "int8 and int4 with the embedding and the head in 16 bits, int4 with scales",
    )


def smallest_layout(catalogue: Catalogue, name: str, device: str, dtype: str) -> Layout:
    """The layout of the fewest devices that hold the weights and one sequence of 2K tokens. Raises ValueError if there is none."""
    traffic = Traffic(prompt_tokens=2047, output_tokens=1)
    model, there = shape(catalogue, name), catalogue.device(device)
    need = Need(model=model, device=there, dtype=dtype, kv_dtype="fp16", traffic=traffic, compares_all=True)
    return min((each for each in layouts(need) if judge(need, each).batch), key=lambda each: (each.num_devices, each.pp))


def _costs(catalogue: Catalogue) -> Iterator[Sizing]:
    cost = dollars_per_1m_tokens(2.0, 1000.0) / 1000
    yield Sizing("1K tokens at $2 per hour and 1,000 tokens/s", "$0.0002 to $0.002", f"${cost:.5f}", "2 / 3600 / 1,000 x 1,000")
    alone, counted = (cost_ratio(catalogue, "llama-3-70b", "llama-3-8b", counts_prompts=counts) for counts in (False, True))
    yield Sizing(
        "A token of 70B against one of 8B, on H100",
        "8 x (large models 5 to 10 x)",
        f"{alone:.1f} x; with prompts {counted:.1f} x",
        "9 x the weights, 2.5 x the KV: long contexts and large batches bring them together, prompts apart",
    )
    new, old, card = (catalogue.device(name) for name in ("h100", "a100", "a100-pcie"))
    model = shape(catalogue, "llama-3-8b")
    prompts = {
        dtype: Roofline(model, old, Layout(), "bf16", "bf16").prefill_busy_s(2048)
        / Roofline(model, new, Layout(), dtype, "bf16").prefill_busy_s(2048)
        for dtype in ("bf16", "fp8")
    }
    rate, sxm, pcie = (device.bytes_per_s / 1e9 for device in (new, old, card))
    yield Sizing(
        "H100 against A100",
        'bandwidth 3.35 : 1.9 = 1.76 x; "5 x"',
        f"decoding {rate / sxm:.2f} x, prompts {prompts['bf16']:.1f} x; FP8 prompts {prompts['fp8']:.1f} x",
        f"{rate:,.0f} / {sxm:,.0f} GB/s of the SXM card; {rate / pcie:.2f} x the PCIe card's {pcie:,.0f}",
    )
    yield Sizing(
        "Bandwidth of an RTX 4090", "0.92 TB/s", f"{catalogue.device('rtx4090').bytes_per_s / 1e12:.3f} TB/s", "384 bits x 21 Gbit/s / 8"
    )


def cost_ratio(catalogue: Catalogue, large: str, small: str, *, counts_prompts: bool) -> float:
    """Device time per token of `large`, over that of `small`. Each has its best layout on H100 for a TPOT of 50 ms and 2K of context."""
    output = 512 if counts_prompts else 0
    plans = [fleet(catalogue, name, "h100", context=2048, tokens_per_s=0, tpot_s=0.05, output_tokens=output) for name in (large, small)]
    dear, cheap = (plan.figures["price_per_hour"].value / plan.best.capacity_tokens_per_s for plan in plans)
    return dear / cheap


def mixed_fleet(catalogue: Catalogue, large_context: int = 700, small_context: int = 2100) -> tuple[CapacityPlan, CapacityPlan]:
    """Plans for 200,000 tokens/s: 40 % by a 70B model, 60 % by a 7B model. The default contexts are fitted to 80 and 30 A100."""
    large = fleet(catalogue, "llama-70b", "a100", context=large_context, tokens_per_s=80_000, tpot_s=0.05)
    return large, fleet(catalogue, "mistral-7b", "a100", context=small_context, tokens_per_s=120_000, tpot_s=0.05)


@dataclass(frozen=True, slots=True)
class Lever:
    """One step of lowering a bill. factor: new costs over old costs"""

    name: str
    how: str
    factor: float


def levers(catalogue: Catalogue) -> Iterator[Lever]:
    """Steps that lower the bill of a 70B model in fp16, 32 sequences at a time on A100. Each applies to the costs left by earlier ones."""
    before = _dollars_per_1m(catalogue, "llama-70b", "fp16", 32)
    quantized = _dollars_per_1m(catalogue, "llama-70b", "int8", 32)
    wide, narrow = (_on_a100(catalogue, "llama-70b", dtype).best.layout.num_devices for dtype in ("fp16", "int8"))
    replica = f"{narrow} devices to a replica" + (f" instead of {wide}" if narrow != wide else " as before")
    yield Lever("Quantize", f"int8 weights: half the bytes, {replica}", quantized / before)
    batched = _dollars_per_1m(catalogue, "llama-70b", "int8")
    yield Lever("Batch", "continuous batching fills a replica up to a TPOT of 48 ms, instead of 32 sequences", batched / quantized)
    yield Lever("Cache", "15 % of the requests are answered from the response cache", 0.85)
    small = _dollars_per_1m(catalogue, "mistral-7b", "int8")
    yield Lever("Route", f"60 % of the tokens by a 7B model, {batched / small:.1f} times cheaper", 1 - routing_saving(0.6, batched / small))
    yield Lever("Spot", "40 % of the devices are spot instances at 35 % of the price", 1 - 0.4 * 0.65)
    yield Lever("Scale down", "half of the replicas for 8 of 24 hours", 1 - 0.5 * 8 / 24)


def _dollars_per_1m(catalogue: Catalogue, name: str, dtype: str, batch: int | None = None) -> float:
    """Dollars for the device time of 1M tokens on A100 with 2K of context. batch: sequences per replica; None: as many as keep the goal"""
    plan = _on_a100(catalogue, name, dtype)
    best, need = plan.best, plan.need
    assert best.price_per_hour is not None, "the catalogue's A100 has a price"
    rate = best.capacity_tokens_per_s
    if batch is not None:
        rate = best.replicas * batch / Roofline(need.model, need.device, best.layout, dtype, "fp16").decode_s(batch, need.traffic.context)
    return dollars_per_1m_tokens(best.price_per_hour, rate)


def _on_a100(catalogue: Catalogue, name: str, dtype: str) -> CapacityPlan:
    return fleet(catalogue, name, "a100", context=2048, tokens_per_s=0, tpot_s=0.06, dtype=dtype)
