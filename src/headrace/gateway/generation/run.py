"""One admitted request, from its calls to the last byte of its answer.

    calls -> events -> chunks or one answer -> close

The request's own task does all of it. A client that leaves is noticed by `Exchange.watching`, which cancels the calls at the engine at
once; the task then finds its streams ended and unwinds. Whatever way it ends, `Run._close` runs once. What comes before (the body, the
template, the tokens) is the surface's: `surfaces.chat`, `surfaces.completions`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from headrace.core.errors import DeadlineExceeded, SequenceFailed, Unavailable
from headrace.core.finish import FinishReason
from headrace.core.ids import RequestId
from headrace.core.sampling import SamplingParams, with_room
from headrace.gateway.generation.merge import MergedStream
from headrace.gateway.generation.progress import Progress, usage_of
from headrace.gateway.generation.score_limits import MAX_INLINE_SCORES, PROMPT_SCORE_BYTES, check_output_scores, num_prompt_scores
from headrace.gateway.generation.service import Service
from headrace.gateway.http.errors import ContextLengthExceeded
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.surfaces.dialect.parse import lowered_priority, sampling_params
from headrace.gateway.surfaces.dialect.schemas import SamplingFields, Usage
from headrace.gateway.upstream.tokens import Call, EventStream, OutputEvent
from headrace.observe.metrics import ReplicaMetrics

U = TypeVar("U")
DEADLINE_PASSED = "The request's deadline passed before it was complete."

DEADLINE_GRACE_S = 0.5
"""An engine ends a request at its deadline itself; this much later the gateway does, whatever the engine does."""


class Answer(Protocol):
    """How one request's events become bytes. Either `chunk`s and `last`, or `add`s and `whole`."""

    def chunk(self, events: Sequence[OutputEvent]) -> bytes:
        """Server-sent events for what is new; empty when there is nothing a client should hear of."""
        ...

    def last(self, usage: Usage) -> bytes:
        """The end of a stream: usage if it was asked for, then [DONE]."""
        ...

    def add(self, events: Sequence[OutputEvent]) -> None: ...

    def whole(self, usage: Usage) -> bytes: ...


