"""The protocol between gateways and the book of limits that they share: `policy.limits.book` behind calls that may fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from headrace.core.clock import Clock
from headrace.gateway.limits.redis import RedisLimits
from headrace.gateway.limits.sqlite import SqliteLimits
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.stores.redis import open_redis
from headrace.gateway.stores.sqlite_thread import IN_MEMORY
from headrace.gateway.stores.store import StoreProgress
from headrace.policy.limits.book import NO_CHARGES, Charges, Claim, Holder, TakeResult
from headrace.policy.limits.counters import Amounts


class LimitStore(Protocol):
    """Every method raises StoreFailed. A failed or cancelled call may have taken effect or not. is_in_order: a call is made after the
    charges of all earlier calls, also of failed and cancelled ones
    """

    is_in_order: bool
    progress: StoreProgress

    async def take(self, holder: Holder | None, claims: Sequence[Claim], charges: Charges = NO_CHARGES) -> TakeResult:
        """As `LimitBook.take`; the charges are made in the same transaction."""
        ...

    async def charge(self, charges: Charges) -> None:
        """A reservation that is not there was charged before, and is left out."""
        ...

    async def renew(self, gateway: str, beat: int, saved: Mapping[str, Amounts]) -> dict[str, int]: ...
    async def expire(self, gateway: str, beat: int) -> int: ...
    async def close(self) -> None: ...


FILE = "limits.db"


def open_limits(config: StoreConfig, state: str, *, clock: Clock, unix_time: Clock) -> LimitStore:
    """Raises ConfigError."""
    if config.url:
        return RedisLimits(open_redis(config.url, password=config.password()))
    return SqliteLimits(str(Path(state) / FILE) if state else IN_MEMORY, clock=clock, unix_time=unix_time)
