"""Predicts what the users of one replica see at a load.

The engine plans one step ahead: a prompt waits for the step that runs and for the one that is planned already, and the next one
computes it. With D seconds of a step without prompts, s of one prompt and r requests per second, a step takes

    T = D + r T s - c (1 - exp(-r T))

in the mean, where c is what the first prompt of a step saves because the weights are read for it and for the decoding sequences once. A
request meets a step of E[T^2] / E[T] = T + r s^2 / (1 - (r s)^2): long steps are met more often.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from headrace.policy.placement.need import Need
from headrace.policy.placement.roofline import CHUNK_TOKENS, Roofline

STEP_TOKENS = {"cpu": 512}
GPU_STEP_TOKENS = 8192

MOST_USE = 0.98
"""Above this share of its time for prompts, a replica's queue grows without end."""


@dataclass(frozen=True, slots=True)
class Load:
    """running       sequences that decode together, in the mean; waiting: those that have no first token yet
    steps_s       of steps that a prompt waits for whatever the load; for users alone, of those beside it
    wait_s        of the mean wait that other prompts cause; wait_p95_s: what 95 % of them wait at most
    """

    running: float
    waiting: float
    tokens_per_s: float
    tpot_s: float
    decode_s: float
    prompts_s: float
    own_s: float
    steps_s: float
    wait_s: float
    wait_p95_s: float

    @property
    def ttft_s(self) -> float:
        return self.own_s + self.steps_s + self.wait_s

    @property
    def ttft_p95_s(self) -> float:
        return self.own_s + self.steps_s + self.wait_p95_s

    @property
    def slots(self) -> int:
        present = self.running + self.waiting
        return math.ceil(present + 3 * math.sqrt(present)) if self.waiting else math.ceil(present)


def step_tokens(need: Need) -> int:
    return STEP_TOKENS.get(need.device.name, GPU_STEP_TOKENS)


def at_running(need: Need, latency: Roofline, running: float) -> Load:
    traffic = need.traffic
    if traffic.counts_prompts:
        return _random_arrivals(need, latency, running)
    step_s = latency.decode_s(running, traffic.context)
    wanted = traffic.user_tokens_per_s
    rate = min(running / step_s, running * wanted) if wanted else running / step_s
    num_steps = 0.5 + math.ceil(traffic.prompt_tokens / CHUNK_TOKENS)
    return Load(running, 0.0, rate, step_s, step_s, 0.0, latency.prefill_s(traffic.prompt_tokens), num_steps * step_s, 0.0, 0.0)


def at_rate(need: Need, latency: Roofline, tokens_per_s: float, most: float) -> Load:
    return at_running(need, latency, _least(most, lambda running: at_running(need, latency, running).tokens_per_s >= tokens_per_s))


def _random_arrivals(need: Need, latency: Roofline, running: float) -> Load:
    traffic = need.traffic
    prompt, decoding = traffic.prompt_tokens, traffic.output_tokens - 1 or 1
    step_s = latency.decode_s(running + 1, traffic.decode_context)
    tokens = running + 1
    many_s = (latency.prefill_busy_s(tokens + 2 * CHUNK_TOKENS) - latency.prefill_busy_s(tokens + CHUNK_TOKENS)) / CHUNK_TOKENS * prompt
    first_s = latency.prefill_busy_s(tokens + prompt) - latency.prefill_busy_s(tokens)
    many_s = max(many_s, first_s)
    saved_s = many_s - max(0.0, first_s)
    num_steps = prompt / max(1.0, step_tokens(need) - running)
    service_s = many_s + step_s * num_steps

    def at(rate: float) -> tuple[float, float, float, float]:
        mean_s = _mean_step_s(rate, step_s, many_s, saved_s)
        share, use = 1 - step_s / mean_s, rate * service_s
        met_s = mean_s + rate * many_s**2 / (1 - (rate * many_s) ** 2)
        if num_steps <= 1:
            wait_s, own_s = (0.5 + use) * met_s, step_s + many_s + rate * many_s * met_s
        else:
            wait_s = 0.5 * met_s + use * service_s / (2 * (1 - use))
            own_s = math.ceil(num_steps) * step_s + many_s + wait_s
        # prompts that came during the request's own prompt are in the steps after it, and those that came during these in later ones
        more_s = share * (1 - share**decoding) / (1 - share) * (own_s - mean_s) / decoding
        return mean_s, share, wait_s, mean_s + max(0.0, more_s)

    rate = _least(MOST_USE / service_s, lambda rate: rate * decoding * at(rate)[3] >= running)
    mean_s, share, wait_s, tpot_s = at(rate)
    alone_s, beside = latency.prefill_s(prompt), min(1.0, running)
    own_s = (1 - beside) * alone_s + beside * (many_s - saved_s * math.exp(-rate * mean_s)) + math.ceil(num_steps) * step_s
    own_s += alone_s - latency.prefill_busy_s(prompt)  # a pipeline is filled first
    ttft_s = own_s + mean_s + wait_s
    return Load(
        waiting=rate * ttft_s,
        running=min(running, rate * decoding * tpot_s),
        tokens_per_s=rate * traffic.output_tokens,
        tpot_s=tpot_s,
        decode_s=step_s,
        prompts_s=mean_s * share,
        own_s=own_s,
        steps_s=mean_s,
        wait_s=wait_s,
        wait_p95_s=wait_s * _tail(rate * service_s),
    )


def _tail(use: float) -> float:
    """p95 of a wait over its mean, for times with an exponential tail."""
    return max(math.log(20), math.log(20 * use) / use) if use > 0 else 0.0


def _mean_step_s(rate: float, step_s: float, prompt_s: float, saved_s: float) -> float:
    """T of the module's header, by Newton's method from below, where the function is concave and rises."""
    mean_s = 0.0
    for _ in range(8):
        none = math.exp(-rate * mean_s)
        lacking = mean_s * (1 - rate * prompt_s) - step_s + saved_s * (1 - none)
        mean_s -= lacking / (1 - rate * prompt_s + saved_s * rate * none)
    return mean_s


def _least(most: float, is_enough: Callable[[float], bool]) -> float:
    """`most` where none is enough; if a number is enough, so are those above it."""
    low, high = 0.0, most
    if not is_enough(most):
        return most
    for _ in range(32):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
