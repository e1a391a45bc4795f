"""Makes a conversation fit its context."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from headrace.core.errors import DeadlineExceeded, Unavailable
from headrace.core.ids import RequestId
from headrace.core.update import FinishReason
from headrace.gateway.http.errors import ContextLengthExceeded
from headrace.gateway.sessions.history import (
    ANSWER_DIVISOR,
    TARGET_SHARE,
    ContextFitting,
    History,
    Message,
    last_turns,
    most_that_fit,
    prompt_messages,
    transcript,
    turn_starts,
)
from headrace.gateway.upstream.generation_request import Conversation, GenerationRequest, PrincipalFacts
from headrace.gateway.upstream.seam import NO_USAGE, EventStream, Prepared, TokenUsage, Upstream, added

MAX_SUMMARY_TOKENS = 256
SUMMARY_DIVISOR = 8
"""A summary has at most MAX_SUMMARY_TOKENS, and at most 1/N of the window."""

TITLE_TOKENS = 32

SUMMARY_REQUEST = (
    "Summarize the conversation below so that it can be continued from the summary. Keep names, numbers, decisions and open questions. "
    "Answer with the summary alone, in few sentences.\n\n"
)


@dataclass(frozen=True, slots=True)
class Fitted:
    history: History
    fitting: ContextFitting
    num_dropped: int
    usage: TokenUsage = NO_USAGE


OpenStream = Callable[[Prepared], AbstractAsyncContextManager[EventStream]]


class ContextFitter:
    def __init__(
        self,
        upstream: Upstream,
        facts: PrincipalFacts,
        fitting: ContextFitting,
        history: History,
        *,
        max_context_tokens: int | None,
        open_stream: OpenStream,
    ) -> None:
        """open_stream: opens the event stream of a request for a summary, whose tokens count towards the caller's limits; raises
        RateLimitExceeded, QuotaExhausted or Unavailable
        """
        self._upstream, self._facts, self._open_stream = upstream, facts, open_stream
        self._fitting, self._history = fitting, history
        self._max_context_tokens = max_context_tokens

    async def prepared(self, request: GenerationRequest) -> tuple[Prepared, Fitted | None]:
        """How the conversation was shortened is None where it is whole."""
        whole: Prepared | None = None
        num_turns = len(turn_starts(self._history))
        try:
            whole = await self._upstream.prepare(request, self._facts)
        except ContextLengthExceeded:
            if num_turns < 2:
                raise
        limits = [limit for limit in (self._upstream.max_model_len, self._max_context_tokens) if limit is not None]
        if whole is not None and (whole.prompt_tokens is None or num_turns < 2 or not limits):
            return whole, None
        window = min(limits)
        max_prompt = window - (request.sampling.get("max_tokens") or window // ANSWER_DIVISOR)
        if whole is not None and (whole.prompt_tokens or 0) <= max_prompt:
            return whole, None
        fitted = await self._shortened(request, int(max_prompt * TARGET_SHARE), min(MAX_SUMMARY_TOKENS, window // SUMMARY_DIVISOR))
        if request.unsent is not None:
            request.unsent.count()  # a summary was sent, and the answer is to be
        return await self._upstream.prepare(_with(request, fitted.history), self._facts), fitted

    async def _shortened(self, request: GenerationRequest, max_prompt: int, summary_tokens: int) -> Fitted:
        is_summarised = self._fitting is ContextFitting.SUMMARY
        if is_summarised:  # room for the new one, which takes the place of the one there is
            max_prompt -= summary_tokens + TITLE_TOKENS

        async def fits(count: int) -> bool:
            kept, _ = last_turns(self._history, count)
            return await self._num_tokens(request, kept.with_summary("") if is_summarised else kept) <= max_prompt

        count = await most_that_fit(fits, len(turn_starts(self._history)))
        kept, dropped = last_turns(self._history, count)
        if not is_summarised:
            return Fitted(kept, self._fitting, len(dropped))
        summary, usage = await self._summarised(request, kept.summary, dropped, summary_tokens)
        return Fitted(kept.with_summary(summary), self._fitting, len(dropped), usage)

    async def _num_tokens(self, request: GenerationRequest, history: History) -> int:
        prompt = _with(request, history).prompt
        return (await self._upstream.tokenize(prompt, needs_texts=False, tenant=self._facts.tenant)).num_tokens

    async def _summarised(
        self, request: GenerationRequest, earlier: str, messages: Sequence[Message], max_tokens: int
    ) -> tuple[str, TokenUsage]:
        try:
            return await self._asked(request, earlier, messages, max_tokens)
        except ContextLengthExceeded:
            if len(messages) < 2:
                return earlier, NO_USAGE
        middle = len(messages) // 2
        first, first_usage = await self._summarised(request, earlier, messages[:middle], max_tokens)
        both, usage = await self._summarised(request, first, messages[middle:], max_tokens)
        return both, added(first_usage, usage)

    async def _asked(
        self, request: GenerationRequest, earlier: str, messages: Sequence[Message], max_tokens: int
    ) -> tuple[str, TokenUsage]:
        """Raises ContextLengthExceeded, DeadlineExceeded, Unavailable where the model does not end its answer, and what `open_stream`
        raises.
        """
        text = SUMMARY_REQUEST + (f"summary so far: {earlier}\n\n" if earlier else "") + transcript(messages)
        asked = GenerationRequest(
            request_id=RequestId(os.urandom(12).hex()),
            prompt=Conversation(messages=[{"role": "user", "content": text}]),
            sampling={"temperature": 0.0, "max_tokens": max_tokens},
            deadline_at=request.deadline_at,
            unsent=request.unsent,
            admit=request.admit,
            routing=request.routing,
            trace_headers=request.trace_headers,
        )
        texts: list[str] = []
        finish: FinishReason | None = None
        prepared = await self._upstream.prepare(asked, self._facts)
        async with self._open_stream(prepared) as stream:
            while events := await stream.events():
                texts += [event.text for event in events]
                finish = events[-1].finish
            if finish is FinishReason.DEADLINE:
                raise DeadlineExceeded("The request's deadline passed before the earlier conversation was summarised.")
            if finish is None or not finish.is_answer:
                raise Unavailable("The earlier conversation could not be summarised; send the request again.", retry_after_s=1.0)
        return "".join(texts).strip() or earlier, prepared.counted(stream.usage())


def _with(request: GenerationRequest, history: History) -> GenerationRequest:
    assert isinstance(request.prompt, Conversation)
    return replace(request, prompt=replace(request.prompt, messages=prompt_messages(history)))
