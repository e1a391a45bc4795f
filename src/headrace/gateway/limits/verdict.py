"""What a client learns about its limits: the refusal by name, and OpenAI's x-ratelimit headers. Pure but for `limits_now`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.core.money import NANOS
from headrace.gateway.http.errors import QuotaExhausted, RateLimitExceeded
from headrace.gateway.limits.rules import LimitRule
from headrace.gateway.limits.store import LimitStore
from headrace.policy.limits.book import Claim, ClaimReading, TakeResult, is_over
from headrace.policy.limits.counters import Moment, Unit, Window, reset_ms, retry_after_s, used_of

HeaderNames = tuple[bytes, bytes, bytes]
"""Names of the headers of a limit's number, of what remains of it, and of when it is reset."""

_OF_REQUESTS = (b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests", b"x-ratelimit-reset-requests")
_OF_TOKENS = (b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens", b"x-ratelimit-reset-tokens")

SHOWN = {Unit.REQUESTS: _OF_REQUESTS, Unit.INPUT: _OF_TOKENS, Unit.OUTPUT: _OF_TOKENS, Unit.TOKENS: _OF_TOKENS}
"""Unit of a limit -> the headers that may be about it. They are about the one of which the smallest part is left."""

DEPLOYMENT_RETRY_S = 60.0
"""Most seconds after which a client is asked to send a request beyond the deployment's budget again. Running requests of other tenants may
give back what they reserved long before the day or the month ends; the counter does not show how much of it is reserved."""

_OF_DEPLOYMENT = "The {} has no room for this request now. Try again later, or with a smaller max_tokens."

_WINDOWS = {Window.OPEN: "at once", Window.MINUTE: "in any 60 s", Window.DAY: "in a UTC day", Window.MONTH: "in a UTC month"}


class LimitState(NamedTuple):
    """One limit after a `take` at `now`. used: what counts then, this request's amount included"""

    rule: LimitRule
    used: int
    now: Moment

    @property
    def remaining(self) -> int:
        return max(0, self.rule.number - self.used)

    @property
    def reset_ms(self) -> int:
        return reset_ms(self.rule.window, self.now) if self.used else 0


def states(rules: Sequence[LimitRule], claims: Sequence[Claim], result: TakeResult) -> list[LimitState]:
    found = []
    for rule, claim, reading in zip(rules, claims, result.readings, strict=True):
        used = used_of(rule.window, result.now, *reading) + ((claim.amount or 0) if result.is_admitted else 0)
        found.append(LimitState(rule, used, result.now))
    return found


async def limits_now(store: LimitStore, rules: Sequence[LimitRule]) -> list[LimitState]:
    """What is used of these limits, without taking anything. Raises StoreFailed."""
    claims = [rule.claim(None) for rule in rules]
    return states(rules, claims, await store.take(None, claims)) if rules else []


def refusal(rules: Sequence[LimitRule], claims: Sequence[Claim], result: TakeResult) -> RateLimitExceeded | QuotaExhausted:
    """The error of a refused `take`: about the exceeded limit with the longest retry time."""
    over = [
        (_retry_s(claim, reading, result.now), rule, claim.amount or 0, used_of(rule.window, result.now, *reading))
        for rule, claim, reading in zip(rules, claims, result.readings, strict=True)
        if is_over(claim, reading, result.now)
    ]
    wait_s, rule, amount, used = max(over, key=lambda one: one[0])
    if rule.is_of_deployment:
        return RateLimitExceeded(_OF_DEPLOYMENT.format(rule.name), limit=rule.label, retry_after_s=min(wait_s, DEPLOYMENT_RETRY_S))
    kind = QuotaExhausted if rule.is_quota else RateLimitExceeded
    return kind(f"{_sentence(rule, amount, used)} {_remedy(rule, amount, wait_s)}", limit=rule.label, retry_after_s=wait_s)


def headers(found: Iterable[LimitState]) -> list[tuple[bytes, bytes]]:
    """The headers of what `found` has limits for."""
    tightest: dict[HeaderNames, tuple[float, LimitState]] = {}
    for state in found:
        if (names := SHOWN.get(state.rule.unit)) is not None:
            part = state.remaining / state.rule.number
            if names not in tightest or part < tightest[names][0]:
                tightest[names] = part, state
    made = []
    for (limit, remaining, reset), (_, state) in sorted(tightest.items()):
        made += [
            (limit, b"%d" % state.rule.number),
            (remaining, b"%d" % state.remaining),
            (reset, duration(state.reset_ms).encode()),
        ]
    return made


def duration(ms: int) -> str:
    """As OpenAI writes it: 120ms, 1.5s, 6m0s, 23h59m59s."""
    if ms < 1000:
        return f"{ms}ms"
    seconds, rest_ms = divmod(ms, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    larger = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{larger}{seconds}{f'.{rest_ms:03}'.rstrip('0') if rest_ms and not larger else ''}s"


def _retry_s(claim: Claim, reading: ClaimReading, now: Moment) -> float:
    return retry_after_s(claim.window, now, current=reading.current, previous=reading.previous, allowed=claim.limit - (claim.amount or 0))


def _sentence(rule: LimitRule, amount: int, used: int) -> str:
    number, before, wanted = (_shown(rule, value) for value in (rule.number, used, amount))
    return f"The limit {rule.name} is {number} {_WINDOWS[rule.window]}; {before} is used or reserved, and this request needs {wanted}."


def _remedy(rule: LimitRule, amount: int, wait_s: float) -> str:
    if amount <= rule.number:
        return f"Try again in {duration(round(1000 * wait_s))}."
    return "It asks for more than the limit allows at all: send less text, or a smaller max_tokens."


def _shown(rule: LimitRule, value: int) -> str:
    if rule.unit is not Unit.NANOS:
        return str(value)
    return f"{value // NANOS}.{value % NANOS:09}".rstrip("0").rstrip(".")
