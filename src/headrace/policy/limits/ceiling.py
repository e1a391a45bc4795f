"""Computes the most that one request may use under its limits, before anything is counted. An answer without `max_tokens` ends there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.policy.limits.price import FREE, PICOS_PER_NANO, Price, picos_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCeiling:
    """The most that one request may use. None in a field: no such bound.

    tier            name of the tier, for refusals
    context_tokens  prompt and output of one sequence
    output_tokens   output of all sequences together: the lowest limit on output
    total_tokens    prompt, and output of all sequences together: the lowest limit on both
    nanos           cost in nano-units of the currency: the lowest budget
    """

    tier: str = ""
    context_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    nanos: int | None = None
    price: Price = FREE

    def max_tokens(self, prompt_tokens: int, num_sequences: int) -> int | None:
        """The most output tokens of each sequence; None without a bound. At least 1: a request for which nothing is left is refused by the
        limit."""
        bounds = list(self._bounds(prompt_tokens))
        return max(1, min(bounds) // num_sequences) if bounds else None

    def deciding(self, *, has_max_tokens: bool) -> RequestCeiling:
        """The bounds on which an answer's length depends: the context alone if the client sent `max_tokens`, else all."""
        if has_max_tokens:
            return RequestCeiling(tier=self.tier, context_tokens=self.context_tokens)
        return self if self.nanos is not None else replace(self, price=FREE)

    def _bounds(self, prompt_tokens: int) -> Iterator[int]:
        """The bounds on the output of all sequences together, in tokens."""
        if self.output_tokens is not None:
            yield self.output_tokens
        if self.total_tokens is not None:
            yield self.total_tokens - prompt_tokens
        if self.nanos is not None and (output_picos := picos_per_token(self.price.output)):
            left = self.nanos - self.price.cost_nanos(prompt_tokens=prompt_tokens, cached_tokens=0, completion_tokens=0)
            yield left * PICOS_PER_NANO // output_picos


UNBOUNDED = RequestCeiling()
