"""Defines the types of one piece of an OpenAI-compatible server's answer: a chunk of a stream, or a whole answer, of chats or of
completions.

Pieces in their usual form are decoded into these types in one go, by `decode_chunk`. `foreign_loose` reads a piece of another form into the
same types. It also reads a piece that has a value in a field of the type None, because such a piece holds in an unusual place what an
answer needs. Fields that are not listed here are never looked at.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from headrace.gateway.upstream.foreign_errors import says_something
from headrace.gateway.upstream.foreign_json import MAX_COUNT

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


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

    @property
    def is_text_alone(self) -> bool:
        """Whether there is text and nothing else, which is so for nearly every piece."""
        return bool(self.content) and not (
            self.tool_calls
            or self.reasoning_content
            or self.reasoning
            or self.thinking
            or self.reasoning_details
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


class TokenDetails(Struct):
    cached_tokens: Count | None = None
    reasoning_tokens: Count | None = None


class UsageCounts(Struct):
    """Counts by OpenAI's names, or by those of its newer interface."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    prompt_tokens_details: TokenDetails | None = None
    completion_tokens_details: TokenDetails | None = None

    @property
    def has_any(self) -> bool:
        return self.num_prompt is not None or self.num_completion is not None

    @property
    def num_prompt(self) -> int | None:
        return self.input_tokens if self.prompt_tokens is None else self.prompt_tokens

    @property
    def num_completion(self) -> int | None:
        return self.output_tokens if self.completion_tokens is None else self.completion_tokens


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
    error: Any = None
    object: str | None = None
    finish_reason: None = None

    @property
    def is_error(self) -> bool:
        return self.object == "error" or (self.error is not None and says_something(self.error))

    def counts(self) -> UsageCounts | None:
        """The piece's token counts, in OpenAI's place, Groq's, Moonshot's (in the only choice) or Ollama's; None: it has none."""
        choices = self.choices
        if self.usage is not None and self.usage.has_any:
            return self.usage
        if self.x_groq is not None and self.x_groq.usage is not None and self.x_groq.usage.has_any:
            return self.x_groq.usage
        if choices and len(choices) == 1 and choices[0].usage is not None and choices[0].usage.has_any:
            return choices[0].usage
        if self.prompt_eval_count is None and self.eval_count is None:
            return None
        return UsageCounts(self.prompt_eval_count, self.eval_count)


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
