"""Estimates what steps read and compute, and reads what the engine's process and its device use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import add, sub
from typing import NamedTuple, TypedDict

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


class ExpertLoad(NamedTuple):
    """Fields of `core.load.EngineCounters`."""

    expert_tokens: int
    hottest_expert_tokens: dict[str, int]


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


ExpertTokens = Mapping[int, Sequence[int]]
"""Layer -> the tokens that chose each of its experts."""


def no_experts() -> ExpertTokens:
    return {}


class EngineMeter:
    """Callable from any thread; a reading is at most READ_EVERY_S old."""

    def __init__(
        self, info: ModelInfo, read_gpu: Callable[[], GpuUse | None], read_experts: Callable[[], ExpertTokens] = no_experts
    ) -> None:
        self._info, self._read_gpu, self._read_experts = info, read_gpu, read_experts
        self._at_start = {layer: [*tokens] for layer, tokens in read_experts().items()}
        self._read_at = -math.inf
        self._last = NO_USE
        self._experts = ExpertLoad(0, {})

    def read(self, now: float) -> EngineUse:
        if now - self._read_at >= READ_EVERY_S:
            self._experts = self._count_experts()
            self._last, self._read_at = self._measure(), now
        return self._last

    def with_experts(self, counters: EngineCounters) -> EngineCounters:
        """As of the last `read`."""
        return replace(counters, **self._experts._asdict()) if self._at_start else counters

    def _count_experts(self) -> ExpertLoad:
        """What came since the meter was made: warm-up is before that."""
        since = {layer: [*map(sub, tokens, self._at_start[layer])] for layer, tokens in self._read_experts().items()}
        hottest = {f"{layer}/{tokens.index(most)}": most for layer, tokens in since.items() if (most := max(tokens))}
        return ExpertLoad(max(map(sum, since.values()), default=0), hottest)

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
