"""Measures one engine without HTTP: submits requests at their times, turns the engine's loop, and stamps every token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.core.clock import Clock
from headrace.core.ids import RequestId
from headrace.core.model_info import ModelInfo
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.loop import Engine
from headrace.lab.datasets import LoadRequest
from headrace.lab.metrics import LoadRecord


@dataclass(slots=True)
class _Trace:
    token_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    cached_tokens: int = 0
    end_s: float | None = None
    error: str | None = None


class Collector:
    def __init__(self, clock: Clock = time.perf_counter, wait: Callable[[float], object] = time.sleep) -> None:
        self.clock = clock
        self.wait = wait
        self._traces: dict[str, _Trace] = {}
        self.num_ended = 0

    def __call__(self, updates: list[SequenceUpdate | Rejected]) -> None:
        now = self.clock()
        for update in updates:
            trace = self._traces[update.request_id]
            if isinstance(update, Rejected):
                trace.error = f"rejected: {update.error}"
            else:
                self._add(trace, update, now)
            if isinstance(update, Rejected) or update.finish is not None:
                trace.end_s = now
                self.num_ended += 1

    @staticmethod
    def _add(trace: _Trace, update: SequenceUpdate, now: float) -> None:
        if update.token_ids:
            trace.token_s.append(now)
            trace.num_tokens += len(update.token_ids)
        if update.num_cached_tokens is not None:
            trace.cached_tokens = update.num_cached_tokens
        if update.finish is not None and not update.finish.is_answer:
            trace.error = update.error or update.finish.value

    def begin(self, count: int) -> None:
        """Forgets the last run. The next requests are named "0" and on."""
        self._traces = {str(number): _Trace() for number in range(count)}
        self.num_ended = 0

    def record(self, number: int, prompt_tokens: int, intended_s: float, sent_s: float) -> LoadRecord:
        trace = self._traces[str(number)]
        return LoadRecord(
            intended_s=intended_s,
            sent_s=sent_s,
            chunk_s=tuple(trace.token_s),
            end_s=self.clock() if trace.end_s is None else trace.end_s,
            prompt_tokens=prompt_tokens,
            cached_tokens=trace.cached_tokens,
            output_tokens=trace.num_tokens,
            error=trace.error,
        )


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """peak_running  sequences that held KV blocks at once"""

    records: tuple[LoadRecord, ...]
    began_s: float
    ended_s: float
    step_s: tuple[float, ...]
    peak_running: int
    preemptions: int

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def output_tokens(self) -> int:
        return sum(record.output_tokens for record in self.records)

    @property
    def prompt_tokens(self) -> int:
        return sum(record.prompt_tokens for record in self.records)


def run_offline(
    engine: Engine,
    collector: Collector,
    requests: Sequence[LoadRequest],
    arrivals_s: Sequence[float] | None = None,
) -> OfflineRun:
    """Runs all requests greedily, ignoring end tokens, on this thread.

    arrivals_s  ascending; None: all at the start
    """
    offsets = [0.0] * len(requests) if arrivals_s is None else list(arrivals_s)
    collector.begin(len(requests))
    counted = engine.snapshot().counters
    before = counted.preemptions
    sent: list[float] = []
    step_s: list[float] = []
    peak = 0
    began_s = collector.clock()
    while collector.num_ended < len(requests):
        while len(sent) < len(requests) and collector.clock() >= began_s + offsets[len(sent)]:
            engine.submit(_engine_request(len(sent), requests[len(sent)]))
            sent.append(collector.clock())
        busy = engine.turn()
        snapshot = engine.snapshot()
        if num_steps := snapshot.counters.steps - counted.steps:  # one per turn, but for what a recovery repeats
            step_s += [(snapshot.counters.step_seconds - counted.step_seconds) / num_steps] * num_steps
        counted = snapshot.counters
        peak = max(peak, snapshot.num_running)
        if not busy and len(sent) < len(requests):
            collector.wait(max(0.0, began_s + offsets[len(sent)] - collector.clock()))
        elif not busy and collector.num_ended < len(sent):
            raise RuntimeError(f"the engine rests with {len(sent) - collector.num_ended} requests unfinished")
    ended_s = collector.clock()
    records = [
        collector.record(number, len(request.prompt_ids), began_s + offset, sent[number])
        for number, (request, offset) in enumerate(zip(requests, offsets, strict=True))
    ]
    preemptions = engine.snapshot().counters.preemptions - before
    return OfflineRun(tuple(records), began_s, ended_s, tuple(step_s), peak, preemptions)


def _engine_request(number: int, request: LoadRequest) -> EngineRequest:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=request.output_tokens, ignore_eos=True)
    return EngineRequest(request_id=RequestId(str(number)), prompt_ids=request.prompt_ids, params=params)


def decode_bytes(info: ModelInfo, run: OfflineRun, *, steps: int) -> int:
    """A lower bound of the bytes that decode steps read: all weights for each step, and the KV of each decoded token's context."""
    total = steps * info.weight_bytes
    for record in run.records:
        for index in range(1, record.output_tokens):
            context = record.prompt_tokens + index
            total += sum(group.block_bytes(1) * group.tokens_needed(context) for group in info.kv_groups)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpeed:
    """The part of a run in which every sequence decodes: last first token to first last token.

    bytes_read   per step
    mbu          bytes_read / step_s / read bandwidth
    """

    steps: int
    step_s: float
    bytes_read: float
    mbu: float | None


def decode_speed(info: ModelInfo, run: OfflineRun, bandwidth: float | None) -> DecodeSpeed | None:
    """bandwidth: bytes per second. None when the sequences never decode together for two steps."""
    streams = [record for record in run.records if record.is_finished]
    begin_s = max((record.chunk_s[0] for record in streams if record.chunk_s), default=0.0)
    end_s = min((record.chunk_s[-1] for record in streams if record.chunk_s), default=0.0)
    ticks = sorted({moment for record in streams for moment in record.chunk_s if begin_s <= moment <= end_s})
    if len(ticks) < 2:
        return None
    step_s = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    middle = (ticks[0] + ticks[-1]) / 2
    contexts = [record.prompt_tokens + sum(moment <= middle for moment in record.chunk_s) for record in streams]
    kv = sum(group.block_bytes(1) * group.tokens_needed(context) for context in contexts for group in info.kv_groups)
    bytes_read = float(info.weight_bytes + kv)
    mbu = bytes_read / step_s / bandwidth if bandwidth else None
    return DecodeSpeed(steps=len(ticks) - 1, step_s=step_s, bytes_read=bytes_read, mbu=mbu)


def dollars_per_million_tokens(tokens: int, duration_s: float, dollars_per_hour: float) -> float:
    return dollars_per_hour / 3600 * duration_s / tokens * 1e6