class Run:
    """One admitted request of a known model."""

    def __init__(self, service: Service, exchange: Exchange, request: SamplingFields, own: dict[str, Any]) -> None:
        """
        own  parameters that the surface words in its own way

        Raises ModelNotFound, Unavailable or InvalidRequest: everything that can be refused without the prompt.
        """
        self.service = service
        self.exchange = exchange
        self.request = request
        self.model = service.models.get(request.model)
        record = exchange.record
        record.model, record.stream, record.n = self.model.name, request.stream, request.n
        self.priority = lowered_priority(request.priority, exchange.principal.priority)
        params = sampling_params(request, self.model.sampling_defaults, own)
        record.seed = params.seed if params.seed is not None else service.draw_seed()
        self.num_prompt_scores = 0
        self.params: SamplingParams = params.with_(seed=record.seed).checked(vocab_size=self.model.info.vocab_size)

    def count_prompt_scores(self, field: str, *, num_tokens: int, num_shown: int) -> None:
        """What the prompts' log-probabilities make of the answer. Raises RequestTooLarge. See `score_limits.num_prompt_scores`."""
        self.num_prompt_scores = num_prompt_scores(field, self.params.prompt_logprobs, num_tokens=num_tokens, num_shown=num_shown)

    def call(self, number: int, prompt_ids: tuple[int, ...]) -> Call:
        """The request's prompt `number`. Raises InvalidRequest for what the model cannot take, by the rules the engine holds it to."""
        info = self.model.info
        if len(prompt_ids) >= info.max_model_len:
            rule = f"prompt tokens + at least 1 output token <= max_model_len ({info.max_model_len})"
            raise ContextLengthExceeded("prompt", rule, len(prompt_ids), "Shorten the prompt.")
        principal = self.exchange.principal
        salt = hashlib.blake2b(principal.tenant.encode(), digest_size=16, key=self.service.salt_key, person=b"headrace-salt")
        salt.update(b"\0" + self.request.cache_salt.encode())
        call = Call(
            request_id=RequestId(f"{self.exchange.request_id}-{number}"),
            prompt_ids=prompt_ids,
            params=self._params_within(info.max_model_len - len(prompt_ids)),
            tenant=principal.tenant,
            weight=principal.weight,
            priority=self.priority,
            salt=salt.digest(),
            deadline_s=self._deadline_s(),
        )
        call.engine_request(0).checked(vocab_size=info.vocab_size, max_model_len=info.max_model_len)
        return call

    async def answer(self, answer: Answer, calls: Sequence[Call]) -> None:
        """Run the calls and write the answer."""
        self._raise_if_left()
        if not self.request.stream:
            check_output_scores(self.params.logprobs, num_tokens=len(calls) * self.params.n * (self.params.max_tokens or 0))
        streams: list[EventStream] = []
        progress = Progress(
            num_sequences=len(calls) * self.params.n,
            prompt_tokens=sum(len(call.prompt_ids) for call in calls),
            arrived_s=self.exchange.arrived_s,
            metrics_of=partial(_metrics_of, streams, self.params.n),
        )
        deadline = self._deadline()
        try:
            for call in calls:
                streams.append(self.model.upstream.stream(call))
            async with MergedStream(streams, self.params.n) as merged:
                self.exchange.on_left(merged.cancel)
                if self.request.stream:
                    await self._stream(answer, merged, streams, progress)
                else:
                    await self._whole(answer, merged, streams, progress)
            self.exchange.record.outcome = progress.outcome
        finally:
            if deadline is not None:
                deadline.cancel()
            for stream in streams:
                stream.cancel()
            self._close(streams, progress)

    def _params_within(self, room: int) -> SamplingParams:
        """Who names no max_tokens gets what the model's author chose, if anything, as far as the context leaves room."""
        chosen = self.model.sampling_defaults.get("max_tokens")
        return self.params if self.params.max_tokens is not None else with_room(self.params, chosen, room)

    def _deadline_s(self) -> float | None:
        """On the service's clock. Raises DeadlineExceeded when it has passed."""
        request_s = self.service.config.timeouts.request_s
        if request_s is None:
            return None
        deadline_s = self.exchange.arrived_s + request_s
        if deadline_s <= self.service.clock():
            raise DeadlineExceeded(f"The request's deadline of {request_s:g} s passed before it began.")
        return deadline_s

    def _deadline(self) -> asyncio.TimerHandle | None:
        """The gateway's own end of a request: an engine whose loop hangs ends nothing."""
        deadline_s = self._deadline_s()
        if deadline_s is None:
            return None
        remaining_s = deadline_s - self.service.clock()
        return asyncio.get_running_loop().call_later(remaining_s + DEADLINE_GRACE_S, self.exchange.leave, DeadlineExceeded(DEADLINE_PASSED))

    async def _whole(self, answer: Answer, merged: MergedStream, streams: Sequence[EventStream], progress: Progress) -> None:
        num_tokens = 0
        while events := await self._events(merged, progress):
            answer.add(events)
            num_tokens += sum(len(event.delta.logprobs) for event in events)
            check_output_scores(self.params.logprobs, num_tokens=num_tokens)
        usage = self._usage(streams, progress)
        num_scores = self.num_prompt_scores + num_tokens * ((self.params.logprobs or 0) + 1)
        await self.exchange.reply(200, await self._made(num_scores, answer.whole, usage))

    async def _made(self, num_scores: int, make: Callable[[U], bytes], given: U) -> bytes:
        """Bytes of the answer; where they hold many log-probabilities the event loop does not wait for them."""
        if num_scores <= MAX_INLINE_SCORES:
            return make(given)
        return await self.service.text_pool.finish(make, given)

    async def _stream(self, answer: Answer, merged: MergedStream, streams: Sequence[EventStream], progress: Progress) -> None:
        """Nothing is sent before the first event, so that a refusal still has its status code; but not for longer than a ping's time."""
        first: list[OutputEvent] | None = None
        try:
            async with asyncio.timeout(self.service.config.timeouts.sse_ping_s):
                first = await self._events(merged, progress)
        except TimeoutError:
            pass
        score_bytes = self.num_prompt_scores * PROMPT_SCORE_BYTES
        async with self.service.watch.open(self.exchange, lambda: merged.unread_bytes, score_bytes=score_bytes) as sse:
            events = first if first is not None else await self._events(merged, progress)
            while events:
                payload = await self._made(self.num_prompt_scores, answer.chunk, events)
                if payload:
                    await sse.write(payload)
                events = await self._events(merged, progress)
            await sse.end(answer.last(self._usage(streams, progress)))

    async def _events(self, merged: MergedStream, progress: Progress) -> list[OutputEvent]:
        """The next events; empty only after every sequence has its answer. Raises what became of it otherwise."""
        self._raise_if_left()
        events = await merged.events()
        self._raise_if_left()
        progress.see(events, self.service.clock())
        for event in events:
            _raise_if_failed(event.delta.finish, event.delta.error, self.exchange)
        if not events and len(progress.finish_reasons) < progress.num_sequences:
            raise Unavailable("The engine ended this request before it was complete; it can be sent again.")
        return events

    def _usage(self, streams: Sequence[EventStream], progress: Progress) -> Usage:
        return usage_of(streams, num_sequences=progress.num_sequences, prompt_tokens=progress.prompt_tokens)

    def _raise_if_left(self) -> None:
        if self.exchange.left is not None:
            raise self.exchange.left

    def _close(self, streams: Sequence[EventStream], progress: Progress) -> None:
        """The last line: metrics and the request's record, whatever happened."""
        record = self.exchange.record
        record.prompt_tokens = progress.prompt_tokens
        record.ttft_s = progress.ttft_s
        record.finish_reasons = progress.finish_reasons or None
        if not streams:
            return
        usage = usage_of(streams, num_sequences=len(streams) * self.params.n, prompt_tokens=progress.prompt_tokens)
        record.completion_tokens, record.cached_tokens = usage.completion_tokens, usage.prompt_tokens_details.cached_tokens
        queue_times_s = {number * self.params.n: stream.usage(0).queue_time_s for number, stream in enumerate(streams)}
        record.queue_time_s = queue_times_s[0]
        if streams[0].replica is not None:
            record.replica = streams[0].replica.name
        progress.close(self.service.clock(), queue_times_s)


def _metrics_of(streams: Sequence[EventStream], n: int, index: int) -> ReplicaMetrics | None:
    """The instruments of the replica that runs sequence `index` of a request: each prompt may have another one."""
    replica = streams[index // n].replica if index // n < len(streams) else None
    return None if replica is None else replica.metrics


def _raise_if_failed(finish: FinishReason | None, detail: str | None, exchange: Exchange) -> None:
    if finish is None or finish.is_answer:
        return
    if finish is FinishReason.DEADLINE:
        raise DeadlineExceeded(DEADLINE_PASSED)
    if finish is FinishReason.CANCELLED:
        raise Unavailable("The engine gave this request up; it can be sent again.")
    exchange.record.detail = detail and detail[:200]  # the engine's words are for the operator
    raise SequenceFailed("The engine could not continue this request. Its neighbours go on; it can be sent again.")
