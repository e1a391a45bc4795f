"""Finds the limits that hold for a caller, from its tier, its key and the deployment, and reports them to clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from headrace.core.money import NANOS
from headrace.gateway.access.principal import KeyLimits, Principal
from headrace.gateway.http.errors import QuotaExhausted, RateLimitExceeded
from headrace.gateway.limits.store import LimitStore
from headrace.policy.limits.book import Claim, ClaimReading, TakeResult, is_over
from headrace.policy.limits.counters import Amounts, Moment, Unit, Window, reset_ms, retry_after_ms, used_of
from headrace.policy.limits.price import Price, RequestCeiling
from headrace.policy.limits.tier import NO_BUDGET, DeploymentBudget, Tier

MAX_CALLERS = 4096

MAX_NUMBER = 2**62
"""Fits the whole numbers of every store."""

TIER_LIMITS = (
    ("requests_per_minute", Window.MINUTE, Unit.REQUESTS),
    ("max_concurrent_requests", Window.OPEN, Unit.OPEN),
    ("input_tokens_per_minute", Window.MINUTE, Unit.INPUT),
    ("output_tokens_per_minute", Window.MINUTE, Unit.OUTPUT),
    ("daily_tokens", Window.DAY, Unit.TOKENS),
    ("monthly_tokens", Window.MONTH, Unit.TOKENS),
    ("daily_budget", Window.DAY, Unit.NANOS),
    ("monthly_budget", Window.MONTH, Unit.NANOS),
)

KEY_LIMITS = (
    ("requests_per_minute", Window.MINUTE, Unit.REQUESTS),
    ("monthly_budget", Window.MONTH, Unit.NANOS),
)

DEPLOYMENT_LIMITS = (
    ("daily_budget", Window.DAY, Unit.NANOS),
    ("monthly_budget", Window.MONTH, Unit.NANOS),
)

BEFORE_PARSING = (Unit.REQUESTS, Unit.OPEN)


class Scope(StrEnum):
    TENANT = "tenant"
    USER = "user"
    KEY = "key"
    DEPLOYMENT = "deployment"


@dataclass(frozen=True, slots=True)
class LimitRule:
    """number: tokens, requests or nano-units, inclusive"""

    option: str
    scope: Scope
    counter: str
    window: Window
    unit: Unit
    number: int

    @property
    def name(self) -> str:
        """A key's or the deployment's option has the scope added, since a tenant has one of the same name."""
        return self.option if self.scope in (Scope.TENANT, Scope.USER) else f"{self.option} of this {self.scope}"

    @property
    def label(self) -> str:
        return self.option if self.scope in (Scope.TENANT, Scope.USER) else f"{self.scope}_{self.option}"

    @property
    def is_of_deployment(self) -> bool:
        """A tenant must not see the number or the use of the deployment's limit."""
        return self.scope is Scope.DEPLOYMENT

    @property
    def is_quota(self) -> bool:
        return self.window in (Window.DAY, Window.MONTH)

    def claim(self, amount: int | None) -> Claim:
        return Claim(self.counter, self.window, self.unit, self.number, amount)


def rules_of(principal: Principal, budget: DeploymentBudget = NO_BUDGET) -> tuple[LimitRule, ...]:
    return tuple(_rules(principal.tenant_key, principal.tier, principal.user, principal.key_id, principal.limits, budget))


def deployment_rules(budget: DeploymentBudget) -> tuple[LimitRule, ...]:
    return tuple(_scope_rules(budget, DEPLOYMENT_LIMITS, Scope.DEPLOYMENT, "deployment"))


def _rules(tenant_key: str, tier: Tier, user: str, key_id: str, key_limits: KeyLimits, budget: DeploymentBudget) -> Iterator[LimitRule]:
    yield from _scope_rules(tier, TIER_LIMITS, Scope.TENANT, f"tenant:{tenant_key}")
    if (number := tier.user_requests_per_minute) is not None:
        option = "user_requests_per_minute"
        yield LimitRule(option, Scope.USER, f"user:{tenant_key}:{user}:requests_per_minute", Window.MINUTE, Unit.REQUESTS, number)
    yield from _scope_rules(key_limits, KEY_LIMITS, Scope.KEY, f"key:{key_id}")
    yield from deployment_rules(budget)


