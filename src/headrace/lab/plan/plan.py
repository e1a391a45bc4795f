"""Plans one model on one kind of device, each figure with its formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.lab.plan.catalogue import HOURS_PER_MONTH, Prices
from headrace.policy.placement.layout import HEADROOM, Placement, choose_layout, free_bytes
from headrace.policy.placement.load import step_tokens
from headrace.policy.placement.model import KV_BYTES, WEIGHT_BYTES
from headrace.policy.placement.need import KV_EFFICIENCY, Need
from headrace.policy.placement.roofline import (
    COLLECTIVES,
    COMPUTING,
    GAPS,
    LOAD_BYTES_PER_S,
    READING_KV,
    READING_WEIGHTS,
    START_S,
    Roofline,
    load_seconds,
)


@dataclass(frozen=True, slots=True)
class Standby:
    num_replicas: int = 0
    load_bytes_per_s: float = LOAD_BYTES_PER_S


NO_STANDBY = Standby()


def standby_figures(need: Need, best: Placement, standby: Standby) -> dict[str, Figure]:
    weights, rate = need.model.weights_bytes(need.dtype), standby.load_bytes_per_s
    source = "assumed, --load-gbps sets it" if rate == LOAD_BYTES_PER_S else "--load-gbps"
    formula = f"{START_S:g} s to start (assumed) + {weights / 1e9:,.1f} GB of weights / {rate / 1e9:g} GB/s ({source})"
    figures = {"load_s": Figure(load_seconds(weights, rate), "s", formula)}
    if not standby.num_replicas:
        return figures
    num_devices = standby.num_replicas * best.layout.num_devices
    figures["standby_replicas"] = Figure(standby.num_replicas, "", f"{num_devices} devices beside those that serve (--standby)")
    if (price := need.device.price_per_hour) is not None:
        figures["standby_per_hour"] = Figure(num_devices * price, "$", f"{num_devices} devices x ${price:g}, not part of the other costs")
    return figures


def standby_note(figures: Mapping[str, Figure]) -> str:
    load = f"an assumed {figures['load_s'].value:,.0f} s"
    if "standby_replicas" not in figures:
        return f"No replica stands by: a spike of one replica beyond capacity waits {load} until it has loaded, longer without a machine."
    return f"{figures['standby_replicas'].value:g} replica(s) stand by; a spike beyond them waits {load} until one more has loaded."


@dataclass(frozen=True, slots=True)
class Figure:
    value: float
    unit: str
    formula: str


EGRESS_BYTES_PER_TOKEN = 250
"""Size of one event of a chat completion."""

CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)

INT4_STREAMS = 32

NEAR_BANDWIDTH = 2.0
"""Tokens that bandwidth alone would allow, over those that a good plan generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """figures     by name, of the first placement
    sequences   context -> sequences that fit at once, over all replicas
    """

    need: Need
    placements: Sequence[Placement]
    figures: dict[str, Figure]
    sequences: dict[int, int]
    notes: tuple[str, ...]

    @property
    def best(self) -> Placement:
        return self.placements[0]

    @property
    def is_met(self) -> bool:
        return not self.best.reason

    @property
    def dollars_per_hour(self) -> float | None:
        return self.best.price_per_hour

    @property
    def cost_per_1m_tokens(self) -> float | None:
        """In dollars, at the rate that is asked for, or at that of full replicas."""
        figure = self.figures.get("cost_per_1m_at_demand", self.figures.get("cost_per_1m_at_capacity"))
        return None if figure is None else figure.value

    @property
    def is_near_bandwidth(self) -> bool | None:
        bound = self.figures.get("bandwidth_tokens_per_s")
        return None if bound is None else NEAR_BANDWIDTH * self.best.capacity_tokens_per_s >= bound.value


def make_plan(need: Need, prices: Prices, notes: Sequence[str] = (), standby: Standby = NO_STANDBY) -> CapacityPlan:
    placements = choose_layout(need)
    best = placements[0]
    latency = Roofline(need.model, need.device, best.layout, need.dtype, need.kv_dtype)
    figures = _memory_figures(need, best, latency)
    if best.batch:
        figures |= _speed_figures(need, best, latency)
        figures |= _cost_figures(need, best, prices, figures) | standby_figures(need, best, standby)
        notes = (*notes, *_bandwidth_notes(best, figures), standby_note(figures))
    return CapacityPlan(
        need=need, placements=placements, figures=figures, sequences=_sequences(need, best, latency), notes=(*notes, *_notes(need, best))
    )


