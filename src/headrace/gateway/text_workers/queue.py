"""Queues the jobs that wait for a text worker: bounded in number and bytes, and fair between tenants. Pure.

Light jobs and heavy jobs wait apart, each with bounds of their own and its tenants round robin. At a bound the newest jobs of the tenant
that uses most are shed, so a flood is refused to the tenant that makes it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.core.errors import TextQueueFull

T = TypeVar("T")

FULL = "Too many requests wait for a text worker."


@dataclass(eq=False, frozen=True, slots=True)
class QueuedJob(Generic[T]):
    """Compared by identity."""

    job: T
    tenant: str
    num_bytes: int
    is_heavy: bool


@dataclass(slots=True)
class _TenantUsage:
    num_jobs: int = 0
    num_bytes: int = 0


class JobQueue(Generic[T]):
    """The waiting jobs of one gateway: light and heavy ones, each kind bounded. A backlog of heavy jobs never makes the queue refuse light
    ones.
    """

    def __init__(self, *, max_jobs: int, max_bytes: int) -> None:
        """max_jobs, max_bytes: bounds of each of the two kinds"""
        self._light: RoundRobinQueue[T] = RoundRobinQueue(max_jobs=max_jobs, max_bytes=max_bytes)
        self._heavy: RoundRobinQueue[T] = RoundRobinQueue(max_jobs=max_jobs, max_bytes=max_bytes)
        self._is_heavy_next = False

    def __len__(self) -> int:
        return len(self._light) + len(self._heavy)

    def change(self, max_jobs: int) -> None:
        """A lower bound takes out no job that waits."""
        self._light.change(max_jobs)
        self._heavy.change(max_jobs)

    @property
    def num_bytes(self) -> int:
        return self._light.num_bytes + self._heavy.num_bytes

    def push(self, job: QueuedJob[T]) -> list[QueuedJob[T]]:
        return self._kind(is_heavy=job.is_heavy).push(job)

    def pop(self, *, may_be_heavy: bool) -> QueuedJob[T] | None:
        """Alternates between the kinds where both have a job."""
        for is_heavy in (self._is_heavy_next, not self._is_heavy_next):
            if (may_be_heavy or not is_heavy) and (job := self._kind(is_heavy=is_heavy).pop()) is not None:
                self._is_heavy_next = not is_heavy
                return job
        return None

    def remove(self, job: QueuedJob[T]) -> None:
        self._kind(is_heavy=job.is_heavy).remove(job)

    def check(self) -> None:
        self._light.check()
        self._heavy.check()

    def _kind(self, *, is_heavy: bool) -> RoundRobinQueue[T]:
        return self._heavy if is_heavy else self._light


class RoundRobinQueue(Generic[T]):
    """The waiting jobs of one kind, taken from the tenants in turn."""

    def __init__(self, *, max_jobs: int, max_bytes: int) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._num_at_change = 0
        self._waiting: dict[str, deque[QueuedJob[T]]] = {}
        self._usage: dict[str, _TenantUsage] = {}
        self._num_jobs = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._num_jobs

    def change(self, max_jobs: int) -> None:
        self._max_jobs, self._num_at_change = max_jobs, self._num_jobs

    def push(self, job: QueuedJob[T]) -> list[QueuedJob[T]]:
        """Returns the jobs that were shed for it, as few as make room for it alone.

        Raises Overloaded where the largest tenant cannot make room without falling below the share that this tenant would have.
        """
        shed = self._to_shed(job)
        for other in shed:
            self.remove(other)
        self._waiting.setdefault(job.tenant, deque()).append(job)
        self._count(job, +1)
        return shed

    def pop(self) -> QueuedJob[T] | None:
        if not self._waiting:
            return None
        tenant = next(iter(self._waiting))
        waiting = self._waiting.pop(tenant)
        job = waiting.popleft()
        if waiting:
            self._waiting[tenant] = waiting  # the tenant's next turn comes after all other tenants
        self._count(job, -1)
        return job

    def remove(self, job: QueuedJob[T]) -> None:
        self._waiting[job.tenant].remove(job)
        if not self._waiting[job.tenant]:
            del self._waiting[job.tenant]
        self._count(job, -1)

    def check(self) -> None:
        jobs = [job for waiting in self._waiting.values() for job in waiting]
        assert all(self._waiting.values()), "an empty turn"
        assert len(jobs) == self._num_jobs <= max(self._max_jobs, self._num_at_change)
        assert sum(job.num_bytes for job in jobs) == self.num_bytes <= self._max_bytes
        by_tenant: dict[str, _TenantUsage] = {}
        for job in jobs:
            usage = by_tenant.setdefault(job.tenant, _TenantUsage())
            usage.num_jobs += 1
            usage.num_bytes += job.num_bytes
        assert by_tenant == self._usage

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _count(self, job: QueuedJob[T], sign: int) -> None:
        usage = self._usage.setdefault(job.tenant, _TenantUsage())
        usage.num_jobs += sign
        usage.num_bytes += sign * job.num_bytes
        if usage.num_jobs == 0:
            del self._usage[job.tenant]
        self._num_jobs += sign
        self.num_bytes += sign * job.num_bytes

    def _to_shed(self, job: QueuedJob[T]) -> list[QueuedJob[T]]:
        """Raises TextQueueFull; changes nothing."""
        excess_jobs = int(self._num_jobs >= self._max_jobs)  # also above a lowered bound: for `job` alone
        excess_bytes = self.num_bytes + job.num_bytes - self._max_bytes
        if excess_jobs <= 0 and excess_bytes <= 0:
            return []
        own = self._usage.get(job.tenant, _TenantUsage())
        newcomer_share = self._dominant_share(own.num_jobs + 1, own.num_bytes + job.num_bytes)
        victim = max(self._usage, key=lambda tenant: self._dominant_share_of(self._usage[tenant]), default=job.tenant)
        if victim == job.tenant:
            raise TextQueueFull(FULL)
        remaining = _TenantUsage(self._usage[victim].num_jobs, self._usage[victim].num_bytes)
        shed: list[QueuedJob[T]] = []
        waiting = list(self._waiting[victim])
        while (excess_jobs > 0 or excess_bytes > 0) and self._dominant_share_of(remaining) > newcomer_share:
            newest = waiting.pop()
            shed.append(newest)
            remaining.num_jobs, remaining.num_bytes = remaining.num_jobs - 1, remaining.num_bytes - newest.num_bytes
            excess_jobs, excess_bytes = excess_jobs - 1, excess_bytes - newest.num_bytes
        if excess_jobs > 0 or excess_bytes > 0:
            raise TextQueueFull(FULL)
        return shed

    def _dominant_share_of(self, usage: _TenantUsage) -> float:
        return self._dominant_share(usage.num_jobs, usage.num_bytes)

    def _dominant_share(self, num_jobs: int, num_bytes: int) -> float:
        """Dominant resource fairness: the larger of the shares of jobs and of bytes."""
        return max(num_jobs / self._max_jobs, num_bytes / self._max_bytes)
