"""Holds the concerns of a generating request, one stage each.

A stage is called, as a Starlette middleware is, with the call and with `call_next`, which runs everything behind it. It awaits `call_next`
unless it answers by itself, and returns the `Ready`, perhaps with more hooks. What is to happen at the end of the request goes to
`Ending.ends`, which run in the reverse order; facts for the log line and the usage record go to `Ending`, also where it refuses.

A stage raises a HeadraceError that has a row in `http.errors.TABLE`, and names the field that all surfaces have ("prompt", not "messages").
It runs on the event loop: at most a few milliseconds, more goes to a text worker. It bounds its own waits: the deadline's timer starts with
the answer. It charges bytes that it holds to `Call.charges`, which returns them with the request.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from headrace.core.clock import Clock
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.cache.answer_cache import AnswerCache
from headrace.gateway.cache.replays import Replays
from headrace.gateway.generation.call import Call, CallNext, Ready
from headrace.gateway.generation.kept_streams import KeptStreams
from headrace.gateway.generation.stages.hold import hold
from headrace.gateway.generation.stages.kept_answers import answer_once, use_cache
from headrace.gateway.generation.stages.model_choice import choose_model
from headrace.gateway.generation.stages.prepare import prepare
from headrace.gateway.generation.stages.resume import resume
from headrace.gateway.generation.stages.session import take_turn
from headrace.gateway.http.sse import StreamWatch
from headrace.gateway.ledger.record import prompt_json
from headrace.gateway.sessions.sessions import Sessions
from headrace.gateway.upstream.generation_request import Conversation
from headrace.observe.metrics import Metrics


class StageRow(Protocol):
    def __call__(self, call: Call, /, *, call_next: CallNext) -> Coroutine[Any, Any, Ready]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What the stages work with. What a reload may change they read from `Call.config`."""

    sessions: Sessions
    replays: Replays
    answer_cache: AnswerCache
    kept_streams: KeptStreams
    open_requests: OpenRequests
    watch: StreamWatch
    metrics: Metrics
    clock: Clock
    unix_time: Clock

    def chain(self) -> CallNext:
        """The stages in their order."""
        cache, open_requests = self.answer_cache, self.open_requests
        rows: tuple[tuple[str, StageRow], ...] = (
            ("session", partial(take_turn, sessions=self.sessions)),  # first: the history is a part of the prompt for all others
            ("log_prompt", log_prompt),  # before the caches, whose answers have a usage record too
            # a retry never gets beyond it
            ("idempotency", partial(answer_once, replays=self.replays, metrics=cache.metrics, unix_time=self.unix_time)),
            # nor a hit: what every request is to pass stands before
            ("response_cache", partial(use_cache, cache=cache, unix_time=self.unix_time)),
            # before the choice: a continued stream keeps its model
            ("resume_stream", partial(resume, kept_streams=self.kept_streams, open_requests=open_requests)),
            ("choose_model", partial(choose_model, clock=self.clock, open_requests=open_requests, metrics=self.metrics)),
            # after the choice: a fallback that lives answers at once
            ("hold", partial(hold, clock=self.clock, watch=self.watch)),
        )
        stage: CallNext = partial(_prepared, clock=self.clock)
        for name, row in reversed(rows):
            stage = _marked(name, row, stage)
        return stage


def _marked(name: str, row: StageRow, call_next: CallNext) -> CallNext:
    """The row with its time marked, less that of what it calls."""

    async def behind(call: Call) -> Ready:
        ready = await call_next(call)
        call.exchange.marks.enter(name)
        return ready

    def stage(call: Call) -> Coroutine[Any, Any, Ready]:
        call.exchange.marks.enter(name)
        return row(call, call_next=behind)

    return stage


def _prepared(call: Call, *, clock: Clock) -> Coroutine[Any, Any, Ready]:
    call.exchange.marks.enter("prepare")
    return prepare(call, clock=clock)


async def log_prompt(call: Call, call_next: CallNext) -> Ready:
    if call.principal.logs_prompts:
        prompt = call.parsed.prompt
        call.account.logged_prompt = prompt_json(prompt.messages if isinstance(prompt, Conversation) else prompt.prompts)
    return await call_next(call)
