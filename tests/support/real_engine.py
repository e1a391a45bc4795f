"""Builds the whole engine in this process, from checkpoint to tokens: real loader, runner, scheduler and loop, turned by hand."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import engine_kit
import numpy as np
from rank_threads import RankThreads

from headrace.core.ids import RequestId
from headrace.core.plan import TokenLogprobs
from headrace.core.request import EngineRequest
from headrace.core.update import FinishReason, Rejected, SequenceUpdate
from headrace.engine.build import build_engine
from headrace.engine.config import EngineConfig

Key = tuple[str, int]
"""A sequence: request id and index."""
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


def greedy_request(name: str, prompt: Sequence[int], **changes: Any) -> EngineRequest:
    return engine_kit.request(name, list(prompt), **{"max_tokens": 16, **changes})


class Answer(NamedTuple):
    """All that an engine emitted for one sequence. Equal answers have equal bits: log-probabilities are compared as floats.

    finish  None: it was cut off
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    finish: FinishReason | None

    def until(self, num_tokens: int, num_prompt_logprobs: int) -> Answer:
        return Answer(self.token_ids[:num_tokens], self.logprobs[:num_tokens], self.prompt_logprobs[:num_prompt_logprobs], None)

    def after(self, num_tokens: int) -> Answer:
        return Answer(self.token_ids[num_tokens:], self.logprobs[num_tokens:], [], self.finish)


Answers = dict[Key, Answer]


def check_close(found: Answers, expected: Answers) -> None:
    """The same tokens, with log-probabilities of other sums."""
    assert {key: answer.token_ids for key, answer in found.items()} == {key: answer.token_ids for key, answer in expected.items()}
    for key, answer in found.items():
        for mine, its in ((answer.logprobs, expected[key].logprobs), (answer.prompt_logprobs, expected[key].prompt_logprobs)):
            np.testing.assert_allclose(_values(mine), _values(its), atol=2e-4)


def _values(logprobs: list[TokenLogprobs]) -> list[float]:
    return [number for each in logprobs for number in (each.logprob, *each.top_logprobs)]


def resumed_anywhere(
    requests: Iterable[EngineRequest], whole: Mapping[Key, Answer], rng: random.Random
) -> tuple[list[EngineRequest], Answers]:
    """Every sequence of two tokens or more cut off after a random one: the requests that resume them, and what these must be answered."""
    parts, expected = [], {}
    for request in requests:
        for index in request.indices:
            answer = whole[str(request.request_id), index]
            if len(answer.token_ids) < 2:
                continue
            cut = rng.randrange(1, len(answer.token_ids))
            part = request.resumed(index, answer.token_ids[:cut], "")
            name = f"{request.request_id} {index}"
            parts.append(replace(part, request_id=RequestId(name), params=part.params.with_(prompt_logprobs=None)))
            expected[name, index] = answer.after(cut)
    return parts, expected


class RealEngine:
    """An engine over a model folder, and what it said to each sequence. Leaving the block checks that nothing is left over.

    cached   prompt tokens each request took from the prefix cache
    refused  errors of rejected requests
    errors   what was said of sequences that failed
    """

    def __init__(self, folder: Path, **config: Any) -> None:
        self.tokens: dict[Key, list[int]] = defaultdict(list)
        self.logprobs: dict[Key, list[TokenLogprobs]] = defaultdict(list)
        self.prompt_logprobs: dict[Key, list[TokenLogprobs]] = defaultdict(list)
        self.finish: dict[Key, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        self.refused: dict[str, Exception] = {}
        is_static = config.pop("static_batching", False)
        addresses = config.pop("rank_addresses", ())
        engine = EngineConfig(model=str(folder), **{**ROOMY, **config})
        self.ranks = RankThreads(engine, addresses)
        try:
            self.engine = build_engine(engine, self._take, self.ranks.rendezvous)
        except BaseException:
            self.ranks.join()
            raise
        if is_static:
            self.engine.scheduler.batch_statically()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.check_idle()
        finally:
            self.engine.stop()
            self.engine.run()
            self.ranks.join()

    @property
    def preemptions(self) -> int:
        return self.engine.scheduler.sequences.counters.preemptions

    def submit(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.engine.submit(request)

    def run(self, *requests: EngineRequest, each_turn: Callable[[int], None] = lambda turn: None) -> Self:
        """each_turn(number) is called before every turn."""
        self.submit(*requests)
        for number in range(MAX_TURNS):
            each_turn(number)
            if self.engine.turn():
                continue
            if not self.engine.scheduler.sequences.has_work:
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

    def so_far(self, key: Key) -> Answer:
        return Answer(self.tokens[key], self.logprobs[key], self.prompt_logprobs[key], self.finish.get(key))

    def answers(self) -> Answers:
        """Of all sequences that ended. No request may have been refused, and no sequence may have failed."""
        assert not self.errors
        assert not self.refused
        return {key: self.so_far(key) for key in self.finish}

    def _take(self, updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            if isinstance(update, Rejected):
                self.refused[update.request_id] = update.error
                continue
            key = (str(update.request_id), update.index)
            assert key not in self.finish, "an update after the end"
            self.tokens[key] += update.token_ids
            self.logprobs[key] += update.logprobs
            self.prompt_logprobs[key] += update.prompt_logprobs
            if update.num_cached_tokens is not None:
                self.cached[update.request_id] = update.num_cached_tokens
            if update.error is not None:
                self.errors[update.request_id] = update.error
            if update.finish is not None:
                self.finish[key] = update.finish
