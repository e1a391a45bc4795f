"""Counters by which the parts of a split sum find out which of them arrives last, and so adds all of them up.

The part that arrives last leaves its counter at zero, so that a counter is zero between two kernels of a stream. Kernels of two streams may
run at once, so each stream has counters of its own. A captured graph keeps those of the stream that it was captured on: two graphs that may
run at once are captured on two streams. All counters are made together and before any capture, in which their zeros would not be written.
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
    """(the counters of each place, which place a stream has)."""
    return torch.zeros(MAX_STREAMS, NUM_COUNTERS, dtype=torch.int32, device=device).unbind(), {}
