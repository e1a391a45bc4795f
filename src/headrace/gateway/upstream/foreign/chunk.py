"""Defines the types of one piece of an OpenAI-compatible server's answer, and says what its counts of tokens mean.

`loose_chunks` reads pieces of another form into the same types, and those with a value in a field of the type None: it holds in an unusual
place what an answer needs.

Cached tokens are a part of the prompt (OpenAI, DeepSeek) or beside it (Anthropic); reasoning is a part of the completion (OpenAI) or beside
it (xAI, Gemini). The name tells, and what stands in the prompt's details is a part of it. Then the total tells, then that no part exceeds
its whole. docs/compatibility.md has the servers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from headrace.gateway.upstream.foreign.errors import says_something
from headrace.gateway.upstream.seam import TokenUsage

MAX_TOKENS = 2**27

MAX_SUM = 2**32 - 1
"""The records' columns have 32 bits, and 64 for money at the highest price."""

Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class TokenDetails(Struct):
    """Proxies of Anthropic's API have three names for the tokens that were written to a cache."""

    cached_tokens: Count | None = None
    cache_write_tokens: Count | None = None
    cache_creation_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    reasoning_tokens: Count | None = None

    @property
    def written(self) -> int:
        return self.cache_write_tokens or self.cache_creation_tokens or self.cache_creation_input_tokens or 0


NO_DETAILS = TokenDetails()


class UsageCounts(TokenDetails, kw_only=True):
    """OpenAI's names and those of its newer interface, then those of single servers."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    total_tokens: Count | None = None
    prompt_tokens_details: TokenDetails | None = None
    completion_tokens_details: TokenDetails | None = None
    input_tokens_details: TokenDetails | None = None
    output_tokens_details: TokenDetails | None = None
    prompt_cache_hit_tokens: Count | None = None
    prompt_cache_miss_tokens: Count | None = None
    num_cached_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None

    @property
    def has_any(self) -> bool:
        return self != NO_COUNTS

    def said(self) -> SaidUsage:
        prompt_parts = self.prompt_tokens_details or self.input_tokens_details or NO_DETAILS
        output_parts = self.completion_tokens_details or self.output_tokens_details or NO_DETAILS
        prompt, completion = self.prompt_tokens or self.input_tokens or 0, self.completion_tokens or self.output_tokens or 0
        total, reasoning = self.total_tokens or 0, output_parts.reasoning_tokens or self.reasoning_tokens or 0
        cached = prompt_parts.cached_tokens or self.prompt_cache_hit_tokens or self.cached_tokens or self.num_cached_tokens
        cached, written = cached or self.cache_read_input_tokens or 0, prompt_parts.written or self.written
        is_named = self.cache_read_input_tokens is not None and not (self.prompt_tokens or prompt_parts.cached_tokens)
        parts, more = cached + written, total - prompt - completion
        is_inside = bool(prompt_parts.cached_tokens or prompt_parts.written)
        is_beside = is_named or (parts > 0 and not is_inside and more != reasoning and more in (parts, parts + reasoning))
        return SaidUsage(
            prompt=0 if is_beside else prompt,
            uncached=(prompt if is_beside else 0) or self.prompt_cache_miss_tokens or 0,
            completion=completion + reasoning if reasoning > completion and not total else completion,
            total=total,
            cached=cached,
            written=written,
            reasoning=reasoning,
            is_split=is_named and self.input_tokens is None,
        )


NO_COUNTS = UsageCounts()


class LlamaCppTimings(Struct):
    """prompt_n: prompt tokens that were not cached"""

    prompt_n: Count | None = None
    cache_n: Count | None = None
    predicted_n: Count | None = None

    def counts(self) -> UsageCounts | None:
        if self.prompt_n is None or self.predicted_n is None:
            return None
        cached = self.cache_n or 0
        return UsageCounts(prompt_tokens=self.prompt_n + cached, completion_tokens=self.predicted_n, cached_tokens=cached)


class SaidUsage(NamedTuple):
    """prompt    with the cached and written tokens, unless these are more
    uncached  prompt without the cached and written tokens
    is_split  cached tokens that by their name are no part of the prompt came without it
    """

    prompt: int = 0
    uncached: int = 0
    completion: int = 0
    total: int = 0
    cached: int = 0
    written: int = 0
    reasoning: int = 0
    is_split: bool = False

    def merged(self, later: SaidUsage) -> SaidUsage:
        """The largest of each: servers that count in every piece count from the beginning, and some send zeros at the end."""
        return SaidUsage._make(map(max, self, later))

    def meant(self, num_tokens: int, num_sequences: int) -> TokenUsage:
        """No part exceeds its whole.

        Cached and written tokens that are more than the prompt stood beside it. What a total adds without a name is output, as Gemini's
        thoughts are.

        num_sequences  servers may count a prompt's cached tokens once for each
        """
        prompt, completion, reasoning, parts = self.prompt, self.completion, self.reasoning, self.cached + self.written
        if self.uncached:
            prompt = max(prompt, self.uncached + parts)
        else:
            output = completion or num_tokens
            prompt = prompt or max(0, self.total - output)
            if parts > prompt * num_sequences or (self.is_split and self.total != prompt + output):
                prompt += parts
        if (more := self.total - prompt - completion) > 0:
            reasoning = reasoning or (more if completion else 0)
            completion += more
        num_estimated = 0 if completion else num_tokens
        completion += num_estimated
        return TokenUsage(prompt, completion, min(self.cached, prompt), min(reasoning, completion), estimated_tokens=num_estimated)


class SideField(StrEnum):
    """Values are the label `field` of headrace_upstream_fields_left_out_total."""

    CALL_ID = "call_id"
    CONTENT_PART = "content_part"
    INDEX = "index"
    LOGPROBS = "logprobs"
    REASONING = "reasoning"
    REFUSAL = "refusal"
    STOP_REASON = "stop_reason"
    SIGNATURE = "signature"
    USAGE = "usage"


class SentFunction(Struct):
    name: str | None = None
    arguments: str | None = None
    parameters: None = None
    input: None = None


class SentCall(SentFunction):
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
    """Servers have several names for reasoning."""

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
        return self.reasoning_content or self.reasoning or self.thinking or text_in(self.reasoning_details) or ""

    @property
    def calls(self) -> list[SentCall]:
        calls = self.tool_calls or []
        call = self.function_call
        return calls if calls or call is None else [SentCall(name=call.name, arguments=call.arguments)]


class SentChoice(Struct):
    """message: of a whole answer, and where servers mix it up with `delta`"""

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
        in_choice = self.choices[0].usage if self.choices and len(self.choices) == 1 else None
        for counts in (self.usage, None if self.x_groq is None else self.x_groq.usage, in_choice):
            if counts is not None and counts.has_any:
                return counts
        if self.prompt_eval_count is None and self.eval_count is None:
            return None if self.timings is None else self.timings.counts()
        return UsageCounts(prompt_tokens=self.prompt_eval_count, completion_tokens=self.eval_count)


decode_chunk = msgspec.json.Decoder(AnswerPiece).decode


TEXT_FIELDS = ("text", "thinking", "reasoning", "summary", "content", "value")


def text_in(value: object, *, max_depth: int = 3) -> str | None:
    if isinstance(value, str) or max_depth == 0:
        return value if isinstance(value, str) else None
    if isinstance(value, dict):
        value = [value[name] for name in TEXT_FIELDS if value.get(name) is not None][:1]
    if not isinstance(value, list):
        return None
    texts = [text for each in value if (text := text_in(each, max_depth=max_depth - 1)) is not None]
    return "".join(texts) if texts else None
