"""Counters by which the parts of a split sum find out which of them arrives last, and so adds all of them up.

Whoever arrives last leaves its counter at zero, so that a counter is zero between two kernels of a stream. Kernels of two streams may run
at once, so each stream has counters of its own. A captured graph keeps those of the stream that it was captured on: two graphs that may
run at once are captured on two streams. The counters of a stream are made before its first capture, by a step that is run as it is.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

NUM_COUNTERS = 1 << 15


def arrival_counters(device: torch.device) -> Tensor:
    """int32 [NUM_COUNTERS], all zero, of the current stream."""
    return _counters(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@cache
def _counters(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
