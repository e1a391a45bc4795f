"""Reads the token counts of foreign servers, under the names that they use, into one meaning.

Servers agree on what a count is called far more than on what it includes. Cached tokens are a part of the prompt (OpenAI, DeepSeek) or
beside it (Anthropic); reasoning is a part of the completion (OpenAI) or beside it (xAI, Gemini). The name tells, then the total, then that
no part exceeds its whole. docs/compatibility.md has the table of servers.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from headrace.gateway.upstream.seam import TokenUsage

MAX_TOKENS = 2**27
"""Largest count that is believed, above any context. Sums for some sequences, at the highest price, fit the records' columns: 32 bits, and
64 for money."""

Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class TokenDetails(Struct):
    """Parts of a count. Proxies of Anthropic's API have three names for the tokens that were written to a cache."""

    cached_tokens: Count | None = None
    cache_write_tokens: Count | None = None
    cache_creation_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    reasoning_tokens: Count | None = None


NO_DETAILS = TokenDetails()


class UsageCounts(Struct):
    """A server's usage object. The names are OpenAI's and those of its newer interface, then those of single servers."""

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
    cached_tokens: Count | None = None
    num_cached_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    reasoning_tokens: Count | None = None

    @property
    def has_any(self) -> bool:
        """Whether it counts prompt or output, and is no empty object."""
        prompts = (self.prompt_tokens, self.input_tokens, self.prompt_cache_hit_tokens, self.prompt_cache_miss_tokens)
        return any(count is not None for count in (*prompts, self.completion_tokens, self.output_tokens, self.total_tokens))

    def said(self) -> SaidUsage:
        prompt_parts = self.prompt_tokens_details or self.input_tokens_details or NO_DETAILS
        output_parts = self.completion_tokens_details or self.output_tokens_details or NO_DETAILS
        written = prompt_parts.cache_write_tokens or prompt_parts.cache_creation_tokens or prompt_parts.cache_creation_input_tokens
        cached = prompt_parts.cached_tokens or self.prompt_cache_hit_tokens or self.cached_tokens or self.num_cached_tokens
        return SaidUsage(
            prompt=self.prompt_tokens or self.input_tokens or (self.prompt_cache_hit_tokens or 0) + (self.prompt_cache_miss_tokens or 0),
            completion=self.completion_tokens or self.output_tokens or 0,
            total=self.total_tokens or 0,
            cached=cached or self.cache_read_input_tokens or 0,
            written=written or self.cache_creation_input_tokens or 0,
            reasoning=output_parts.reasoning_tokens or self.reasoning_tokens or 0,
            is_beside=not self.prompt_tokens and not prompt_parts.cached_tokens and self.cache_read_input_tokens is not None,
        )


class LlamaCppTimings(Struct):
    """llama.cpp's counts, which it also sends where it sends no usage. prompt_n: prompt tokens that were not cached"""

    prompt_n: Count | None = None
    cache_n: Count | None = None
    predicted_n: Count | None = None

    def counts(self) -> UsageCounts | None:
        if self.prompt_n is None or self.predicted_n is None:
            return None
        cached = self.cache_n or 0
        return UsageCounts(self.prompt_n + cached, self.predicted_n, cached_tokens=cached)


class SaidUsage(NamedTuple):
    """Counts of one answer as its server said them; 0: not said.

    written    tokens of the prompt that were written to a cache
    is_beside  by their names, `cached` and `written` are no part of `prompt`
    """

    prompt: int = 0
    completion: int = 0
    total: int = 0
    cached: int = 0
    written: int = 0
    reasoning: int = 0
    is_beside: bool = False

    def merged(self, later: SaidUsage) -> SaidUsage:
        """The largest of each count: servers that count in every piece count from the beginning, and some send zeros at the end."""
        return SaidUsage._make(map(max, self, later))

    def meant(self, num_tokens: int, num_sequences: int) -> TokenUsage:
        """The counts as they are shown, recorded and charged: no part exceeds its whole.

        Parts that the total adds to prompt and completion, or that are more than their whole, stood beside it. What a total adds without
        a name is output, as Gemini's thoughts are.

        num_tokens     output tokens that were received, which count where the server says none
        num_sequences  of the answer. Servers may count a prompt's cached tokens once for each, so that more than the prompt's are no sign
        """
        prompt, completion, reasoning, parts = self.prompt, self.completion, self.reasoning, self.cached + self.written
        if not prompt and self.total:
            prompt = max(0, self.total - (completion or num_tokens))
        else:
            more = self.total - prompt - completion
            if self.is_beside or (parts > prompt and num_sequences == 1) or (more in (parts, parts + reasoning) and more != reasoning):
                prompt += parts
        if (more := self.total - prompt - completion) > 0:
            reasoning = reasoning or (more if completion else 0)
            completion += more
        elif reasoning > completion and not self.total:
            completion += reasoning
        completion = completion or num_tokens
        return TokenUsage(prompt, completion, min(self.cached, prompt), min(reasoning, completion))
