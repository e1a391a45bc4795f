"""The queue of jobs that wait for a text worker: bounded in number and bytes, fair between tenants; any job can be removed.

Light jobs and heavy jobs wait in two rings of tenants, each with its own bounds. A ring serves its tenants round robin, one job each; `pop`
alternates between the rings. At a bound the newest jobs of the tenant that holds most are evicted for another tenant's job, so a flood
is refused to the tenant that makes it. Pure: no clock, no event loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.core.errors import Overloaded

T = TypeVar("T")

FULL = "Too many prompts wait to be read."


@dataclass(eq=False, frozen=True, slots=True)
class QueuedJob(Generic[T]):
    """One waiting job. Compared by identity."""

    item: T
    tenant: str
    num_bytes: int
    is_heavy: bool


@dataclass(slots=True)
class _Held:
    """Jobs and bytes that one tenant has waiting."""

    num_entries: int = 0
    num_bytes: int = 0


class JobQueue(Generic[T]):
    """Light jobs and heavy jobs, each kind within the bounds: waiting megabytes never cause short prompts to be refused."""

    def __init__(self, *, max_entries: int, max_bytes: int) -> None:
        """max_entries, max_bytes: bounds of each of the two kinds"""
        self._light: TenantRing[T] = TenantRing(max_entries=max_entries, max_bytes=max_bytes)
        self._heavy: TenantRing[T] = TenantRing(max_entries=max_entries, max_bytes=max_bytes)
        self._is_heavy_next = False

    def __len__(self) -> int:
        return len(self._light) + len(self._heavy)

    @property
    def num_bytes(self) -> int:
        return self._light.num_bytes + self._heavy.num_bytes

    def push(self, entry: QueuedJob[T]) -> list[QueuedJob[T]]:
        """See `TenantRing.push`."""
        return self._ring(is_heavy=entry.is_heavy).push(entry)

    def pop(self, *, may_be_heavy: bool) -> QueuedJob[T] | None:
        """The next job, alternating between the kinds where both have one."""
        for is_heavy in (self._is_heavy_next, not self._is_heavy_next):
            if (may_be_heavy or not is_heavy) and (entry := self._ring(is_heavy=is_heavy).pop()) is not None:
                self._is_heavy_next = not is_heavy
                return entry
        return None

    def remove(self, entry: QueuedJob[T]) -> None:
        """Take out a job that is in the queue."""
        self._ring(is_heavy=entry.is_heavy).remove(entry)

    def check(self) -> None:
        self._light.check()
        self._heavy.check()

    def _ring(self, *, is_heavy: bool) -> TenantRing[T]:
        return self._heavy if is_heavy else self._light


class TenantRing(Generic[T]):
    """Jobs of one kind, tenants round robin. num_bytes: of all jobs; `len` is their number."""

    def __init__(self, *, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._waiting: dict[str, deque[QueuedJob[T]]] = {}
        self._held: dict[str, _Held] = {}
        self._num_entries = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._num_entries

    def push(self, entry: QueuedJob[T]) -> list[QueuedJob[T]]:
        """Add a job. Returns the jobs that were evicted for it.

        Raises: Overloaded at the bound, where no other tenant holds more than this one would.
        """
        evicted = self._to_evict(entry)
        for other in evicted:
            self.remove(other)
        self._waiting.setdefault(entry.tenant, deque()).append(entry)
        self._count(entry, +1)
        return evicted

    def pop(self) -> QueuedJob[T] | None:
        """The oldest job of the tenant whose turn it is."""
        if not self._waiting:
            return None
        tenant = next(iter(self._waiting))
        waiting = self._waiting.pop(tenant)
        entry = waiting.popleft()
        if waiting:
            self._waiting[tenant] = waiting  # its next turn comes after all other tenants
        self._count(entry, -1)
        return entry

    def remove(self, entry: QueuedJob[T]) -> None:
        self._waiting[entry.tenant].remove(entry)
        if not self._waiting[entry.tenant]:
            del self._waiting[entry.tenant]
        self._count(entry, -1)

    def check(self) -> None:
        """Every count is the sum of what is there, and nothing empty is kept."""
        entries = [entry for waiting in self._waiting.values() for entry in waiting]
        assert all(self._waiting.values()), "an empty turn"
        assert len(entries) == self._num_entries <= self._max_entries
        assert sum(entry.num_bytes for entry in entries) == self.num_bytes <= self._max_bytes
        by_tenant: dict[str, _Held] = {}
        for entry in entries:
            held = by_tenant.setdefault(entry.tenant, _Held())
            held.num_entries += 1
            held.num_bytes += entry.num_bytes
        assert by_tenant == self._held

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _count(self, entry: QueuedJob[T], sign: int) -> None:
        held = self._held.setdefault(entry.tenant, _Held())
        held.num_entries += sign
        held.num_bytes += sign * entry.num_bytes
        if held.num_entries == 0:
            del self._held[entry.tenant]
        self._num_entries += sign
        self.num_bytes += sign * entry.num_bytes

    def _to_evict(self, entry: QueuedJob[T]) -> list[QueuedJob[T]]:
        """The newest jobs of the tenant that holds most, as few as needed for `entry`. Raises Overloaded; changes nothing."""
        num_entries, num_bytes = self._num_entries + 1 - self._max_entries, self.num_bytes + entry.num_bytes - self._max_bytes
        if num_entries <= 0 and num_bytes <= 0:
            return []
        own = self._held.get(entry.tenant, _Held())
        allowed = self._share(own.num_entries + 1, own.num_bytes + entry.num_bytes)
        victim = max(self._held, key=lambda tenant: self._share_of(self._held[tenant]), default=entry.tenant)
        if victim == entry.tenant:
            raise Overloaded(FULL)
        left = self._held[victim]
        left = _Held(left.num_entries, left.num_bytes)
        evicted: list[QueuedJob[T]] = []
        waiting = list(self._waiting[victim])
        while (num_entries > 0 or num_bytes > 0) and self._share_of(left) > allowed:
            other = waiting.pop()
            evicted.append(other)
            left.num_entries, left.num_bytes = left.num_entries - 1, left.num_bytes - other.num_bytes
            num_entries, num_bytes = num_entries - 1, num_bytes - other.num_bytes
        if num_entries > 0 or num_bytes > 0:
            raise Overloaded(FULL)
        return evicted

    def _share_of(self, held: _Held) -> float:
        return self._share(held.num_entries, held.num_bytes)

    def _share(self, num_entries: int, num_bytes: int) -> float:
        """Share of the bounds that these jobs use: the larger of the two."""
        return max(num_entries / self._max_entries, num_bytes / self._max_bytes)
