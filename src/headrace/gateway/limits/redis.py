"""Keeps the book of limits in Redis (6.2 or later) or Valkey, by the server's time. redis.lua beside this module does what
`policy.limits.book` does; a call runs whole or not at all.

    limits:used:COUNTER     bucket -> used
    limits:held:GATEWAY     reservation -> its beat and what it has taken, as JSON
    limits:saved:GATEWAY    reservation -> what to charge when the gateway dies
    limits:gateways         gateway -> beat
    limits:late             reservation -> what it has taken, of gateways that were found dead
    limits:late_at          the same by time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.gateway.stores.redis import PREFIX, RedisCalls, read_script
from headrace.policy.limits.book import (
    LATE_MS,
    MAX_LATE_REMOVED,
    NO_CHARGES,
    UNNAMED_BEATS,
    Charges,
    Claim,
    ClaimReading,
    Holder,
    TakeResult,
)
from headrace.policy.limits.counters import KEPT_BUCKETS, MINUTE_MS, Amounts, Moment

KEYS = f"{PREFIX}limits:"

IDLE_MINUTE_MS = 3 * MINUTE_MS
"""All buckets of a counter that was not used for this long lie behind."""


class RedisLimits(RedisCalls):
    is_in_order = False
    """Calls at the same time are on several connections."""

    def __init__(self, client: Any, *, now: Moment | None = None) -> None:
        """now: instead of the server's time, for tests"""
        super().__init__(client)
        self.now = now
        self._script = client.register_script(read_script(__file__))

    async def _call(self, *words: object) -> Any:
        return await self.answer(self._script(keys=[KEYS], args=words))

    async def take(self, holder: Holder | None, claims: Sequence[Claim], charges: Charges = NO_CHARGES) -> TakeResult:
        held = ("", "", 0, "") if holder is None else (holder.id, holder.gateway, holder.beat, _joined(holder.saved))
        ended = (charges.gateway, len(charges.used), *_pairs(charges.used))
        wanted = [word for claim in claims for word in _words(claim)]
        answer = await self._call("take", *self._times(), KEPT_BUCKETS, IDLE_MINUTE_MS, *held, *ended, *wanted)
        is_admitted, steady_ms, unix_ms, *counts = map(int, answer)
        readings = tuple(map(ClaimReading, counts[::2], counts[1::2]))
        return TakeResult(bool(is_admitted), Moment(steady_ms, unix_ms), readings)

    async def charge(self, charges: Charges) -> None:
        await self._call("charge", charges.gateway, *_pairs(charges.used))

    async def renew(self, gateway: str, beat: int, saved: Mapping[str, Amounts]) -> dict[str, int]:
        rules = UNNAMED_BEATS, LATE_MS, MAX_LATE_REMOVED, _joined(Amounts(requests=1))
        answer = await self._call("renew", self._times()[0], gateway, beat, *rules, *_pairs(saved))
        return {name.decode(): int(value) for name, value in zip(answer[::2], answer[1::2], strict=True)}

    async def expire(self, gateway: str, beat: int) -> int:
        return int(await self._call("expire", self._times()[0], gateway, beat))

    def _times(self) -> tuple[int | str, int | str]:
        return ("", "") if self.now is None else self.now


def _joined(amounts: Amounts) -> str:
    return ",".join(map(str, amounts))


def _pairs(amounts: Mapping[str, Amounts]) -> Iterator[str]:
    for reservation_id, value in amounts.items():
        yield reservation_id
        yield _joined(value)


def _words(claim: Claim) -> Iterator[str | int]:
    yield from (claim.counter, claim.window.value, int(claim.unit), claim.limit)
    yield "" if claim.amount is None else claim.amount
