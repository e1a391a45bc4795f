"""Chooses a model's layout over devices and the number of its replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from headrace.core.parallelism import Parallelism, why_indivisible
from headrace.policy.placement.load import Load, at_rate, at_running
from headrace.policy.placement.need import Device, Need
from headrace.policy.placement.roofline import Layout, Roofline

HEADROOM = 0.8

MAX_DEVICES = 64

LEAST_RUNNING = 1e-3

FULLEST_STEPS = 16
"""Steps of the search: halvings of the logarithm of the load."""

TIE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """batch                           sequences that a full replica decodes together; 0: the layout cannot be used
    max_num_seqs                    sequences that a full replica must have room for
    prefill_tokens_per_s            of one replica that does nothing else
    """

    layout: Layout
    resident_tokens: int
    num_sequences: int
    batch: int
    max_num_seqs: int
    full_tokens_per_s: float
    load: Load
    prefill_tokens_per_s: float
    mbu: float
    replicas: int
    price_per_hour: float | None
    reason: str = ""

    @property
    def num_devices(self) -> int:
        return self.replicas * self.layout.num_devices

    @property
    def capacity_tokens_per_s(self) -> float:
        return self.replicas * self.full_tokens_per_s


def choose_layout(need: Need) -> list[Placement]:
    """The best first; one that meets the goals has an empty `reason`."""
    judged = [judge(need, layout) for layout in layouts(need)]
    most = max((_output(need, each) for each in judged if not each.reason), default=0.0)
    judged.sort(key=lambda each: (bool(each.reason), *(_shortfall(need, each) if each.reason else _cost(need, each, most))))
    if judged[0].reason:
        return judged
    best = judged[0]
    return [best, *(each if each.reason else replace(each, reason=_why_not(need, each, best, most)) for each in judged[1:])]


def layouts(need: Need) -> Iterator[Layout]:
    most = min(MAX_DEVICES, MAX_DEVICES if need.num_devices is None else need.num_devices)
    widest = min(most, need.device.link.num_devices)
    for tp in sorted({*_powers(widest), widest}):
        for pp in _powers(min(most // tp, need.max_stages or need.model.num_layers)):
            yield Layout(tp, pp)


def judge(need: Need, layout: Layout) -> Placement:
    latency = Roofline(need.model, need.device, layout, need.dtype, need.kv_dtype)
    resident, sequences = capacity(need, layout)
    refused = _why_impossible(need, layout, resident, sequences)
    if need.model.is_encoder:
        return _encoder(need, latency, refused)
    room = min(sequences, need.max_num_seqs)
    full = load = _fullest(need, latency, room)
    batch = 0 if refused or _why_late(need, full) or full.slots > room else max(1, round(full.running))
    replicas, lacking = _replicas(need, layout, full.tokens_per_s)
    if batch and need.traffic.tokens_per_s and replicas:
        load = at_rate(need, latency, min(need.traffic.tokens_per_s / replicas, full.tokens_per_s), full.running)
    return Placement(
        layout=layout,
        resident_tokens=resident,
        num_sequences=sequences,
        batch=batch,
        max_num_seqs=full.slots,
        full_tokens_per_s=(full.tokens_per_s if need.traffic.counts_prompts else batch / full.tpot_s) if batch else 0.0,
        load=load,
        prefill_tokens_per_s=need.traffic.prompt_tokens / latency.prefill_busy_s(need.traffic.prompt_tokens),
        mbu=latency.decode_bytes(load.running, need.traffic.context) / (load.tpot_s * layout.num_devices * need.device.bytes_per_s),
        replicas=replicas,
        price_per_hour=_price(need, replicas, layout),
        reason=refused or ("" if batch else _why_late(need, full) or _why_few(room)) or _why_not_run(need, layout) or lacking,
    )


def _fullest(need: Need, latency: Roofline, room: int) -> Load:
    def is_kept(load: Load) -> bool:
        return load.slots <= room and not _why_late(need, load)

    if not need.traffic.counts_prompts:
        return at_running(need, latency, max(1, _largest(room, lambda batch: is_kept(at_running(need, latency, batch)))))
    low, high = math.log(LEAST_RUNNING), math.log(max(1, room))
    least = at_running(need, latency, LEAST_RUNNING)
    for _ in range(FULLEST_STEPS):
        middle = (low + high) / 2
        load = at_running(need, latency, math.exp(middle))
        is_busy = load.running < math.exp(middle) * (1 - 1e-6)  # prompts alone keep it busy: more sequences never decode together
        low, high = (low, middle) if is_busy or not is_kept(load) else (middle, high)
        least = load if low == middle else least
    return least


def capacity(need: Need, layout: Layout) -> tuple[int, int]:
    free = free_bytes(need, layout)
    if free <= 0 or need.model.is_encoder:
        return 0, 0
    latency = Roofline(need.model, need.device, layout, need.dtype, need.kv_dtype)
    return int(free // latency.kv_bytes_per_token), int(free // latency.kv_bytes(need.traffic.context))


def free_bytes(need: Need, layout: Layout) -> float:
    share = math.ceil(need.model.num_layers / layout.pp) / need.model.num_layers
    return layout.tp * need.device.memory_bytes * need.memory_fraction / share - need.model.weights_bytes(need.dtype)


def _why_late(need: Need, load: Load) -> str:
    for name, value_s, most_s in _limits(need, load):
        if value_s > most_s:
            value, most = _apart(value_s * 1e3, most_s * 1e3, 1)
            return f"{name} {value} ms with {load.running:.3g} sequence(s): more than {most} ms, {HEADROOM:.0%} of the goal"
    return ""


def _limits(need: Need, load: Load) -> Iterator[tuple[str, float, float]]:
    goals, wanted = need.goals, need.traffic.user_tokens_per_s
    if limits := [limit for limit in (goals.tpot_s, 1 / wanted if wanted else None) if limit]:
        yield "TPOT", load.tpot_s, HEADROOM * min(limits)
    for name, goal, value in (("TTFT", goals.ttft_s, load.ttft_s), ("TTFT p95", goals.ttft_p95_s, load.ttft_p95_s)):
        if goal is not None:
            yield name, value, HEADROOM * goal


def _why_few(room: int) -> str:
    return f"the cache holds {room} sequence(s): too few where requests come at random moments"


def _why_not_run(need: Need, layout: Layout) -> str:
    if need.compares_all:
        return ""
    return why_not_run(need.device, layout) if need.device.is_served else f"Headrace has no backend for {need.device.title}"


def why_not_run(device: Device, layout: Layout) -> str:
    """Empty: this version divides a replica so over devices of this kind."""
    num_machines = math.ceil(layout.num_devices / device.link.num_devices)
    return Parallelism(layout.tp, layout.pp).why_not_planned("cpu" if device.name == "cpu" else "cuda", num_machines)


def _price(need: Need, replicas: int, layout: Layout) -> float | None:
    price = need.device.price_per_hour
    return None if price is None else price * replicas * layout.num_devices


def _why_indivisible(need: Need, tp: int) -> str:
    """By the rule of execution. Latent attention has one vector for all heads."""
    model = need.model
    if refused := need.refused.get(tp):
        return refused
    kv_heads = model.heads if model.latent is not None else model.kv_heads
    return why_indivisible(tp, heads=model.heads, kv_heads=kv_heads, features=model.divided_sizes, vocab_size=model.vocab_size)


def _why_impossible(need: Need, layout: Layout, resident: int, sequences: int) -> str:
    model = need.model
    if odd := _why_indivisible(need, layout.tp):
        return odd
    memory = layout.num_devices * need.device.memory_bytes * need.memory_fraction
    weights = model.weights_bytes(need.dtype)
    if weights >= memory:
        held, there = _apart(weights / 1e9, memory / 1e9, 1)
        return f"weights of {held} GB do not fit in {there} GB"
    if not model.is_encoder and sequences < 1:
        return f"the cache holds {resident} tokens, less than one sequence of {need.traffic.context}"
    return ""


def _replicas(need: Need, layout: Layout, rate: float) -> tuple[int, str]:
    wanted = math.ceil(need.traffic.tokens_per_s / rate - 1e-9) if need.traffic.tokens_per_s else 0
    if need.num_devices is None:
        return max(1, wanted), ""
    there = min(need.num_devices // layout.num_devices, need.num_devices if need.max_replicas is None else need.max_replicas)
    if wanted > there:
        return there, f"{wanted} replicas, {wanted * layout.num_devices} devices, would be needed"
    return wanted or there, ""


def _encoder(need: Need, latency: Roofline, refused: str) -> Placement:
    prompt = need.traffic.prompt_tokens
    alone_s = latency.prefill_s(prompt)
    rate = HEADROOM * prompt / latency.prefill_busy_s(prompt)
    most_s = _encoder_limit_s(need)
    taken, most = _apart(alone_s * 1e3, most_s * 1e3, 1)
    late = f"{taken} ms for one input: more than {most} ms, {HEADROOM:.0%} of the goal" if alone_s > most_s else ""
    reason = refused or late
    replicas, lacking = _replicas(need, latency.layout, rate)
    return Placement(
        layout=latency.layout,
        resident_tokens=0,
        num_sequences=0,
        batch=0 if reason else 1,
        max_num_seqs=0,
        full_tokens_per_s=rate,
        load=Load(0.0, 0.0, rate, 0.0, 0.0, 0.0, alone_s, 0.0, 0.0, 0.0),
        prefill_tokens_per_s=rate / HEADROOM,
        mbu=0.0,
        replicas=replicas,
        price_per_hour=_price(need, replicas, latency.layout),
        reason=reason or _why_not_run(need, latency.layout) or lacking,
    )


def _encoder_limit_s(need: Need) -> float:
    return HEADROOM * min((goal for goal in (need.goals.ttft_s, need.goals.ttft_p95_s) if goal is not None), default=math.inf)


def _largest(most: int, is_good: Callable[[int], bool]) -> int:
    """0 where 1 is not good; if a number is good, so are those below it."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_good(middle) else (low, middle - 1)
    return low