def _memory_figures(need: Need, best: Placement, latency: Roofline) -> dict[str, Figure]:
    model, replicas = need.model, best.replicas
    memory = best.num_devices * need.device.memory_bytes * need.memory_fraction
    weights = latency.weights_bytes
    share = f"{need.device.memory_bytes / 1e9:g} GB x {need.memory_fraction:g} (--memory-fraction)"
    figures = {
        "num_params": Figure(model.num_params, "", "embeddings + layers x (attention + feed-forward) + head, from config.json"),
        "num_active_params": Figure(model.num_active_params, "", "weights that one token is multiplied with"),
        "weights_bytes": Figure(weights, "bytes", _weights_formula(need)),
        "memory_bytes": Figure(memory, "bytes", f"{best.num_devices} device(s) x {share}"),
        "free_bytes": Figure(memory - replicas * weights, "bytes", f"memory - {replicas} x {weights / 1e9:,.2f} GB of weights"),
    }
    if model.is_encoder:
        return figures
    copies = best.layout.tp // model.kv_shards(best.layout.tp)
    room = f"{replicas} replica(s) x {max(0.0, free_bytes(need, best.layout)):,.0f} bytes that are free in one"
    held = f"; {copies} devices hold the same heads" if copies > 1 else ""
    return figures | {
        "kv_bytes_per_token": Figure(model.num_kv_values * KV_BYTES[need.kv_dtype], "bytes", _kv_formula(need)),
        "resident_tokens": Figure(
            replicas * best.resident_tokens, "tokens", f"{room} / {latency.kv_bytes_per_token:,.0f} bytes per token{held}"
        ),
        "sequences": Figure(
            replicas * best.num_sequences,
            "",
            f"{room} / {latency.kv_bytes(need.traffic.context):,.0f} bytes of {need.traffic.context} tokens{held}",
        ),
    }


def _weights_formula(need: Need) -> str:
    model, sizes = need.model, need.model.sizes(need.dtype)
    kept = f"{need.dtype}, as stored" if model.stored else need.dtype
    layers, tables = f"{model.num_layer_params:,} weights of layers", f"{model.num_table_params:,} of embedding and head"
    return f"{layers} x {sizes.layer:.4g} bytes ({kept}) + {tables} x {sizes.table:.4g}"


def _kv_formula(need: Need) -> str:
    model, size = need.model, KV_BYTES[need.kv_dtype]
    if model.latent is not None:
        return f"{model.num_layers} layers x ({model.latent.kv_rank} + {model.latent.rope_dim}) latent values x {size:g} bytes"
    return f"2 (key, value) x {model.num_layers} layers x {model.kv_heads} KV heads x {model.head_dim} x {size:g} bytes"


def _speed_figures(need: Need, best: Placement, latency: Roofline) -> dict[str, Figure]:
    traffic, full = need.traffic, best.full_tokens_per_s
    each = f"{best.batch} users x {traffic.user_tokens_per_s:g}" if traffic.user_tokens_per_s else f"{full:,.1f} of a full replica"
    asked = f"{traffic.tokens_per_s:,.0f} tokens/s that are asked for / {each}, rounded up"
    there = "one: no rate is asked for" if need.num_devices is None else f"{need.num_devices} devices / {best.layout.num_devices} of one"
    prompt_s = latency.prefill_busy_s(traffic.prompt_tokens)
    terms = _sum(need, latency, latency.prefill_terms(traffic.prompt_tokens))
    figures = {
        "replicas": Figure(best.replicas, "", asked if traffic.tokens_per_s else there),
        "devices": Figure(best.num_devices, "", f"{best.replicas} replicas x {best.layout}"),
        "prefill_tokens_per_s": Figure(
            best.prefill_tokens_per_s, "tokens/s", f"{traffic.prompt_tokens} tokens / {prompt_s * 1e3:.3f} ms: {terms}"
        ),
    }
    each = f"{HEADROOM:.0%} of the prefill rate" if need.model.is_encoder else f"{full:,.1f} tokens/s of a full one"
    if not need.model.is_encoder:
        figures |= _decode_figures(need, best, latency)
        if not traffic.counts_prompts:
            del figures["ttft_p95_s"]  # no queue of prompts is modelled
    figures["capacity_tokens_per_s"] = Figure(best.capacity_tokens_per_s, "tokens/s", f"{best.replicas} replica(s) x {each}")
    if traffic.tokens_per_s:
        figures["demand_tokens_per_s"] = Figure(traffic.tokens_per_s, "tokens/s", "asked for")
    return figures


