"""Predicts how long a replica takes from its start to its first request. Getting a machine is not part of it: that takes minutes."""

from __future__ import annotations

LOAD_BYTES_PER_S = 2e9
"""Rate at which a replica reads its weights, assumed: a network volume. A local NVMe drive gives 3 to 14 GB/s."""

START_S = 20.0
"""Seconds that a start takes whatever the model's size, assumed: the process, its libraries, the device, a warm-up."""


def load_seconds(weights_bytes: float, bytes_per_s: float = LOAD_BYTES_PER_S) -> float:
    """Seconds of a replica's cold start. weights_bytes: of the whole model, however many devices divide it"""
    return START_S + weights_bytes / bytes_per_s
