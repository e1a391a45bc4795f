"""POST /v1/chat/completions and /v1/completions, from the decoded body to the last byte.

    body -> parse -> admit -> render and tokenize (text pool) -> one call per prompt -> events -> chunks or one answer -> close

The request's own task does all of it. A client that leaves is noticed by `Exchange.watching`, which cancels the calls at the engine at
once; the task then finds its streams ended and unwinds. Whatever way it ends, `_Run.close` runs once.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from headrace.core.errors import DeadlineExceeded, RequestTooLarge, SequenceFailed, Unavailable
from headrace.core.finish import FinishReason
from headrace.core.ids import RequestId
from headrace.core.sampling import SamplingParams, check_token_ids, with_room
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.config import GatewayConfig, Limits
from headrace.gateway.generation.merge import MergedStream
from headrace.gateway.generation.progress import Progress, usage_of
from headrace.gateway.generation.text_pool import TextPool
from headrace.gateway.http.errors import ContextLengthExceeded
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.json_border import Caps, decode_object
from headrace.gateway.http.sse import StreamWatch
from headrace.gateway.surfaces.dialect.answers import Answer, ChatAnswer, CompletionAnswer, Facts, Prompt
from headrace.gateway.surfaces.dialect.parse import (
    fields_as_written,
    lowered_priority,
    parse_chat,
    parse_completion,
    sampling_params,
    template_messages,
)
from headrace.gateway.surfaces.dialect.schemas import ChatRequest, CompletionRequest, Usage
from headrace.gateway.upstream.served_models import ModelTable, ServedModel, now_unix
from headrace.gateway.upstream.tokens import Call, EventStream, OutputEvent
from headrace.observe.metrics import Metrics, ReplicaMetrics

T = TypeVar("T")
U = TypeVar("U")
MAX_DRAWN_SEED = 2**63
DEADLINE_PASSED = "The request's deadline passed before it was complete."
MAX_INLINE_BYTES = 64 << 10
"""A body up to this size is parsed on the event loop: handing it to a thread costs more than parsing it."""

MAX_PROMPT_SCORES = 1 << 20
"""Log-probabilities of prompt tokens in one answer, some 60 bytes each: tokens x (alternatives + 1) x choices that show them."""

PROMPT_SCORE_BYTES = 128
"""What one of them may take on its way to the client, encoded or not."""

MAX_OUTPUT_SCORES = 1 << 18
"""Log-probabilities of output tokens in one answer that is not streamed, some 250 bytes each until it is written."""

MAX_INLINE_SCORES = 4096
"""An answer with so many log-probabilities is encoded on the event loop: a few milliseconds."""

DEADLINE_GRACE_S = 0.5
"""An engine ends a request at its deadline itself; this much later the gateway does, whatever the engine does."""


@dataclass(frozen=True, slots=True)
class Service:
    """What generating needs; made once by `gateway.app`."""

    config: GatewayConfig
    models: ModelTable
    open_requests: OpenRequests
    watch: StreamWatch
    text_pool: TextPool
    metrics: Metrics
    salt_key: bytes
    clock: Callable[[], float] = time.monotonic
    draw_seed: Callable[[], int] = field(default=lambda: secrets.randbelow(MAX_DRAWN_SEED))


async def chat_completions(service: Service, exchange: Exchange) -> None:
    with service.open_requests.admit(exchange.request_id, exchange.leave):
        request = await parsed(service, exchange, parse_chat)
        with fields_as_written(request):
            run = _Run(service, exchange, request)
            async with exchange.watching():
                calls = await service.text_pool.run(run.chat_calls, request)
                answer = ChatAnswer(request, run.facts("chatcmpl-"), run.model.text.tokenizer, include_usage=_wants_usage(request))
                await run.answer(answer, calls)


async def completions(service: Service, exchange: Exchange) -> None:
    with service.open_requests.admit(exchange.request_id, exchange.leave):
        request, given = await parsed(service, exchange, parse_completion)
        run = _Run(service, exchange, request)
        async with exchange.watching():
            prompts, calls = await service.text_pool.run(run.completion_calls, request, given)
            facts = run.facts("cmpl-")
            answer = CompletionAnswer(request, prompts, facts, run.model.text.tokenizer, include_usage=_wants_usage(request))
            await run.answer(answer, calls)


async def parsed(service: Service, exchange: Exchange, parse: Callable[[dict[str, object], Limits], T]) -> T:
    """The body of any POST, within the configured bounds. A large one is taken apart off the event loop."""
    limits = service.config.limits
    body = await exchange.json_body(max_bytes=limits.max_body_bytes, timeout_s=service.config.timeouts.body_s)

    def work() -> T:
        return parse(decode_object(body, Caps(depth=limits.max_json_depth)), limits)

    return work() if len(body) <= MAX_INLINE_BYTES else await service.text_pool.run(work)


class _Run:
    """One admitted request of a known model."""

    def __init__(self, service: Service, exchange: Exchange, request: ChatRequest | CompletionRequest) -> None:
        """Raises ModelNotFound, Unavailable or InvalidRequest: everything that can be refused without the prompt."""
        self.service = service
        self.exchange = exchange
        self.request = request
        self.model = service.models.get(request.model)
        record = exchange.record
        record.model, record.stream, record.n = self.model.name, request.stream, request.n
        self.priority = lowered_priority(request.priority, exchange.principal.priority)
        params = sampling_params(request, self.model.sampling_defaults)
        record.seed = params.seed if params.seed is not None else service.draw_seed()
        self.num_prompt_scores = 0
        self.params: SamplingParams = params.with_(seed=record.seed).checked(vocab_size=self.model.info.vocab_size)

    def facts(self, prefix: str) -> Facts:
        return Facts(
            id=f"{prefix}{self.exchange.request_id}",
            created=now_unix(),
            model=self.request.model,
            fingerprint=self.model.fingerprint,
        )

    def chat_calls(self, request: ChatRequest) -> list[Call]:
        """Runs in the text pool: template, tokens, and the checks that need them."""
        ids = self.model.text.template.encode(
            self.model.text.tokenizer,
            template_messages(request.messages),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=request.chat_template_kwargs,
        )
        self._check_prompt_scores(len(ids), num_shown=1)
        return [self._call(0, tuple(ids))]

    def completion_calls(self, request: CompletionRequest, given: Sequence[str | list[int]]) -> tuple[list[Prompt], list[Call]]:
        """Runs in the text pool."""
        prompts = [_encode_prompt(self.model, request, prompt) for prompt in given]
        self._check_prompt_scores(sum(len(prompt.ids) for prompt in prompts), num_shown=request.n)
        return prompts, [self._call(number, prompt.ids) for number, prompt in enumerate(prompts)]

    async def answer(self, answer: Answer, calls: Sequence[Call]) -> None:
        """Run the calls and write the answer."""
        self._raise_if_left()
        if not self.request.stream:
            self._check_output_scores(len(calls) * self.params.n * (self.params.max_tokens or 0))
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

    def _check_prompt_scores(self, num_tokens: int, *, num_shown: int) -> None:
        """What the prompt's log-probabilities make of the answer. Raises RequestTooLarge.

        num_shown  choices that show them; a chat shows them once
        """
        num_top = self.params.prompt_logprobs
        if num_top is None:
            return
        field = "logprobs" if self.request.prompt_logprobs is None else "prompt_logprobs"
        self.num_prompt_scores = num_tokens * (num_top + 1) * num_shown
        if self.num_prompt_scores > MAX_PROMPT_SCORES:
            rule = f"prompt tokens ({num_tokens}) x ({field} + 1) x choices ({num_shown}) <= {MAX_PROMPT_SCORES}"
            raise RequestTooLarge(field, rule, num_top, "Ask for fewer alternatives or choices, or score the prompt in parts.")

    def _call(self, number: int, prompt_ids: tuple[int, ...]) -> Call:
        """Raises InvalidRequest for what the model cannot take, by the rules the engine holds it against again."""
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
            deadline_s=self._remaining_s(),
        )
        call.engine_request(0).checked(vocab_size=info.vocab_size, max_model_len=info.max_model_len)
        return call

    def _params_within(self, room: int) -> SamplingParams:
        """Who names no max_tokens gets what the model's author chose, if anything, as far as the context leaves room."""
        chosen = self.model.sampling_defaults.get("max_tokens")
        return self.params if self.params.max_tokens is not None else with_room(self.params, chosen, room)

    def _remaining_s(self) -> float | None:
        deadline_s = self.service.config.timeouts.request_s
        if deadline_s is None:
            return None
        remaining = deadline_s - (self.service.clock() - self.exchange.arrived_s)
        if remaining <= 0:
            raise DeadlineExceeded(f"The request's deadline of {deadline_s:g} s passed before it began.")
        return remaining

    def _deadline(self) -> asyncio.TimerHandle | None:
        """The gateway's own end of a request: an engine whose loop hangs ends nothing."""
        remaining_s = self._remaining_s()
        if remaining_s is None:
            return None
        return asyncio.get_running_loop().call_later(remaining_s + DEADLINE_GRACE_S, self.exchange.leave, DeadlineExceeded(DEADLINE_PASSED))

    async def _whole(self, answer: Answer, merged: MergedStream, streams: Sequence[EventStream], progress: Progress) -> None:
        num_tokens = 0
        while events := await self._events(merged, progress):
            answer.add(events)
            num_tokens += sum(len(event.delta.logprobs) for event in events)
            self._check_output_scores(num_tokens)
        usage = self._usage(streams, progress)
        num_scores = self.num_prompt_scores + num_tokens * ((self.params.logprobs or 0) + 1)
        await self.exchange.reply(200, await self._made(num_scores, answer.whole, usage))

    def _check_output_scores(self, num_tokens: int) -> None:
        """An answer that is not streamed is held in memory until it is whole. Raises RequestTooLarge."""
        if self.params.logprobs is not None and num_tokens * (self.params.logprobs + 1) > MAX_OUTPUT_SCORES:
            rule = f"tokens of all choices ({num_tokens}) x (alternatives + 1) <= {MAX_OUTPUT_SCORES} without stream"
            raise RequestTooLarge("logprobs", rule, self.params.logprobs, "Stream the answer, or lower max_tokens, n or the alternatives.")

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
        usage = usage_of(streams, num_sequences=progress.num_sequences, prompt_tokens=progress.prompt_tokens)
        if self.request.max_tokens == 0:  # echo only: the token that was made is not part of the answer
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _raise_if_left(self) -> None:
        if self.exchange.left is not None:
            raise self.exchange.left

    def _close(self, streams: Sequence[EventStream], progress: Progress) -> None:
        """The open_requests's last line: metrics and the request's record, whatever happened."""
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


def _encode_prompt(model: ServedModel, request: CompletionRequest, prompt: str | list[int]) -> Prompt:
    """Text that nobody will read (no echo) is not made."""
    tokenizer = model.text.tokenizer
    if isinstance(prompt, str):
        return Prompt(tuple(tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)), prompt)
    check_token_ids("prompt", prompt, model.info.vocab_size)
    return Prompt(tuple(prompt), tokenizer.decode(prompt) if request.echo else "")


def _raise_if_failed(finish: FinishReason | None, detail: str | None, exchange: Exchange) -> None:
    if finish is None or finish.is_answer:
        return
    if finish is FinishReason.DEADLINE:
        raise DeadlineExceeded(DEADLINE_PASSED)
    if finish is FinishReason.CANCELLED:
        raise Unavailable("The engine gave this request up; it can be sent again.")
    exchange.record.detail = detail and detail[:200]  # the engine's words are for the operator
    raise SequenceFailed("The engine could not continue this request. Its neighbours go on; it can be sent again.")


def _wants_usage(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and request.stream_options.include_usage