def _output(need: Need, each: Placement) -> float:
    """Sort value, to be maximized when no rate is given: tokens per second of the existing devices, else per device."""
    return each.capacity_tokens_per_s if need.num_devices is not None else each.capacity_tokens_per_s / each.num_devices


def _is_tie(need: Need, each: Placement, most: float) -> bool:
    return _output(need, each) >= (1 - TIE) * most


def _cost(need: Need, each: Placement, most: float) -> tuple[float, float, float, float]:
    """Sort key, to be minimized. With a rate: all devices, devices per replica (lost together in a failure), TPOT."""
    layout = each.layout
    if need.traffic.tokens_per_s:
        return each.num_devices, layout.num_devices, each.load.tpot_s, 0.0
    if _is_tie(need, each, most):
        return 0.0, layout.num_devices, layout.pp, each.load.tpot_s
    return 1.0, -_output(need, each), layout.num_devices, layout.pp


def _shortfall(need: Need, each: Placement) -> tuple[int, float]:
    layout = each.layout
    latency = Roofline(need.model, need.device, layout, need.dtype, need.kv_dtype)
    lacking_bytes = (0.0 if need.model.is_encoder else latency.kv_bytes(need.traffic.context)) - free_bytes(need, layout)
    if _why_not_run(need, layout):
        return 4, layout.num_devices
    if _why_indivisible(need, layout.tp):
        return 3, layout.tp
    if lacking_bytes > 0:
        return 2, lacking_bytes
    if each.batch:
        return 0, need.traffic.tokens_per_s / each.full_tokens_per_s * layout.num_devices
    if need.model.is_encoder:
        return 1, each.load.ttft_s / _encoder_limit_s(need)
    return 1, max((value_s / most_s for _, value_s, most_s in _limits(need, each.load)), default=0.0)


def _why_not(need: Need, each: Placement, best: Placement, most: float) -> str:
    is_larger = each.layout.num_devices > best.layout.num_devices
    if need.traffic.tokens_per_s:
        if each.num_devices == best.num_devices:
            return "as many devices, " + (LARGER if is_larger else "and later tokens")
        return f"{each.num_devices} devices instead of {best.num_devices}"
    unit = "tokens/s" if need.num_devices is not None else "tokens/s per device"
    if _is_tie(need, each, most):
        return f"as many {unit} within {TIE:.0%}, {LARGER if is_larger else 'through a longer pipeline'}"
    fewer, more = _apart(_output(need, each), _output(need, best), 0)
    return f"{fewer} {unit} instead of {more}"


LARGER = "in larger replicas: a failure takes more away"


def _apart(first: float, second: float, places: int) -> tuple[str, str]:
    for more in range(places, places + 12):
        shown = f"{first:,.{more}f}", f"{second:,.{more}f}"
        if shown[0] != shown[1]:
            break
    return shown


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
