"""Makes sequences of a request that has just arrived, and keeps their prerequisites and deadlines."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator, Mapping
from enum import IntEnum
from types import MappingProxyType

from headrace.core.errors import RequestTooLarge
from headrace.core.ids import SeqId
from headrace.core.request import EngineRequest
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.sequence import SeqState, Sequence

NO_PREREQUISITES: Mapping[str, float] = MappingProxyType({})

RESERVED = "headrace."
FORK = "headrace.fork"
HOST_KV = "headrace.host_kv"
NO_TIME_LIMIT = math.inf


def check_prerequisite(name: str) -> None:
    if name.startswith(RESERVED):
        raise ValueError(f"prerequisite {name!r}: names that begin with {RESERVED!r} are the scheduler's own")


class Arrivals:
    """Makes the sequences of requests that arrive, numbered in order."""

    def __init__(self, config: SchedulerConfig, kv: KvManager) -> None:
        self._config = config
        self._kv = kv
        self._eos = frozenset(config.eos_token_ids)
        self._num_made = 0

    def refuse_what_never_fits(self, request: EngineRequest) -> None:
        length = self._limit(request)
        if reason := self._kv.shortage(length, self._config.uncommitted_tokens):
            raise RequestTooLarge(
                "max_tokens",
                f"prompt ({len(request.prompt_ids)}) + output tokens that fit the KV cache: {reason}",
                length - len(request.prompt_ids),
                "Shorten the prompt or lower max_tokens.",
            )

    def make_sequence(self, request: EngineRequest, index: int, now: float, prerequisites: Mapping[str, float]) -> Sequence:
        tokens = array("i", request.prompt_ids)
        tokens.extend(request.output_ids)
        self._num_made += 1
        num_prompt, limit = len(request.prompt_ids), self._limit(request)
        seq = Sequence(SeqId(self._num_made), request, index, now, tokens, num_prompt, limit, num_expected=len(tokens))
        seq.stage_since = now
        seq.end_ids = request.params.end_ids(self._eos)
        seq.missing = {**prerequisites} if seq.is_first else {**prerequisites, FORK: NO_TIME_LIMIT}
        self._kv.open(seq)
        return seq

    def _limit(self, request: EngineRequest) -> int:
        if request.params.max_tokens is None:
            return self._config.max_model_len
        return min(self._config.max_model_len, len(request.prompt_ids) + request.params.max_tokens)


MIN_SWEEP = 64


class Limit(IntEnum):
    ANSWER = 0
    PREREQUISITE = 1


class Deadlines:
    """A heap of (time, sequence); entries of ended sequences are skipped, and swept out when the heap has doubled."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Limit, str, Sequence]] = []
        self._sweep_at = MIN_SWEEP

    def add(self, at: float, seq: Sequence, kind: Limit, what: str = "") -> None:
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[4].state is not SeqState.DONE]
            heapq.heapify(self._heap)
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._heap))
        heapq.heappush(self._heap, (at, seq.seq_id, kind, what, seq))

    def take_due(self, now: float) -> Iterator[tuple[Sequence, Limit, str]]:
        while self._heap and self._heap[0][0] <= now:
            _, _, kind, what, seq = heapq.heappop(self._heap)
            if seq.state is not SeqState.DONE:
                yield seq, kind, what

    def next(self) -> float | None:
        return self._heap[0][0] if self._heap else None
