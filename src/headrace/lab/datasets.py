"""Draws prompts and send times for load tests.

Ids are drawn from [low_id, high_id): the lowest are control tokens and single bytes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

LOW_ID, HIGH_ID = 300, 2000


@dataclass(frozen=True, slots=True)
class LoadRequest:
    prompt_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """spread  each length is drawn evenly from mean * (1 - spread) .. mean * (1 + spread)"""

    input_tokens: int
    output_tokens: int
    spread: float = 0.0
    prefix_tokens: int = 0
    num_prefixes: int = 1
    low_id: int = LOW_ID
    high_id: int = HIGH_ID

    def checked(self) -> WorkloadShape:
        """Raises ValueError."""
        if min(self.input_tokens, self.output_tokens, self.num_prefixes) < 1 or not 0.0 <= self.spread <= 1.0:
            raise ValueError(f"lengths and num_prefixes must be positive and spread within 0..1: {self}")
        if not 0 <= self.low_id < self.high_id:
            raise ValueError(f"token ids need 0 <= low ({self.low_id}) < high ({self.high_id})")
        if not 0 <= self.prefix_tokens < self.input_tokens:
            raise ValueError(f"prefix_tokens ({self.prefix_tokens}) must be less than input_tokens ({self.input_tokens})")
        return self


def make_requests(num_requests: int, shape: WorkloadShape, *, seed: int = 0) -> list[LoadRequest]:
    return list(itertools.islice(draw_requests(shape, seed=seed), num_requests))


def draw_requests(shape: WorkloadShape, *, seed: int = 0) -> Iterator[LoadRequest]:
    """Draws requests without end."""
    shape.checked()
    draw = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(shape.low_id, shape.high_id) for _ in range(count))

    def length(mean: int) -> int:
        return max(1, draw.randint(int(mean * (1 - shape.spread)), int(mean * (1 + shape.spread))))

    prefixes = [ids(shape.prefix_tokens) for _ in range(shape.num_prefixes)]
    while True:
        prefix = draw.choice(prefixes)
        yield LoadRequest(prefix + ids(length(shape.input_tokens - shape.prefix_tokens)), length(shape.output_tokens))


def send_times(num_requests: int, *, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Ascending seconds from 0; gaps are gamma, as in `vllm bench serve`.

    rate        infinity sends all at once. Gaps are rescaled so that the last request is due at (num_requests - 1) / rate
    burstiness  1: Poisson; below 1: bursts

    Raises ValueError.
    """
    if not rate > 0 or not burstiness > 0 or math.isinf(burstiness):
        raise ValueError(f"rate and burstiness must be positive, got {rate} and {burstiness}")
    if math.isinf(rate) or num_requests < 2:
        return [0.0] * num_requests
    draw = random.Random(seed)
    gaps = [draw.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(num_requests - 1)]
    scale = (num_requests - 1) / rate / (math.fsum(gaps) or 1.0)
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap * scale)
    return times
