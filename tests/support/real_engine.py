"""The whole engine in this process, from checkpoint to tokens: real loader, runner, scheduler and loop, turned by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.core.finish import FinishReason
from headrace.core.ids import RequestId
from headrace.core.plan import TokenLogprobs
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.build import build_engine
from headrace.engine.config import EngineConfig

Key = tuple[str, int]
MAX_TURNS = 20_000
ROOMY: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "kernels": "auto",
    "block_size": 4,
    "num_kv_blocks": 400,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
"""Everything fits; tests change what they are about."""


def greedy_request(name: str, prompt: Sequence[int], **changes: Any) -> EngineRequest:
    """Greedy unless told otherwise. SamplingParams fields and EngineRequest fields may both be given."""
    ours = {f: changes.pop(f) for f in list(changes) if f in EngineRequest.__dataclass_fields__ and f != "params"}
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 16, "ignore_eos": True, **changes})
    return EngineRequest(request_id=RequestId(name), prompt_ids=tuple(prompt), params=params, **ours)


class RealEngine:
    """What an engine over a model folder said to each sequence. Leaving the block checks that nothing is left over.

    tokens   output ids per (request, index)
    logprobs beside them, where they were asked for
    finish   how each sequence ended
    cached   prompt tokens each request took from the prefix cache
    refused  errors of rejected requests
    errors   what was said of sequences that failed
    """

    def __init__(self, folder: Path, **config: Any) -> None:
        self.tokens: dict[Key, list[int]] = defaultdict(list)
        self.logprobs: dict[Key, list[TokenLogprobs]] = defaultdict(list)
        self.finish: dict[Key, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        self.refused: dict[str, Exception] = {}
        self.engine = build_engine(EngineConfig(model=str(folder), **{**ROOMY, **config}), self._take)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.check_idle()
        finally:
            self.engine.stop()
            self.engine.run()

    @property
    def preemptions(self) -> int:
        return self.engine.scheduler.counters.preemptions

    def submit(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.engine.submit(request)

    def run(self, *requests: EngineRequest, each_turn: Callable[[int], None] = lambda turn: None) -> Self:
        """Hand the requests in and turn until nothing is left. each_turn(number) is called before every turn."""
        self.submit(*requests)
        for number in range(MAX_TURNS):
            each_turn(number)
            if self.engine.turn():
                continue
            if not self.engine.scheduler.has_work:
                return self
            self.engine.idle()  # a grammar is compiled on another thread
        raise AssertionError("the engine did not come to rest")

    def check_idle(self) -> None:
        """Every owner's books are right and nothing is held but the pad blocks."""
        self.engine.scheduler.check()
        load = self.engine.snapshot()
        assert (load.num_running, load.num_waiting) == (0, 0)
        assert load.kv_blocks_used == len(self.engine.info.kv_groups)

    def answer(self, name: str, index: int = 0) -> list[int]:
        return self.tokens[name, index]

    def _take(self, updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            if isinstance(update, Rejected):
                self.refused[update.request_id] = update.error
                continue
            key = (str(update.request_id), update.index)
            assert key not in self.finish, "an update after the end"
            self.tokens[key] += update.token_ids
            self.logprobs[key] += update.logprobs
            if update.num_cached_tokens is not None:
                self.cached[update.request_id] = update.num_cached_tokens
            if update.error is not None:
                self.errors[update.request_id] = update.error
            if update.finish is not None:
                self.finish[key] = update.finish