def _decode_figures(need: Need, best: Placement, latency: Roofline) -> dict[str, Figure]:
    traffic, load, layout = need.traffic, best.load, best.layout
    together = load.running + 1 if traffic.counts_prompts else load.running
    step = f"of {together:.4g} sequences: {_sum(need, latency, latency.decode_terms(together, traffic.decode_context))}"
    if traffic.counts_prompts:
        more_s = load.tpot_s - load.decode_s - load.prompts_s
        step += f" + prompts in a step {load.prompts_s * 1e3:.3f} ms + those that came with its own prompt {more_s * 1e3:.3f} ms"
    own, steps = f"prompt alone {load.own_s * 1e3:.3f} ms", f"steps that run or are planned {load.steps_s * 1e3:.3f} ms"
    read = latency.decode_bytes(load.running, traffic.context)
    there = f"{load.tpot_s * 1e3:.3f} ms x {layout.num_devices} x {need.device.bytes_per_s / 1e9:,.0f} GB/s"
    room = f"room for {best.max_num_seqs} ({step_tokens(need):,} tokens in a step)"
    at = f"at {load.tokens_per_s:,.1f} tokens/s" + ("" if traffic.tokens_per_s else ", full: no rate is asked for")
    return {
        "batch": Figure(best.batch, "sequences", f"most in the mean that keep {HEADROOM:.0%} of every goal, and that fit; {room}"),
        "running": Figure(load.running, "sequences", f"of one replica, in the mean, {at}"),
        "tpot_s": Figure(load.tpot_s, "s", step),
        "ttft_s": Figure(load.ttft_s, "s", f"{own} + {steps} + mean wait for other prompts {load.wait_s * 1e3:.3f} ms"),
        "ttft_p95_s": Figure(load.ttft_p95_s, "s", f"{own} + {steps} + what 95 % wait at most {load.wait_p95_s * 1e3:.3f} ms"),
        "mbu": Figure(best.mbu, "", f"{read / 1e9:,.3f} GB of weights and KV read per token of every sequence / ({there})"),
        "bandwidth_tokens_per_s": _bandwidth_figure(need, best, latency),
    }


def _bandwidth_figure(need: Need, best: Placement, latency: Roofline) -> Figure:
    context = need.traffic.decode_context
    read = latency.decode_bytes(best.batch, context)
    value = best.replicas * latency.bandwidth_tokens_per_s(best.batch, context)
    there = f"{best.num_devices} devices x {need.device.bytes_per_s / 1e9:,.0f} GB/s"
    return Figure(value, "tokens/s", f"{best.batch} x {there} / {read / 1e9:,.3f} GB of weights and KV, of {context:,.0f} tokens each")


def _sum(need: Need, latency: Roofline, terms: Mapping[str, float]) -> str:
    device, model, link = need.device, need.model, need.device.link
    size = WEIGHT_BYTES[need.dtype]
    sources = {
        READING_WEIGHTS: f"{device.bytes_per_s / 1e9:,.0f} GB/s x {device.weight_efficiency[size]:g}",
        COMPUTING: f"{device.flops_of(need.dtype) / 1e12:g} TFLOP/s x {latency.compute_efficiency:g}",
        READING_KV: f"{device.bytes_per_s / 1e9:,.0f} GB/s x {KV_EFFICIENCY:g}",
        GAPS: f"{model.num_layers} layers x {device.layer_overhead_s * 1e6:g} us",
        COLLECTIVES: f"{latency.layout} over {link.name}, {link.latency_s * 1e6:g} us and {link.bytes_per_s / 1e9:g} GB/s, {link.source}",
    }
    return " + ".join(f"{name} {seconds * 1e3:.3f} ms ({sources[name]})" for name, seconds in terms.items())


