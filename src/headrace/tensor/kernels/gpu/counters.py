"""Counters in GPU memory by which the programs of a split sum (split-K) find out which of them is the last, which then adds up all parts.

Each stream has its own counters, so two graphs that may run at the same time must be captured on two streams. All are allocated before the
first capture, since a capture would not write their zeros; the last program sets its counter back to zero.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

NUM_COUNTERS = 1024
"""Each stream has this many. A sum is split only where there would be fewer programs than the tables of `tuning` ask for."""
MAX_STREAMS = 128
"""torch has fewer streams than that, and gives them out again and again."""


def arrival_counters(device: torch.device) -> Tensor:
    """int32 [NUM_COUNTERS], all zero, of the current stream. The first call for a device makes those of all streams."""
    counters, places = _all_counters(device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return counters[places.setdefault(stream, len(places))]


@cache
def _all_counters(device: torch.device) -> tuple[tuple[Tensor, ...], dict[int, int]]:
    return torch.zeros(MAX_STREAMS, NUM_COUNTERS, dtype=torch.int32, device=device).unbind(), {}