def _scope_rules(numbers: object, limits: tuple[tuple[str, Window, Unit], ...], scope: Scope, counters: str) -> Iterator[LimitRule]:
    for option, window, unit in limits:
        if (number := getattr(numbers, option)) is not None:
            counted = round(number * NANOS) if unit is Unit.NANOS else number
            yield LimitRule(option, scope, f"{counters}:{option}", window, unit, min(counted, MAX_NUMBER))


@dataclass(frozen=True, slots=True, eq=False)
class CallerLimits:
    """first_rules: taken or read before the body is read. takes_open: `first_rules` limit open requests, so a reservation must be given
    back.
    """

    first_rules: tuple[LimitRule, ...]
    first_claims: tuple[Claim, ...]
    takes_open: bool
    token_rules: tuple[LimitRule, ...]
    ceiling: RequestCeiling


def limits_of(principal: Principal, budget: DeploymentBudget = NO_BUDGET) -> CallerLimits:
    tier = principal.tier
    return _limits_of(principal.tenant_key, principal.tier_name, tier, principal.user, principal.key_id, principal.limits, budget)


@lru_cache(maxsize=MAX_CALLERS)
def _limits_of(
    tenant_key: str, tier_name: str, tier: Tier, user: str, key_id: str, key_limits: KeyLimits, budget: DeploymentBudget
) -> CallerLimits:
    """The cache's key is everything that the limits depend on."""
    rules = tuple(_rules(tenant_key, tier, user, key_id, key_limits, budget))
    has_first = any(rule.unit in BEFORE_PARSING for rule in rules)
    first = tuple(rule for rule in rules if has_first and not rule.is_quota)
    return CallerLimits(
        first_rules=first,
        first_claims=tuple(rule.claim(1 if rule.unit in BEFORE_PARSING else None) for rule in first),
        takes_open=any(rule.unit is Unit.OPEN for rule in first),
        token_rules=tuple(rule for rule in rules if rule.unit not in BEFORE_PARSING),
        ceiling=RequestCeiling(
            tier=tier_name,
            context_tokens=tier.max_context_tokens,
            output_tokens=_least(rules, Unit.OUTPUT),
            total_tokens=_least(rules, Unit.TOKENS),
            nanos=_least([rule for rule in rules if not rule.is_of_deployment], Unit.NANOS),
        ),
    )


@lru_cache(maxsize=MAX_CALLERS)
def ceiling_of(limits: CallerLimits, price: Price) -> RequestCeiling:
    return replace(limits.ceiling, price=price)


def _least(rules: Sequence[LimitRule], unit: Unit) -> int | None:
    return min((rule.number for rule in rules if rule.unit is unit), default=None)


