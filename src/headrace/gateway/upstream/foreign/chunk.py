"""Defines the types of one piece of an OpenAI-compatible server's answer: a chunk of a stream, or a whole answer, of chats or of
completions.

Pieces in their usual form are decoded into these types in one go, by `decode_chunk`. `loose_chunks` reads a piece of another form into the
same types. It also reads a piece that has a value in a field of the type None, because such a piece holds in an unusual place what an
answer needs. Fields that are not listed here are never looked at.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from headrace.gateway.upstream.foreign.errors import says_something
from headrace.gateway.upstream.foreign.usage import Count, LlamaCppTimings, UsageCounts


class SideField(StrEnum):
    """Fields that an answer is complete without. A malformed one is left out and counted: the values are the label `field` of
    headrace_upstream_fields_left_out_total."""

    CALL_ID = "call_id"
    CONTENT_PART = "content_part"
    INDEX = "index"
    LOGPROBS = "logprobs"
    REASONING = "reasoning"
    REFUSAL = "refusal"
    STOP_REASON = "stop_reason"
    SIGNATURE = "signature"
    """What clients would have to send back, beyond its bound or no JSON."""
    USAGE = "usage"


class SentFunction(Struct):
    """parameters, input: other names of arguments"""

    name: str | None = None
    arguments: str | None = None
    parameters: None = None
    input: None = None


class SentCall(SentFunction):
    """A piece of a call. Name and arguments are in `function`, or beside it."""

    index: int | None = None
    id: str | None = None
    function: SentFunction | None = None
    extra_content: Any = None
    provider_specific_fields: Any = None


class SentToken(Struct):
    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]] | None = None


class ChosenToken(SentToken):
    top_logprobs: list[SentToken] | None = None


class SentLogprobs(Struct):
    content: list[ChosenToken] | None = None


class SentDelta(Struct):
    """The new output in a piece. Servers have several names for reasoning, and may send it under two of them."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    reasoning_details: Any = None
    tool_calls: list[SentCall] | None = None
    function_call: SentFunction | None = None
    finish_reason: None = None
    thinking_blocks: Any = None
    extra_content: Any = None
    provider_specific_fields: Any = None

    @property
    def is_text_alone(self) -> bool:
        """Whether there is text and nothing else, which is so for nearly every piece."""
        return bool(self.content) and not (
            self.tool_calls
            or self.reasoning_content
            or self.reasoning
            or self.thinking
            or self.reasoning_details
            or self.thinking_blocks
            or self.extra_content
            or self.provider_specific_fields
            or self.function_call
            or self.refusal
        )

    @property
    def any_reasoning(self) -> str:
        """The reasoning under any of its names, once."""
        return self.reasoning_content or self.reasoning or self.thinking or text_in(self.reasoning_details) or ""

    @property
    def calls(self) -> list[SentCall]:
        """The pieces of calls, also of a single call in OpenAI's older form."""
        calls = self.tool_calls or []
        call = self.function_call
        return calls if calls or call is None else [SentCall(name=call.name, arguments=call.arguments)]


class SentChoice(Struct):
    """message: in a whole answer, and in place of `delta` where servers mix the two up;  error: of this choice alone"""

    index: int | None = None
    delta: SentDelta | None = None
    message: SentDelta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: SentLogprobs | None = None
    usage: UsageCounts | None = None
    content: None = None
    error: Any = None


class GroqFields(Struct):
    usage: UsageCounts | None = None


class AnswerPiece(Struct):
    choices: list[SentChoice] | None = None
    usage: UsageCounts | None = None
    x_groq: GroqFields | None = None
    prompt_eval_count: Count | None = None
    eval_count: Count | None = None
    timings: LlamaCppTimings | None = None
    error: Any = None
    object: str | None = None
    finish_reason: None = None

    @property
    def is_error(self) -> bool:
        return self.object == "error" or (self.error is not None and says_something(self.error))

    def counts(self) -> UsageCounts | None:
        """The piece's token counts, in OpenAI's place, Groq's, Moonshot's (in the only choice), Ollama's or llama.cpp's; or None."""
        in_choice = self.choices[0].usage if self.choices and len(self.choices) == 1 else None
        for counts in (self.usage, None if self.x_groq is None else self.x_groq.usage, in_choice):
            if counts is not None and counts.has_any:
                return counts
        if self.prompt_eval_count is None and self.eval_count is None:
            return None if self.timings is None else self.timings.counts()
        return UsageCounts(prompt_tokens=self.prompt_eval_count, completion_tokens=self.eval_count)


decode_chunk = msgspec.json.Decoder(AnswerPiece).decode


TEXT_FIELDS = ("text", "thinking", "reasoning", "summary", "content", "value")
"""Fields that hold the text of a part of a content, in the order in which they are looked for."""


def text_in(value: object, *, max_depth: int = 3) -> str | None:
    """The text of a string, of an object that holds one, or of a list of both, one in the other at most `max_depth` times.

    None without text. Objects of a list without text, such as encrypted reasoning, are skipped.
    """
    if isinstance(value, str) or max_depth == 0:
        return value if isinstance(value, str) else None
    if isinstance(value, dict):
        value = [value[name] for name in TEXT_FIELDS if value.get(name) is not None][:1]
    if not isinstance(value, list):
        return None
    texts = [text for each in value if (text := text_in(each, max_depth=max_depth - 1)) is not None]
    return "".join(texts) if texts else None
