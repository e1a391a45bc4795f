"""Predicts the seconds that a replica takes for a request, from its load, so that replicas of different speed can be compared.

    what the running step still takes
    + prefill of the tokens queued ahead of the request, and of its own prompt beyond what is cached
    + the longest of three waits: for the other work of the steps that compute the queued prompts, for a free slot, for free KV blocks
    + OUTPUT_SHARE of the time that its output takes

Slots and blocks become free as running sequences end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from headrace.core.load import ClassLoad, LoadSnapshot

OUTPUT_SHARE = 0.1
"""Part of the output's time that counts beside the time to the first token. With 0 a slow replica gets more answers than it finishes in
the same time; with 1 it stays idle while requests queue at a fast one.
"""

UNKNOWN_OUTPUT_TOKENS = 128


def mean_output_tokens(num_finished: int, num_tokens: int) -> int:
    return max(1, num_tokens // num_finished) if num_finished else UNKNOWN_OUTPUT_TOKENS


class RequestSize(NamedTuple):
    """cached_tokens: of the prompt, that need not be computed"""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


class SentSince(NamedTuple):
    """num_tokens: of the prompts"""

    num_requests: int = 0
    num_tokens: int = 0

    def plus(self, other: SentSince) -> SentSince:
        return SentSince(self.num_requests + other.num_requests, self.num_tokens + other.num_tokens)


NOTHING_SENT = SentSince()


class StepSpeed(NamedTuple):
    """A step of N tokens takes fixed_s + N * token_s seconds."""

    fixed_s: float
    token_s: float

    def step_s(self, num_tokens: int) -> float:
        return self.fixed_s + num_tokens * self.token_s

    def idle_s(self, size: RequestSize) -> float:
        return self.step_s(size.prompt_tokens) + size.output_tokens * self.step_s(1)


def speed_of(load: LoadSnapshot | None) -> StepSpeed | None:
    if load is None or load.step_fixed_s + load.step_token_s <= 0.0:
        return None
    return StepSpeed(load.step_fixed_s, load.step_token_s)


def mean_speed(speeds: Iterable[StepSpeed | None]) -> StepSpeed | None:
    known = [speed for speed in speeds if speed is not None]
    if not known:
        return None
    return StepSpeed(sum(speed.fixed_s for speed in known) / len(known), sum(speed.token_s for speed in known) / len(known))


def predicted_s(load: LoadSnapshot, sent: SentSince, size: RequestSize, speed: StepSpeed, *, block_size: int) -> float:
    """Infinite where the prompt can never fit the KV cache."""
    ahead = ClassLoad(load.num_running, load.num_waiting + sent.num_requests, load.num_queued_tokens + sent.num_tokens)
    waiting_s, output_s = wait_and_output_s(load, ahead, size, speed, block_size=block_size)
    return waiting_s + speed.step_s(size.prompt_tokens - size.cached_tokens) + OUTPUT_SHARE * output_s


def wait_and_output_s(load: LoadSnapshot, ahead: ClassLoad, size: RequestSize, speed: StepSpeed, *, block_size: int) -> tuple[float, float]:
    """Predicted seconds until the replica begins with the request's prompt, as earlier work ends and slots and blocks become free, and of
    its output, in steps with the sequences ahead.

    Slots and blocks become free in the same steps in which prompts are computed, so only the longer of the two counts.
    """
    num_running, num_waiting, num_tokens_ahead = ahead
    num_sequences = num_running + num_waiting + 1
    num_slots = load.max_num_seqs or num_sequences
    output_s = size.output_tokens * speed.step_s(num_slots if num_slots < num_sequences else num_sequences)
    # While a replica is full, each of its slots and blocks becomes free once in the time of an output.
    num_tokens = num_tokens_ahead + size.prompt_tokens + (num_waiting + 1) * size.output_tokens
    share = max((num_sequences - num_slots) / num_slots, _missing_share(load, num_tokens, size, block_size))
    prompts_s = num_tokens_ahead / load.step_prompt_tokens * speed.step_s(load.num_running) if load.step_prompt_tokens else 0.0
    step_s = 0.0 if load.step_age_s is None else max(0.0, load.step_predicted_s - load.step_age_s)
    return step_s + num_tokens_ahead * speed.token_s + max(prompts_s, share * output_s), output_s


def _missing_share(load: LoadSnapshot, num_tokens: int, size: RequestSize, block_size: int) -> float:
    """The part of the KV blocks that is missing for the tokens; at most 0: none is."""
    if not load.kv_blocks_total:
        return 0.0
    if size.prompt_tokens > load.kv_blocks_total * block_size:
        return math.inf
    return (num_blocks(num_tokens, block_size) - load.kv_blocks_free - load.kv_blocks_cached) / load.kv_blocks_total


def num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
