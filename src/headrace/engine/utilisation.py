"""Estimates what steps read and compute, and reads what the engine's process and its device use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from operator import add
from typing import TypedDict

from headrace.core.load import EngineCounters, GpuUse
from headrace.core.model_info import ModelInfo
from headrace.core.plan import Plan
from headrace.machine.resources import process_memory

MEGA = 10**6

READ_EVERY_S = 1.0
"""Many reports are made in a second, which share one reading."""


class StepWork:
    """Adds each step's work to the counters, from the plan alone: a step reads the weights of one token once, and each row the KV of its
    context."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._groups = [(group, group.block_bytes(1)) for group in info.kv_groups]
        self._read_bytes = self._flops = 0

    def add(self, plan: Plan, counters: EngineCounters) -> None:
        starts, counts = plan.starts, plan.counts
        num_tokens = sum(counts)
        num_seen = sum(starts) + num_tokens
        self._read_bytes += self._info.weight_bytes
        for group, token_bytes in self._groups:
            is_whole = group.window is None
            seen = num_seen if is_whole else sum(map(group.tokens_needed, map(add, starts, counts)))
            self._read_bytes += token_bytes * seen
        num_pairs = num_seen
        if num_tokens > len(counts):  # with rows of a prompt's chunk: each of its tokens sees itself and those before it
            num_pairs = sum([count * (2 * start + count + 1) for start, count in zip(starts, counts, strict=True)]) // 2
        self._flops += num_tokens * self._info.token_flops + num_pairs * self._info.pair_flops
        counters.read_megabytes, counters.megaflops = self._read_bytes // MEGA, self._flops // MEGA


class EngineUse(TypedDict, total=False):
    """Fields of `core.load.LoadSnapshot`."""

    cpu_s: float
    resident_bytes: int
    peak_read_bytes_per_s: float
    peak_flops_per_s: float
    gpu_utilization: float | None
    gpu_memory_used_bytes: int | None
    gpu_memory_total_bytes: int | None


NO_USE = EngineUse()
"""Not measured: an engine in a test or in a simulation."""


class EngineMeter:
    """Callable from any thread; a reading is at most READ_EVERY_S old."""

    def __init__(self, info: ModelInfo, read_gpu: Callable[[], GpuUse | None]) -> None:
        self._info, self._read_gpu = info, read_gpu
        self._read_at = -math.inf
        self._last = NO_USE

    def read(self, now: float) -> EngineUse:
        if now - self._read_at >= READ_EVERY_S:
            self._last, self._read_at = self._measure(), now
        return self._last

    def _measure(self) -> EngineUse:
        gpu = self._read_gpu()
        return EngineUse(
            cpu_s=time.process_time(),
            resident_bytes=process_memory().resident,
            peak_read_bytes_per_s=self._info.peak_read_bytes_per_s,
            peak_flops_per_s=self._info.peak_flops_per_s,
            gpu_utilization=None if gpu is None else gpu.utilization,
            gpu_memory_used_bytes=None if gpu is None else gpu.memory_used_bytes,
            gpu_memory_total_bytes=None if gpu is None else gpu.memory_total_bytes,
        )
