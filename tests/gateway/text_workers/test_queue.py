"""Tests the queue of text jobs: bounded, fair between tenants, and equal to its reference implementation after any sequence of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.errors import Overloaded
from headrace.gateway.text_workers.queue import JobQueue, QueuedJob

pytestmark = pytest.mark.pure

MAX_JOBS, MAX_BYTES = 12, 100


def job(number: int, tenant: str = "a", num_bytes: int = 1, *, is_heavy: bool = False) -> QueuedJob[int]:
    return QueuedJob(number, tenant, num_bytes, is_heavy)


def drained(queue: JobQueue[int]) -> list[int]:
    found: list[int] = []
    while (popped := queue.pop(may_be_heavy=True)) is not None:
        found.append(popped.job)
    return found


def test_tenants_take_turns_and_each_keeps_its_order() -> None:
    queue: JobQueue[int] = JobQueue(max_jobs=100, max_bytes=100)
    for number in range(6):
        queue.push(job(number, "flood"))
    queue.push(job(10, "other"))
    queue.push(job(11, "other"))
    assert drained(queue) == [0, 10, 1, 11, 2, 3, 4, 5]


def test_heavy_and_light_jobs_take_turns_unless_heavy_ones_must_wait() -> None:
    queue: JobQueue[int] = JobQueue(max_jobs=100, max_bytes=100)
    for number in range(4):
        queue.push(job(number, is_heavy=True))
        queue.push(job(10 + number))
    assert [popped.job for _ in range(2) if (popped := queue.pop(may_be_heavy=False))] == [10, 11]
    assert drained(queue) == [0, 12, 1, 13, 2, 3]


def test_a_flood_is_refused_to_the_one_who_makes_it() -> None:
    """One tenant's prompts filled the queue, and everybody else's got 429."""
    queue: JobQueue[int] = JobQueue(max_jobs=10, max_bytes=1000)
    flood = [job(number, "flood") for number in range(10)]
    for one in flood:
        queue.push(one)
    with pytest.raises(Overloaded):
        queue.push(job(99, "flood"))
    assert queue.push(job(20, "other")) == [flood[9]]
    assert queue.push(job(21, "other")) == [flood[8]]
    queue.check()
    assert drained(queue) == [0, 20, 1, 21, *range(2, 8)]


def test_room_in_bytes_is_made_by_the_tenant_with_most_bytes_and_only_as_far_as_it_has_more() -> None:
    queue: JobQueue[int] = JobQueue(max_jobs=100, max_bytes=100)
    heavy = [job(number, "flood", 30, is_heavy=True) for number in range(3)]
    for one in heavy:
        queue.push(one)
    assert queue.push(job(10, "other", 20, is_heavy=True)) == [heavy[2]]
    with pytest.raises(Overloaded):
        queue.push(job(11, "third", 90, is_heavy=True))
    queue.check()
    assert sorted(drained(queue)) == [0, 1, 10]


def test_megabytes_that_wait_refuse_no_short_prompt() -> None:
    """Without keys all are one tenant, and 64 long prompts had short ones answered with 429."""
    queue: JobQueue[int] = JobQueue(max_jobs=100, max_bytes=100)
    for number in range(3):
        queue.push(job(number, num_bytes=30, is_heavy=True))
    with pytest.raises(Overloaded):
        queue.push(job(3, num_bytes=30, is_heavy=True))
    for number in range(20):
        assert queue.push(job(10 + number)) == []
    queue.check()


def test_a_lowered_bound_takes_out_no_waiting_job_but_the_one_that_makes_room() -> None:
    """A reload lowered the bound from 1000 to 10 while 900 jobs waited, and the next tenant's first job had 891 of them refused."""
    queue: JobQueue[int] = JobQueue(max_jobs=1000, max_bytes=1000)
    flood = [job(number, "flood") for number in range(900)]
    for one in flood:
        queue.push(one)
    queue.change(10)
    queue.check()
    with pytest.raises(Overloaded):
        queue.push(job(900, "flood"))
    assert queue.push(job(901, "other")) == [flood[899]]
    queue.check()
    assert len(drained(queue)) == 900


class QueueMachine(RuleBasedStateMachine):
    """Beside a list: what was pushed and is not out in any of three ways must be there, and every tenant's light jobs leave in order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: JobQueue[int] = JobQueue(max_jobs=MAX_JOBS, max_bytes=MAX_BYTES)
        self.waiting: list[QueuedJob[int]] = []
        self.number = 0
        self.max_jobs = MAX_JOBS

    @rule(max_jobs=st.integers(1, MAX_JOBS))
    def change(self, max_jobs: int) -> None:
        self.max_jobs = max_jobs
        self.queue.change(max_jobs)

    @rule(tenant=st.sampled_from("abc"), num_bytes=st.integers(1, 60), is_heavy=st.booleans())
    def push(self, tenant: str, num_bytes: int, is_heavy: bool) -> None:
        self.number += 1
        new = job(self.number, tenant, num_bytes, is_heavy=is_heavy)
        before = list(self.waiting)
        try:
            shed = self.queue.push(new)
        except Overloaded:
            kind = [one for one in before if one.is_heavy == is_heavy]
            assert len(kind) >= self.max_jobs or sum(one.num_bytes for one in kind) + num_bytes > MAX_BYTES
            return
        assert len({one.tenant for one in shed}) <= 1
        assert all(one.tenant != tenant and one.is_heavy == is_heavy for one in shed)
        self.waiting = [one for one in before if one not in shed] + [new]
        num_before, num_after = (sum(one.is_heavy == is_heavy for one in jobs) for jobs in (before, self.waiting))
        assert num_after <= max(self.max_jobs, num_before)
        num_bytes_before = sum(one.num_bytes for one in before if one.is_heavy == is_heavy)
        assert len(shed) <= 1 or num_bytes_before + num_bytes - sum(one.num_bytes for one in shed[:-1]) > MAX_BYTES, "as few as needed"

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.waiting))
        self.queue.remove(one)
        self.waiting.remove(one)

    @rule(may_be_heavy=st.booleans())
    def pop(self, may_be_heavy: bool) -> None:
        popped = self.queue.pop(may_be_heavy=may_be_heavy)
        allowed = [one for one in self.waiting if may_be_heavy or not one.is_heavy]
        if popped is None:
            assert not allowed
            return
        mine = [one for one in allowed if (one.tenant, one.is_heavy) == (popped.tenant, popped.is_heavy)]
        assert popped is mine[0]
        self.waiting.remove(popped)

    @invariant()
    def holds(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.waiting)
        assert self.queue.num_bytes == sum(one.num_bytes for one in self.waiting)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