def amounts_of(price: Price, *, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Amounts:
    cost = price.cost_nanos(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, completion_tokens=completion_tokens)
    return Amounts(
        requests=1,
        open=0,
        input=prompt_tokens,
        output=completion_tokens,
        tokens=prompt_tokens + completion_tokens,
        nanos=min(cost, MAX_NUMBER),
    )


HeaderNames = tuple[bytes, bytes, bytes]
"""Names of the headers of a limit's number, of what remains of it, and of when it is reset."""

_OF_REQUESTS = (b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests", b"x-ratelimit-reset-requests")
_OF_TOKENS = (b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens", b"x-ratelimit-reset-tokens")

SHOWN = {Unit.REQUESTS: _OF_REQUESTS, Unit.INPUT: _OF_TOKENS, Unit.OUTPUT: _OF_TOKENS, Unit.TOKENS: _OF_TOKENS}
"""Headers are about the limit of which the smallest part is left."""

DEPLOYMENT_RETRY_MS = 60_000
"""Running requests of other tenants may give back what they reserved long before the day or the month ends."""

_OF_DEPLOYMENT = "The {} has no room for this request now. Try again later, or with a smaller max_tokens."

_WINDOWS = {Window.OPEN: "at once", Window.MINUTE: "in a sliding minute", Window.DAY: "in a UTC day", Window.MONTH: "in a UTC month"}


class LimitState(NamedTuple):
    """One limit of a caller after a `take`.

    used     includes this request's amount if it was admitted
    wait_ms  milliseconds until the refused request fits, if nothing else is sent; 0: this limit does not refuse it
    """

    rule: LimitRule
    used: int
    now: Moment
    wait_ms: int = 0

    @property
    def remaining(self) -> int:
        return max(0, self.rule.number - self.used)

    @property
    def reset_ms(self) -> int:
        """Until the refused request fits; of a limit that refuses nothing, until all that is used is free again."""
        return self.wait_ms or (reset_ms(self.rule.window, self.now) if self.used else 0)


def states(rules: Sequence[LimitRule], claims: Sequence[Claim], result: TakeResult) -> list[LimitState]:
    limit_states = []
    for rule, claim, reading in zip(rules, claims, result.readings, strict=True):
        used = used_of(rule.window, result.now, *reading) + ((claim.amount or 0) if result.is_admitted else 0)
        is_refused = not result.is_admitted and is_over(claim, reading, result.now)
        limit_states.append(LimitState(rule, used, result.now, _wait_ms(rule, claim, reading, result.now) if is_refused else 0))
    return limit_states


async def limits_now(store: LimitStore, rules: Sequence[LimitRule]) -> list[LimitState]:
    """Raises StoreFailed."""
    claims = [rule.claim(None) for rule in rules]
    return states(rules, claims, await store.take(None, claims)) if rules else []


def refusal(rules: Sequence[LimitRule], claims: Sequence[Claim], result: TakeResult) -> RateLimitExceeded | QuotaExhausted:
    state, claim = max(zip(states(rules, claims, result), claims, strict=True), key=lambda one: one[0].wait_ms)
    rule, amount, wait_s = state.rule, claim.amount or 0, state.wait_ms / 1000
    if rule.is_of_deployment:
        return RateLimitExceeded(_OF_DEPLOYMENT.format(rule.name), limit=rule.label, retry_after_s=wait_s)
    kind = QuotaExhausted if rule.is_quota else RateLimitExceeded
    return kind(f"{_sentence(rule, amount, state.used)} {_remedy(rule, amount, state.wait_ms)}", limit=rule.label, retry_after_s=wait_s)


def headers(limit_states: Iterable[LimitState]) -> list[tuple[bytes, bytes]]:
    tightest: dict[HeaderNames, tuple[tuple[int, float], LimitState]] = {}
    for state in limit_states:
        if (names := SHOWN.get(state.rule.unit)) is not None:
            key = -state.wait_ms, state.remaining / state.rule.number
            if names not in tightest or key < tightest[names][0]:
                tightest[names] = key, state
    made = []
    for (limit, remaining, reset), (_, state) in sorted(tightest.items()):
        made += [
            (limit, b"%d" % state.rule.number),
            (remaining, b"%d" % state.remaining),
            (reset, duration(state.reset_ms).encode()),
        ]
    return made


def duration(ms: int) -> str:
    """As OpenAI writes it, to the millisecond: 120ms, 1.5s, 6m0s, 1m30.951s, 23h59m59s."""
    if ms < 1000:
        return f"{ms}ms"
    seconds, rest_ms = divmod(ms, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    larger = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{larger}{seconds}{f'.{rest_ms:03}'.rstrip('0') if rest_ms else ''}s"


def _wait_ms(rule: LimitRule, claim: Claim, reading: ClaimReading, now: Moment) -> int:
    allowed = claim.limit - (claim.amount or 0)
    wait_ms = retry_after_ms(claim.window, now, current=reading.current, previous=reading.previous, allowed=allowed)
    return min(wait_ms, DEPLOYMENT_RETRY_MS) if rule.is_of_deployment else wait_ms


def _sentence(rule: LimitRule, amount: int, used: int) -> str:
    number, before, wanted = (_shown(rule, value) for value in (rule.number, used, amount))
    return f"The limit {rule.name} is {number} {_WINDOWS[rule.window]}; {before} is used or reserved, and this request needs {wanted}."


def _remedy(rule: LimitRule, amount: int, wait_ms: int) -> str:
    if amount <= rule.number:
        return f"Try again in {duration(wait_ms)}."
    return "It asks for more than the limit allows at all: send less text, or a smaller max_tokens."


def _shown(rule: LimitRule, value: int) -> str:
    if rule.unit is not Unit.NANOS:
        return str(value)
    return f"{value // NANOS}.{value % NANOS:09}".rstrip("0").rstrip(".")
