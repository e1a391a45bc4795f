"""Which layout, and how many replicas of it: every layout that a device allows is judged by the same rules, and the cheapest that keeps the
goals is chosen. Those that are not say why.

A replica is filled until its goals are used to HEADROOM. Where prompts are counted, `ratio` prompt tokens are computed for each token
generated, and a step of n sequences then takes decode_s(n) + n * ratio * (seconds of one prompt token).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from headrace.policy.placement.device import Device
from headrace.policy.placement.model import WEIGHT_BYTES, ModelShape
from headrace.policy.placement.roofline import CHUNK_TOKENS, Layout, Roofline

HEADROOM = 0.8
"""Share of a goal that a plan uses. The rest is for bursts, and for steps that are longer than predicted."""

TAIL = -math.log(0.05)
"""p95 of a waiting time over its mean, where it has an exponential tail."""

MAX_NUM_SEQS = 1024
"""Most sequences that a replica decodes together, whatever its memory holds."""

MAX_DEVICES = 64
"""Most devices of one replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Seconds; None: no goal. ttft_s is the mean."""

    ttft_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is to be served.

    prompt_tokens, output_tokens  of one request; their sum is the context that a sequence is given
    tokens_per_s                  to be generated in all (of an encoder: to be read); 0: as much as the devices can
    user_tokens_per_s             that each user wants to see; 0: no wish
    counts_prompts                the rate of prompts is known, and their computation is part of the load
    """

    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float = 0.0
    user_tokens_per_s: float = 0.0
    counts_prompts: bool = False

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def ratio(self) -> float:
        """Prompt tokens to be computed for each generated one."""
        return self.prompt_tokens / self.output_tokens if self.counts_prompts and self.output_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """memory_fraction: of each device's memory, for weights and cache; num_devices: that there are, None: as many as it takes"""

    model: ModelShape
    device: Device
    dtype: str
    kv_dtype: str
    traffic: Traffic
    goals: Goals = Goals()
    num_devices: int | None = None
    memory_fraction: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One layout, judged.

    resident_tokens, num_sequences  that the cache of one replica holds; a sequence has the traffic's whole context
    batch                           sequences that a replica decodes together when it is filled; 0: the layout cannot be used
    tpot_s, ttft_s, ttft_p95_s      at that batch
    decode_tokens_per_s             of one replica at that batch, with its share of prompts
    prefill_tokens_per_s            of one replica that does nothing else
    mbu                             share of the sheet's bandwidth that decoding uses
    replicas                        that the traffic needs, or that the devices are enough for
    price_per_hour                  of all replicas; None where the device has no price
    reason                          why it is not chosen; empty for the one that is
    """

    layout: Layout
    resident_tokens: int
    num_sequences: int
    batch: int
    tpot_s: float
    ttft_s: float
    ttft_p95_s: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    mbu: float
    replicas: int
    price_per_hour: float | None
    reason: str = ""

    @property
    def num_devices(self) -> int:
        return self.replicas * self.layout.num_devices

    @property
    def tokens_per_s(self) -> float:
        """The rate of all replicas together."""
        return self.replicas * self.decode_tokens_per_s

    @property
    def cost_per_1m_tokens(self) -> float | None:
        """Dollars of device time while every replica is filled; None without a price."""
        return None if self.price_per_hour is None or not self.batch else self.price_per_hour / 3600 / self.tokens_per_s * 1e6


def choose_layout(need: Need) -> list[Placement]:
    """Every layout, the chosen one first. Its `reason` is empty; where none keeps the goals, the first has a reason too."""
    judged = [judge(need, layout) for layout in layouts(need)]
    judged.sort(key=lambda each: (bool(each.reason), *(_shortfall(each) if each.reason else _cost(need, each))))
    if judged[0].reason:
        return judged
    best = judged[0]
    return [best, *(each if each.reason else _with_reason(each, _dearer(need, each, best)) for each in judged[1:])]


def layouts(need: Need) -> Iterator[Layout]:
    """Layouts to judge: devices in powers of two, within a machine's links for TP, and so few layouts that a search stays short."""
    most = min(MAX_DEVICES, MAX_DEVICES if need.num_devices is None else need.num_devices)
    for tp in _powers(min(most, need.device.link.num_devices)):
        for pp in _powers(min(most // tp, need.model.num_layers)):
            yield Layout(tp, pp)


def judge(need: Need, layout: Layout) -> Placement:
    """One layout, filled as far as memory and goals allow."""
    latency = Roofline(need.model, need.device, layout, need.dtype, need.kv_dtype)
    resident, sequences = capacity(need, layout)
    refused = _why_impossible(need, layout, resident, sequences)
    if need.model.is_encoder:
        return _encoder(need, latency, refused)
    most = min(sequences, MAX_NUM_SEQS)
    batch = 0 if refused else _largest(most, lambda batch: not _why_late(need, latency, batch))
    reason = refused or ("" if batch else _why_late(need, latency, 1))
    shown = max(1, batch)
    tpot_s, rate = _tpot_s(need, latency, shown), _rate(need, latency, shown)
    replicas, lacking = _replicas(need, layout, rate)
    ttft_s, ttft_p95_s = ttft(need, latency, shown)
    price = need.device.price_per_hour
    return Placement(
        layout=layout,
        resident_tokens=resident,
        num_sequences=sequences,
        batch=batch,
        tpot_s=tpot_s,
        ttft_s=ttft_s,
        ttft_p95_s=ttft_p95_s,
        decode_tokens_per_s=rate if batch else 0.0,
        prefill_tokens_per_s=need.traffic.prompt_tokens / latency.prefill_busy_s(need.traffic.prompt_tokens),
        mbu=latency.bandwidth_use(shown, need.traffic.context),
        replicas=replicas,
        price_per_hour=None if price is None else price * replicas * layout.num_devices,
        reason=reason or lacking,
    )


def capacity(need: Need, layout: Layout) -> tuple[int, int]:
    """Tokens that the cache of one replica holds, and sequences of the whole context. The group with the most layers sets the bound."""
    model, latency = need.model, Roofline(need.model, need.device, layout, need.dtype, need.kv_dtype)
    share = math.ceil(model.num_layers / layout.pp) / model.num_layers
    free = layout.tp * need.device.memory_bytes * need.memory_fraction / share - latency.weights_bytes
    if free <= 0 or model.is_encoder:
        return 0, 0
    return int(free // latency.kv_bytes_per_token), int(free // latency.kv_bytes(need.traffic.context))


def ttft(need: Need, latency: Roofline, batch: float) -> tuple[float, float]:
    """Mean and p95 of the time to the first token: half a step, the prompt's own computation among decode steps, and the wait for prompts
    before it, as in a queue with one server and equal service times (M/D/1).
    """
    prompt, context = need.traffic.prompt_tokens, need.traffic.context
    step_s, busy_s = latency.decode_s(batch, context), latency.prefill_busy_s(prompt)
    use = min(batch * need.traffic.ratio / max(prompt, 1) * busy_s / _tpot_s(need, latency, batch), 0.999) if need.traffic.ratio else 0.0
    own_s = latency.prefill_s(prompt) + (0.5 + math.ceil(prompt / CHUNK_TOKENS)) * step_s
    wait_s = use / (2 * (1 - use)) * busy_s
    return own_s + wait_s, own_s + TAIL * wait_s


def _tpot_s(need: Need, latency: Roofline, batch: float) -> float:
    prompt, context = need.traffic.prompt_tokens, need.traffic.context
    prompts_s = batch * need.traffic.ratio * latency.prefill_busy_s(prompt) / prompt if need.traffic.ratio else 0.0
    return latency.decode_s(batch, context) + prompts_s


def _rate(need: Need, latency: Roofline, batch: int) -> float:
    """Tokens per second that a replica generates when it is filled: a user takes no more than asked for."""
    wanted = need.traffic.user_tokens_per_s
    rate = batch / _tpot_s(need, latency, batch)
    return min(rate, batch * wanted) if wanted else rate


def _why_late(need: Need, latency: Roofline, batch: int) -> str:
    """The goal that a replica with this batch does not keep; empty where it keeps all."""
    goals, traffic = need.goals, need.traffic
    limits = [limit for limit in (goals.tpot_s, 1 / traffic.user_tokens_per_s if traffic.user_tokens_per_s else None) if limit]
    tpot_s = _tpot_s(need, latency, batch)
    if limits and tpot_s > HEADROOM * min(limits):
        return f"TPOT {tpot_s * 1e3:.1f} ms with {batch} sequence(s): more than {HEADROOM:.0%} of {min(limits) * 1e3:.1f} ms"
    for name, goal, value in zip(("TTFT", "TTFT p95"), (goals.ttft_s, goals.ttft_p95_s), ttft(need, latency, batch), strict=True):
        if goal is not None and value > HEADROOM * goal:
            return f"{name} {value * 1e3:.0f} ms with {batch} sequence(s): more than {HEADROOM:.0%} of {goal * 1e3:.0f} ms"
    return ""


def _why_impossible(need: Need, layout: Layout, resident: int, sequences: int) -> str:
    model, tp = need.model, layout.tp
    if model.heads % tp:
        return f"{model.heads} heads are not divisible by TP {tp}"
    if model.latent is None and model.kv_heads % tp and tp % model.kv_heads:
        return f"{model.kv_heads} KV heads do not fit TP {tp}"
    memory = layout.num_devices * need.device.memory_bytes * need.memory_fraction
    weights = model.num_params * WEIGHT_BYTES[need.dtype]
    if weights >= memory:
        return f"weights of {weights / 1e9:.1f} GB do not fit in {memory / 1e9:.1f} GB"
    if not model.is_encoder and sequences < 1:
        return f"the cache holds {resident} tokens, less than one sequence of {need.traffic.context}"
    return ""


def _replicas(need: Need, layout: Layout, rate: float) -> tuple[int, str]:
    """Replicas, and why they are not enough."""
    wanted = math.ceil(need.traffic.tokens_per_s / rate - 1e-9) if need.traffic.tokens_per_s else 0
    if need.num_devices is None:
        return max(1, wanted), ""
    there = need.num_devices // layout.num_devices
    if wanted > there:
        return there, f"{wanted} replicas, {wanted * layout.num_devices} devices, would be needed"
    return wanted or there, ""


def _encoder(need: Need, latency: Roofline, refused: str) -> Placement:
    """An encoder reads prompts and generates nothing: its rate is that of its prefill."""
    prompt = need.traffic.prompt_tokens
    alone_s = latency.prefill_s(prompt)
    rate = HEADROOM * prompt / latency.prefill_busy_s(prompt)
    late = min((goal for goal in (need.goals.ttft_s, need.goals.ttft_p95_s) if goal is not None), default=None)
    reason = refused or (f"{alone_s * 1e3:.0f} ms for one input" if late is not None and alone_s > HEADROOM * late else "")
    replicas, lacking = _replicas(need, latency.layout, rate)
    price = need.device.price_per_hour
    return Placement(
        layout=latency.layout,
        resident_tokens=0,
        num_sequences=0,
        batch=0 if reason else 1,
        tpot_s=0.0,
        ttft_s=alone_s,
        ttft_p95_s=alone_s,
        decode_tokens_per_s=rate,
        prefill_tokens_per_s=rate / HEADROOM,
        mbu=0.0,
        replicas=replicas,
        price_per_hour=None if price is None else price * replicas * latency.layout.num_devices,
        reason=reason or lacking,
    )


def _largest(most: int, is_good: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that is good; 0 where 1 is not. If a number is good, so are those below it."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_good(middle) else (low, middle - 1)
    return low


def _cost(need: Need, each: Placement) -> tuple[float, int, float]:
    """What is kept low: devices where a rate is asked for, else devices per token; then what one failure takes away; then TPOT."""
    devices = each.num_devices if need.traffic.tokens_per_s else each.num_devices / max(each.tokens_per_s, 1e-9)
    return devices, each.layout.num_devices, each.tpot_s


def _shortfall(each: Placement) -> tuple[bool, float, float]:
    """Layouts that cannot serve, those first that come nearest: too few devices, then a goal that is missed, then too little memory."""
    return not each.batch, not each.num_sequences, each.tpot_s


def _dearer(need: Need, each: Placement, best: Placement) -> str:
    if need.traffic.tokens_per_s:
        if each.num_devices == best.num_devices:
            is_larger = each.layout.num_devices > best.layout.num_devices
            return "as many devices, " + ("in larger replicas: a failure takes more away" if is_larger else "and later tokens")
        return f"{each.num_devices} devices instead of {best.num_devices}"
    return f"{each.tokens_per_s / each.num_devices:,.0f} tokens/s per device instead of {best.tokens_per_s / best.num_devices:,.0f}"


def _with_reason(each: Placement, reason: str) -> Placement:
    return replace(each, reason=reason)


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