def _cost_figures(need: Need, best: Placement, prices: Prices, speeds: Mapping[str, Figure]) -> dict[str, Figure]:
    egress_bytes = 0 if need.model.is_encoder else EGRESS_BYTES_PER_TOKEN
    egress = egress_bytes * 1e6 / 1e9 * prices.egress_per_gb
    stored = need.model.weights_bytes(need.dtype) / 1e9 * prices.storage_per_gb_month
    figures = {"egress_per_1m_tokens": Figure(egress, "$", f"{egress_bytes} bytes per token x 1M x ${prices.egress_per_gb:g} per GB")}
    figures["storage_per_month"] = Figure(
        stored, "$", f"{need.model.weights_bytes(need.dtype) / 1e9:.1f} GB x ${prices.storage_per_gb_month:g} per month"
    )
    if (hourly := best.price_per_hour) is None:
        return figures
    figures |= {
        "price_per_hour": Figure(hourly, "$", f"{best.num_devices} devices x ${need.device.price_per_hour:g} ({need.device.price_source})"),
        "price_per_day": Figure(hourly * 24, "$", "price per hour x 24"),
        "price_per_month": Figure(hourly * HOURS_PER_MONTH, "$", f"price per hour x {HOURS_PER_MONTH}"),
    }
    demand = need.traffic.mean_tokens_per_s or need.traffic.tokens_per_s
    rates = {"capacity": best.capacity_tokens_per_s, "demand": min(demand, best.capacity_tokens_per_s)}
    if (bound := speeds.get("bandwidth_tokens_per_s")) is not None:
        rates["bandwidth"] = bound.value
    for name, rate in rates.items():
        if rate:
            devices, kept = dollars_per_1m_tokens(hourly, rate), dollars_per_1m_tokens(stored / HOURS_PER_MONTH, rate)
            formula = f"at {rate:,.0f} tokens/s: devices ${devices:.6f} + egress ${egress:.6f} + storage ${kept:.6f}"
            figures[f"cost_per_1m_at_{name}"] = Figure(devices + egress + kept, "$", formula)
    return figures


def dollars_per_1m_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    return price_per_hour / 3600 / tokens_per_s * 1e6


def _sequences(need: Need, best: Placement, latency: Roofline) -> dict[int, int]:
    if need.model.is_encoder:
        return {}
    contexts = sorted({*(each for each in CONTEXTS if each <= need.model.max_positions), need.traffic.context})
    free = best.resident_tokens * latency.kv_bytes_per_token
    return {context: best.replicas * int(free // latency.kv_bytes(context)) for context in contexts}


def _bandwidth_notes(best: Placement, figures: Mapping[str, Figure]) -> list[str]:
    if (bound := figures.get("bandwidth_tokens_per_s")) is None:
        return []
    times = bound.value / best.capacity_tokens_per_s
    word = "within" if times <= NEAR_BANDWIDTH else "not within"
    return [f"Bandwidth alone would allow {times:.2f} times the capacity: the plan is {word} {NEAR_BANDWIDTH:g} times of that maximum."]


def _notes(need: Need, best: Placement) -> list[str]:
    notes = []
    device = need.device
    if need.traffic.context > need.model.max_positions:
        notes.append(
            f"A context of {need.traffic.context} is more than the {need.model.max_positions} positions that the model was made for."
        )
    if not need.traffic.counts_prompts and not need.model.is_encoder:
        notes.append("Prompts are not counted as load: --requests-per-second says how many there are.")
    if need.goals.ttft_p95_s is not None and (need.model.is_encoder or not need.traffic.counts_prompts):
        remedy = "" if need.model.is_encoder else " --requests-per-second says how many prompts there are."
        notes.append(f"No queue of prompts is modelled here: ttft_p95 is the mean.{remedy}")
    if need.model.is_assumed:
        notes.append("model_type is none that the planner knows: the shape is read as Llama's.")
    if need.dtype == "int4" and device.name != "cpu" and best.load.running > INT4_STREAMS:
        notes.append(f"INT4 beyond {INT4_STREAMS} sequences at a time was measured slower than this: docs/planning.md shows by how much.")
    if need.dtype in ("fp8", "int8") and need.dtype not in device.flops:
        notes.append(f"{device.title} has no {need.dtype} products: {need.dtype} weights save memory and are multiplied in 16 bits.")
    if need.memory_fraction == 1:
        notes.append("All memory counts. An engine needs some for activations.")
    if not device.is_served:
        notes.append(f"Headrace has no backend for {device.title}: its figures are arithmetic alone.")
    if best.batch and best.price_per_hour is None:
        notes.append(f"{device.title} has no price here: --prices FILE gives it one.")
    if best.batch and best.price_per_hour is not None:
        notes.append(f"The price of {device.name} is ${device.price_per_hour:g} per hour: {device.price_source}.")
    if need.num_devices is not None and best.batch and (idle := need.num_devices - best.num_devices) > 0:
        notes.append(f"{idle} of {need.num_devices} devices are not needed, or are too few for one more replica.")
    reading = f"{device.weight_efficiency[WEIGHT_BYTES[need.dtype]]:.0%} of the bandwidth for weights"
    computing = f"{Roofline(need.model, device, best.layout, need.dtype, need.kv_dtype).compute_efficiency:.0%} of the FLOP/s"
    fitted = "" if device.name == "cpu" else ", fitted on one H100"
    notes.append(f"Rates assume {reading} and {computing}{fitted}; goals are used to {HEADROOM:.0%}.")
    return notes
