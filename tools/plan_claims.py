"""Holds quoted rates of 7B and 70B models to the planner, and shows what the number of replicas and of sequences follow.

docs/sizings.md prints both. Every layout is compared, also those that this version does not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.lab.plan.catalogue import Catalogue
from headrace.lab.plan.plan import CapacityPlan
from headrace.policy.placement.layout import judge
from tools.plan_sizings import Sizing, fleet, mixed_fleet, resident

TPOT_S = 0.05

MIXES = ((700, 2100, ", fitted to 80 + 30"), (2048, 2048, ""))
"""Contexts of the 70B and of the 7B model, and a remark."""


@dataclass(frozen=True, slots=True)
class QuotedRate:
    """A quoted rate, at least `least` tokens per second, of a device or else of a replica. cases: model, device and context"""

    text: str
    least: float
    is_per_device: bool
    cases: tuple[tuple[str, str, int], ...]


CLAIMS = (
    QuotedRate(
        "1,000 output tokens/s per A100",
        1000,
        True,
        (("llama-70b", "a100", 700), ("llama-70b", "a100", 2048), ("mistral-7b", "a100", 2048)),
    ),
    QuotedRate("1,000 tokens/s and more, 70B", 1000, False, (("llama-70b", "a100", 2048), ("llama-70b", "h100", 2048))),
    QuotedRate("4,000 tokens/s, 7B on one A100", 4000, True, (("mistral-7b", "a100", 2048), ("llama-2-7b", "a100", 2048))),
    QuotedRate("3,000 to 6,000 tokens/s per replica of 70B", 3000, False, (("llama-70b", "a100", 2048), ("llama-70b", "h100", 2048))),
)


@dataclass(frozen=True, slots=True)
class PlannedRate:
    """What the planner says to one case of a claim. decoding, counted: tokens per second without and with the prompts as load"""

    claim: QuotedRate
    case: str
    decoding: float
    counted: float

    @property
    def verdict(self) -> str:
        if self.counted >= self.claim.least:
            return "yes"
        return "for decoding alone" if self.decoding >= self.claim.least else "no"


def findings(catalogue: Catalogue) -> Iterator[PlannedRate]:
    for claim in CLAIMS:
        for model, device, context in claim.cases:
            plans = [
                fleet(catalogue, model, device, context=context, tokens_per_s=0, tpot_s=TPOT_S, output_tokens=output)
                for output in (0, context // 4)
            ]
            layouts = list(dict.fromkeys(str(plan.best.layout) for plan in plans))
            case = f"{model} on {device}, {' and '.join(layouts)}, {context:,} tokens of context"
            yield PlannedRate(claim, case, *(_rate(plan, claim) for plan in plans))


def _rate(plan: CapacityPlan, claim: QuotedRate) -> float:
    return plan.best.full_tokens_per_s / (plan.best.layout.num_devices if claim.is_per_device else 1)


LONG_CONTEXT = 128 << 10


def rule(catalogue: Catalogue) -> Iterator[Sizing]:
    """Replicas follow the tokens per second of all users, concurrency follows the memory for KV."""
    for count in (4, 8):
        tokens, sequences = resident(catalogue, "llama-70b", "h100", count, 2048)
        said = "560k tokens, 270 sequences" if count == 4 else ""
        yield Sizing(f"Sequences of 2K tokens, 70B fp16 on {count} H100", said, f"{sequences:,}", f"{tokens:,} resident tokens / 2,048")
    tokens, sequences = resident(catalogue, "llama-70b", "h100", 8, LONG_CONTEXT)
    how = f"{tokens:,} resident tokens / {LONG_CONTEXT:,}"
    yield Sizing("Sequences of 128K tokens, 70B fp16 on 8 H100", "", f"{sequences:,}", how)
    plan = fleet(catalogue, "llama-70b", "h100", context=2048, tokens_per_s=30_000, user_tokens_per_s=30)
    for users in (1000, 2000):
        best = judge(replace(plan.need, traffic=replace(plan.need.traffic, tokens_per_s=30.0 * users)), plan.best.layout)
        found = f"{best.replicas} x {best.layout.num_devices} = {best.num_devices} H100"
        how = f"{30 * users:,} tokens/s / {30 * best.batch:,} of a full replica, which has {best.batch} users"
        yield Sizing(f"{users:,} users x 30 tokens/s of 70B", "8 replicas x 4 = 32 H100" if users == 1000 else "", found, how)
    for large, small, remark in MIXES:
        plans = mixed_fleet(catalogue, large, small)
        counts = [plan.best.num_devices for plan in plans]
        contexts = f"{large:,} and {small:,} tokens of context" if large != small else f"{large:,} tokens of context for both"
        rates = " and ".join(f"{plan.best.full_tokens_per_s / plan.best.layout.num_devices:,.0f}" for plan in plans)
        said = "80 + 30 = 110 A100" if remark else ""
        how = f"{contexts}{remark}: {rates} tokens/s per A100"
        yield Sizing("80,000 tokens/s of 70B and 120,000 of 7B", said, f"{counts[0]} + {counts[1]} = {sum(counts)} A100", how)
