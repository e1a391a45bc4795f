"""What one request may use at most by the numbers of its limits, before anything is counted: where an answer without `max_tokens` ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.policy.limits.price import FREE, PICOS_PER_NANO, Price, picos_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCeiling:
    """None: without this bound.

    tier            name of the tier, for refusals
    context_tokens  prompt and output of one sequence
    output_tokens   of all sequences: the tightest number of a limit on output
    total_tokens    prompts, and output of all sequences: the tightest number of a limit on both
    nanos           cost: the tightest budget
    """

    tier: str = ""
    context_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    nanos: int | None = None
    price: Price = FREE

    def max_tokens(self, prompt_tokens: int, num_sequences: int) -> int | None:
        """The most that each sequence may give, at least 1, so that what nothing is left for is refused by the limit's name."""
        bounds = list(self._bounds(prompt_tokens))
        return max(1, min(bounds) // num_sequences) if bounds else None

    def deciding(self, *, has_max_tokens: bool) -> RequestCeiling:
        """What of it an answer's length depends on: with the client's `max_tokens`, the context alone."""
        if has_max_tokens:
            return RequestCeiling(tier=self.tier, context_tokens=self.context_tokens)
        return self if self.nanos is not None else replace(self, price=FREE)

    def _bounds(self, prompt_tokens: int) -> Iterator[int]:
        """On the output of all sequences together."""
        if self.output_tokens is not None:
            yield self.output_tokens
        if self.total_tokens is not None:
            yield self.total_tokens - prompt_tokens
        if self.nanos is not None and (output_picos := picos_per_token(self.price.output)):
            left = self.nanos - self.price.cost_nanos(prompt_tokens=prompt_tokens, cached_tokens=0, completion_tokens=0)
            yield left * PICOS_PER_NANO // output_picos


UNBOUNDED = RequestCeiling()
