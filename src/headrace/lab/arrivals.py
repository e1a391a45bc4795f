"""Draws the send times of an open-loop client: gamma inter-arrival times, as in `vllm bench serve`. A seed decides them; no clock is read.

Burstiness is the gamma shape. At 1 arrivals are Poisson, below 1 they come in bursts (our burst test uses 0.25), above 1 at more even
intervals.
"""

from __future__ import annotations

import math
import random


def send_times(num_requests: int, *, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds after the start at which each request is to be sent, ascending; the first is 0.

    rate  requests per second; infinity sends all at once. As in vLLM the gaps are rescaled so that the last request is due at
          (num_requests - 1) / rate: two seeds offer the same load.

    Raises: ValueError for a rate or burstiness that is not positive.
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
