"""Tracks what one generating request has taken of its limits, and what it has used so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.core.errors import Unavailable
from headrace.core.ids import RequestId
from headrace.core.money import NANOS
from headrace.gateway.access.principal import Principal
from headrace.gateway.limits.rules import BEFORE_PARSING, LimitRule, LimitState, amounts_of, ceiling_of, headers, limits_of, refusal, states
from headrace.gateway.stores.store import StoreFailed
from headrace.gateway.upstream.seam import NO_USAGE, Prepared, TokenUsage, added
from headrace.observe.finished_request import LimitUse
from headrace.policy.limits.book import Claim, TakeResult
from headrace.policy.limits.counters import Amounts, Unit
from headrace.policy.limits.price import FREE, Price, RequestCeiling
from headrace.policy.limits.tier import DeploymentBudget

if TYPE_CHECKING:
    from headrace.gateway.limits.limiter import Limiter

FIRST_TAIL_TOKENS = 256
"""Output tokens per sequence that are charged if the gateway dies before it has saved any: more than a second's."""

UNAVAILABLE = "The limits of this key cannot be read now; nothing was used. Try again in a moment."
NOTHING = Amounts(requests=1)


class _LimitsTaken(NamedTuple):
    rules: Sequence[LimitRule]
    claims: Sequence[Claim]
    result: TakeResult


