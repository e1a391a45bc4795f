"""Reads the token counts of foreign servers, under the names that they use, into one meaning.

Servers agree on what a count is called far more than on what it includes. Cached tokens are a part of the prompt (OpenAI, DeepSeek) or
beside it (Anthropic); reasoning is a part of the completion (OpenAI) or beside it (xAI, Gemini). The name tells, and what stands in the
prompt's details is a part of it. Then the total tells, then that no part exceeds its whole. Each object of an answer is read by itself,
since a server may change its form from one to the next.
docs/compatibility.md has the table of servers.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from headrace.gateway.upstream.seam import TokenUsage

MAX_TOKENS = 2**27
"""Largest count that is believed, above any context."""

MAX_SUM = 2**32 - 1
"""Largest sum of a request's counts: the records' columns have 32 bits, and 64 for money at the highest price."""

Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class TokenDetails(Struct):
    """Parts of a count. Proxies of Anthropic's API have three names for the tokens that were written to a cache."""

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
    """A server's usage object. The names are OpenAI's and those of its newer interface, then those of single servers. Parts stand in the
    details, or beside the counts."""

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
        """Whether it counts anything, and is no empty object."""
        return self != NO_COUNTS

    def said(self) -> SaidUsage:
        """The counts in one form, as far as this object alone tells: by a name, or since its total has parts that its counts lack."""
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
    """llama.cpp's counts, which it also sends where it sends no usage. prompt_n: prompt tokens that were not cached"""

    prompt_n: Count | None = None
    cache_n: Count | None = None
    predicted_n: Count | None = None

    def counts(self) -> UsageCounts | None:
        if self.prompt_n is None or self.predicted_n is None:
            return None
        cached = self.cache_n or 0
        return UsageCounts(prompt_tokens=self.prompt_n + cached, completion_tokens=self.predicted_n, cached_tokens=cached)


class SaidUsage(NamedTuple):
    """Counts of one answer as its server said them; 0: not said.

    prompt    with the cached and written tokens, unless these are more
    uncached  prompt without the cached and written tokens
    written   tokens of the prompt that were written to a cache
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
        """The largest of each count: servers that count in every piece count from the beginning, and some send zeros at the end."""
        return SaidUsage._make(map(max, self, later))

    def meant(self, num_tokens: int, num_sequences: int) -> TokenUsage:
        """The counts as they are shown, recorded and charged: no part exceeds its whole.

        Cached and written tokens that are more than the prompt stood beside it. What a total adds without a name is output, as Gemini's
        thoughts are.

        num_tokens     output tokens that were received, which count where the server says none
        num_sequences  of the answer. Servers may count a prompt's cached tokens once for each
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
        completion = completion or num_tokens
        return TokenUsage(prompt, completion, min(self.cached, prompt), min(reasoning, completion))
