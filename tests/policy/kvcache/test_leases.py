"""Tests leases, which own blocks beside sequences: no block is handed out that a plan still names or a move still reads or writes."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_kit import FULL
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.hashing import block_hash, chain_root
from headrace.policy.kvcache.leases import Lease, LeaseError, Leases
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.kvcache.pool import BlockPool, StepClock

pytestmark = pytest.mark.pure

ROOT = chain_root(b"k", model_digest=b"", kv_dtype="")


class LeaseMachine(RuleBasedStateMachine):
    """Sequences (a Counter of owners), leases, moves, plans and commits at random.

    The model writes down, per block, the last plan that named it and the moves that name it; whatever `take` gives must be rid of both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps = StepClock()
        self.pool = BlockPool(8, self.steps)
        self.leases = Leases([self.pool])
        self.owners: Counter[int] = Counter()
        self.live: list[Lease] = []
        self.moving: dict[int, int] = {}
        """move id -> block"""
        self.named: dict[int, int] = {}
        """block -> the last plan made while somebody owned it"""
        self.names = 0

    def note_taken(self, block: int) -> None:
        assert self.named.get(block, 0) <= self.steps.last_committed, "an uncommitted plan names it"
        assert block not in self.moving.values(), "a move names it"
        assert not self.owners[block]
        assert not any(block in lease.blocks for lease in self.live), "a lease owns it"

    @precondition(lambda self: self.pool.num_available > 0)
    @rule(registered=st.booleans())
    def take(self, registered: bool) -> None:
        block = self.pool.take()
        self.note_taken(block)
        self.owners[block] = 1
        if registered:
            self.names += 1
            self.pool.register(block, block_hash(ROOT, [self.names]))

    @rule(back=st.integers(0, 6))
    def hit(self, back: int) -> None:
        block = self.pool.find(block_hash(ROOT, [self.names - back]))
        if block is not None:
            self.pool.hold(block)
            self.owners[block] += 1

    @precondition(lambda self: +self.owners)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.owners)))
        self.pool.drop(block)
        self.owners[block] -= 1

    @rule(back=st.integers(0, 6), limit=st.integers(1, 6))
    def lease_known(self, back: int, limit: int) -> None:
        block = self.pool.find(block_hash(ROOT, [self.names - back]))
        if block is not None:
            self.live.append(self.leases.lease(0, [block], "a test", self.steps.now + limit))

    @rule(count=st.integers(1, 3), limit=st.integers(1, 6))
    def lease_fresh(self, count: int, limit: int) -> None:
        if count <= self.pool.num_available:
            lease = self.leases.lease_fresh(0, count, "a test", self.steps.now + limit)
            for block in lease.blocks:
                self.note_taken(block)
            self.live.append(lease)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def begin_move(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.live))
        self.moving[self.leases.begin_move(lease)] = data.draw(st.sampled_from(lease.blocks))

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def end_moves(self, data: st.DataObject) -> None:
        done = data.draw(st.lists(st.sampled_from(sorted(self.moving)), unique=True))
        for move_id in done:
            del self.moving[move_id]
        for lease in self.leases.moves_done(done):
            self.leases.release(lease)
            self.live.remove(lease)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.live))
        if lease.moves:
            with pytest.raises(LeaseError, match="in flight"):
                self.leases.release(lease)
            return
        self.leases.release(lease)
        self.live.remove(lease)
        with pytest.raises(LeaseError, match="is over"):
            self.leases.release(lease)

    @rule(seconds=st.integers(0, 4))
    def wait(self, seconds: int) -> None:
        self.steps.now += seconds
        self.leases.expire(self.steps.now)
        late = [lease for lease in self.live if lease.deadline <= self.steps.now]
        assert all(lease.is_overdue == bool(lease.moves) for lease in late)
        self.live = [lease for lease in self.live if lease not in late or lease.moves]
        assert self.leases.num_overdue_blocks(0) == sum(len(lease.blocks) for lease in late if lease.moves)

    @rule()
    def plan(self) -> None:
        self.steps.last_planned += 1
        for block in [*(+self.owners), *(block for lease in self.live for block in lease.blocks)]:
            self.named[block] = self.steps.last_planned

    @rule()
    def commit(self) -> None:
        if self.steps.last_committed < self.steps.last_planned:
            self.steps.last_committed += 1
            self.pool.release_pending()

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == self.pool.total
        assert len(self.leases) == len(self.live)
        self.leases.check()
        self.pool.check(+self.owners, self.leases.owned(0))


LeaseMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_lease_state_machine = LeaseMachine.TestCase


def cached_blocks(pool: BlockPool, count: int) -> list[int]:
    """Registered and given back, one second apart, the first one the oldest."""
    blocks = [pool.take() for _ in range(count)]
    for i, block in enumerate(blocks):
        pool.steps.now = float(i)
        pool.register(block, block_hash(ROOT, [i]))
        pool.drop(block)
    return blocks


def test_a_move_that_never_ends_keeps_its_block_after_the_deadline() -> None:
    kv = KvManager((FULL,), (3,), 4)
    lease = kv.leases.lease_fresh(0, 2, "a transfer", 10.0)
    move_id = kv.leases.begin_move(lease)
    kv.begin_plan(1000.0)
    assert (kv.pools[0].num_available, kv.leases.num_overdue_blocks(0), kv.leases.has_moves) == (0, 2, False)
    kv.check([])
    assert kv.leases.moves_done([move_id]) == [lease], "however late, the runner's word ends it"
    kv.leases.release(lease)
    assert (kv.pools[0].num_available, kv.leases.num_overdue_blocks(0)) == (2, 0)
    kv.check([])


def test_a_lease_without_moves_ends_at_its_deadline() -> None:
    kv = KvManager((FULL,), (3,), 4)
    kv.leases.lease_fresh(0, 1, "a transfer", 10.0)
    kv.begin_plan(9.0)
    assert kv.pools[0].num_available == 1
    kv.begin_plan(10.0)
    assert (kv.pools[0].num_available, len(kv.leases)) == (2, 0)
    kv.check([])


def test_unknown_and_repeated_reports_of_moves_are_errors() -> None:
    kv = KvManager((FULL,), (3,), 4)
    lease = kv.leases.lease_fresh(0, 1, "a transfer", 10.0)
    move_id = kv.leases.begin_move(lease)
    with pytest.raises(LeaseError, match="not in flight"):
        kv.leases.moves_done([move_id + 1])
    kv.leases.moves_done([move_id])
    with pytest.raises(LeaseError, match="not in flight"):
        kv.leases.moves_done([move_id])


def test_a_lost_lease_is_found() -> None:
    kv = KvManager((FULL,), (3,), 4)
    kv.leases.lease_fresh(0, 1, "a transfer", 10.0)
    kv.leases = Leases(kv.pools)
    with pytest.raises(AssertionError, match="own other blocks"):
        kv.check([])


def test_a_transfer_of_an_idle_block_is_not_a_use() -> None:
    """Else what was moved out because it was old would be forgotten last."""
    pool = BlockPool(4)
    old, middle, new = cached_blocks(pool, 3)
    leases = Leases([pool])
    lease = leases.lease(0, [old], "a transfer", 99.0)
    assert old not in dict(pool.idle_since())
    pool.steps.now = 50.0
    leases.release(lease)
    assert list(pool.idle_since()) == [(old, 0.0), (middle, 1.0), (new, 2.0)]


def test_a_block_that_is_hit_during_its_transfer_was_used() -> None:
    pool = BlockPool(4)
    old, middle, new = cached_blocks(pool, 3)
    leases = Leases([pool])
    lease = leases.lease(0, [old], "a transfer", 99.0)
    pool.hold(old)
    pool.steps.now = 50.0
    pool.drop(old)
    leases.release(lease)
    assert list(pool.idle_since()) == [(middle, 1.0), (new, 2.0), (old, 50.0)]


def test_the_source_of_a_copy_waits_for_the_plan_that_copies_whoever_drops_it_last() -> None:
    """A fork copies its prompt's last block in plan 5; the sequence it was forked from is preempted later in the same plan.

    Its block was then free at once, could be handed out within plan 5, and a repetition of plan 5's copy would read the new owner's KV.
    """
    pool = BlockPool(3, StepClock(last_planned=4, last_committed=4))
    source = pool.take()
    pool.hold(source)
    pool.name_until(source, 5)
    pool.drop(source)  # the fork has its copy
    pool.drop(source)  # the preempted sequence gives everything back
    assert pool.num_pending_free == 1
    pool.steps.last_planned = pool.steps.last_committed = 5
    pool.release_pending()
    assert pool.num_available == 2