class LimitReservation:
    """At the end of `async with` the request is charged for its use.

    is_held  the store has, or may have, a reservation of this request
    counted  tokens that are charged
    used     the same as amounts of its limits
    saved    amounts to charge if the gateway dies now
    """

    __slots__ = (
        "_first_taken",
        "_is_open_on_failure",
        "_last_completion",
        "_limiter",
        "_limits",
        "_num_sequences",
        "_price",
        "_reserved",
        "_tokens_taken",
        "_uncounted",
        "_usage",
        "counted",
        "is_held",
        "principal",
        "request_id",
        "saved",
        "used",
    )

    def __init__(
        self,
        limiter: Limiter,
        request_id: RequestId,
        principal: Principal,
        *,
        budget: DeploymentBudget,
        is_open_on_failure: bool,
    ) -> None:
        self._limiter, self._is_open_on_failure = limiter, is_open_on_failure
        self.request_id, self.principal = request_id, principal
        self._limits = limits_of(principal, budget)
        self.is_held = False
        self.counted = NO_USAGE
        self.used = self.saved = NOTHING
        self._reserved = self._uncounted = NOTHING
        self._price: Price = FREE
        self._usage: Callable[[], TokenUsage] | None = None
        self._num_sequences = 1
        self._last_completion = 0
        self._first_taken: _LimitsTaken | None = None
        self._tokens_taken: _LimitsTaken | None = None

    async def __aenter__(self) -> LimitReservation:
        """Raises RateLimitExceeded or Unavailable."""
        self._limiter.opened(self)
        try:
            await self.begin()
        except BaseException:
            self._limiter.closed(self)
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._limiter.closed(self)

    def ceiling(self, price: Price) -> RequestCeiling:
        return ceiling_of(self._limits, price)

    async def begin(self) -> None:
        """Raises RateLimitExceeded or Unavailable."""
        limits = self._limits
        if limits.first_rules:
            self.is_held = limits.takes_open
            await self._take(limits.first_rules, limits.first_claims)

    async def reserve(self, price: Price, prepared: Prepared, *, highest: Price) -> None:
        """For what runs next, in place of what did not run. An unbounded output counts as one token.

        price    at which the use is counted
        highest  of the models that may answer: what is reserved

        Raises RateLimitExceeded, QuotaExhausted or Unavailable.
        """
        num_sequences, max_output_tokens = prepared.num_sequences, prepared.max_output_tokens or 1
        max_prompt_tokens = prepared.max_prompt_tokens * prepared.num_prompt_copies
        self._price, self._num_sequences = price, num_sequences
        rules = self._limits.token_rules
        if not rules:
            return
        first_tokens = min(max_output_tokens, FIRST_TAIL_TOKENS * num_sequences)
        wanted = amounts_of(highest, prompt_tokens=max_prompt_tokens, completion_tokens=max_output_tokens)
        first = amounts_of(price, prompt_tokens=max_prompt_tokens, completion_tokens=first_tokens)
        more = Amounts(*[max(0, new - old) for new, old in zip(wanted, self._uncounted, strict=True)])._replace(requests=1)
        self.saved = _sum(self.used, first)
        if more == NOTHING:
            return
        self.is_held = True
        await self._take(rules, [rule.claim(more[rule.unit]) for rule in rules])
        self._reserved, self._uncounted = _sum(self._reserved, more), Amounts(*map(max, wanted, self._uncounted))

    def follow(self, usage: Callable[[], TokenUsage]) -> None:
        self._usage, self._last_completion = usage, 0

    def count(self, usage: TokenUsage | None) -> None:
        """usage None: the stream never began"""
        if usage is not None:
            self.counted, self.used = added(self.counted, usage.charged), _sum(self.used, self._of_usage(usage))
        self._usage, self.saved, self._uncounted = None, self.used, NOTHING

    def save(self) -> Amounts:
        """For a death within the next second: the present usage, and as many tokens again as in the last second."""
        if self._usage is None:
            return self.saved
        usage = self._usage()
        new = usage.completion_tokens - self._last_completion
        self._last_completion = usage.completion_tokens
        tail = new if usage.completion_tokens else FIRST_TAIL_TOKENS * self._num_sequences
        counted = _sum(self.used, self._of_usage(usage))
        with_tail = _sum(self.used, self._of_usage(usage._replace(completion_tokens=usage.completion_tokens + tail)))
        bounded = [max(now, min(later, most)) for now, later, most in zip(counted, with_tail, self._reserved, strict=True)]
        self.saved = Amounts(*bounded)
        return self.saved

    def _of_usage(self, usage: TokenUsage) -> Amounts:
        charged = usage.charged
        return amounts_of(
            self._price,
            prompt_tokens=charged.prompt_tokens,
            completion_tokens=charged.completion_tokens,
            cached_tokens=charged.cached_tokens,
        )

    async def _take(self, rules: Sequence[LimitRule], claims: Sequence[Claim]) -> None:
        try:
            result = await self._limiter.take(self, claims)
        except StoreFailed:
            if not self._is_open_on_failure:
                raise Unavailable(UNAVAILABLE, retry_after_s=1.0) from None
            return
        taken = _LimitsTaken(rules, claims, result)
        if rules is self._limits.token_rules:
            self._tokens_taken = taken
        else:
            self._first_taken = taken
        if not result.is_admitted:
            raise refusal(rules, claims, result)

    def headers(self) -> list[tuple[bytes, bytes]]:
        return headers(self._states())

    def limits_used(self) -> tuple[LimitUse, ...]:
        """Without the deployment's: a tenant must not see what others used of it."""
        return tuple([_use(state) for state in self._states() if not state.rule.is_of_deployment])

    def _states(self) -> list[LimitState]:
        first, tokens = self._first_taken, self._tokens_taken
        shown = [] if tokens is None else states(*tokens)
        if first is not None:
            shown += [state for state in states(*first) if tokens is None or state.rule.unit in BEFORE_PARSING]
        return shown


def _use(state: LimitState) -> LimitUse:
    rule, unit = state.rule, NANOS if state.rule.unit is Unit.NANOS else 1
    return LimitUse(rule.label, state.used / unit, rule.number / unit)


def _sum(one: Amounts, other: Amounts) -> Amounts:
    """Both are of one request."""
    if one == NOTHING:
        return other
    return Amounts(*map(int.__add__, one, other))._replace(requests=1)
