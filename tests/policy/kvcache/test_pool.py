"""The block pool alone: every block has one place, whatever the order of operations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.hashing import block_hash, chain_root
from headrace.policy.kvcache.pool import BlockPool

ROOT = chain_root(b"k")


class PoolMachine(RuleBasedStateMachine):
    """Takes, holds, drops and registers at random; a Counter of owners is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.owners: Counter[int] = Counter()
        self.names = 0

    @precondition(lambda self: self.pool.num_available > 0)
    @rule()
    def take(self) -> None:
        block = self.pool.take()
        assert self.owners[block] == 0
        self.owners[block] = 1

    @precondition(lambda self: +self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.owners)))
        self.pool.hold(block)
        self.owners[block] += 1

    @precondition(lambda self: +self.owners)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.owners)))
        self.pool.drop(block)
        self.owners[block] -= 1

    @precondition(lambda self: +self.owners)
    @rule(data=st.data(), fresh=st.booleans())
    def register(self, data: st.DataObject, fresh: bool) -> None:
        block = data.draw(st.sampled_from(sorted(+self.owners)))
        self.names += fresh
        identity = block_hash(ROOT, [self.names])
        known = self.pool.find(identity)
        if self.pool.register(block, identity):
            assert known is None
            assert self.pool.find(identity) == block
        assert not self.pool.is_writable(block) or self.pool.find(identity) != block

    @rule(back=st.integers(0, 5))
    def hit(self, back: int) -> None:
        block = self.pool.find(block_hash(ROOT, [self.names - back]))
        if block is not None:
            self.pool.hold(block)
            self.owners[block] += 1

    @rule()
    def plan(self) -> None:
        self.pool.steps.last_planned += 1

    @rule()
    def commit(self) -> None:
        self.pool.steps.last_committed = self.pool.steps.last_planned
        self.pool.release_pending()
        assert self.pool.num_pending_free == 0

    @rule()
    def forget_everything(self) -> None:
        self.pool.reset_cache()
        assert self.pool.num_cached == 0

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == self.pool.total
        self.pool.check(+self.owners, {})


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_pool_state_machine = PoolMachine.TestCase


def test_a_pool_needs_a_block_beside_the_pad_block() -> None:
    with pytest.raises(ValueError, match="pad block"):
        BlockPool(1)


def test_the_oldest_cached_block_is_forgotten_first() -> None:
    pool = BlockPool(4)
    blocks = [pool.take() for _ in range(3)]
    for i, block in enumerate(blocks):
        pool.register(block, block_hash(ROOT, [i]))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.drop(block)
    assert pool.take() == blocks[1]
    assert pool.find(block_hash(ROOT, [1])) is None
    assert pool.find(block_hash(ROOT, [0])) == blocks[0]


def test_a_block_named_by_an_uncommitted_plan_is_not_handed_out() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.steps.last_planned, pool.steps.last_committed = 3, 2
    pool.drop(block)
    assert (pool.num_available, pool.num_pending_free, pool.num_used) == (0, 1, 2)
    pool.steps.last_committed = 3
    pool.release_pending()
    assert pool.num_available == 1
