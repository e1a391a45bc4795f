"""Tests the block pool alone: every block has one place, whatever the order of operations."""

from __future__ import annotations

import os
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.hashing import BlockHash, block_hash, chain_root
from headrace.policy.kvcache.pool import MAX_CHECKED_BLOCKS, BlockPool

pytestmark = pytest.mark.pure

ROOT = chain_root(b"k", model_digest=b"", kv_dtype="")


class PoolMachine(RuleBasedStateMachine):
    """Takes, holds, drops and registers at random; a Counter of owners is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, cached_share=0.3)
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
    @rule(data=st.data(), fresh=st.booleans(), tenant=st.sampled_from("ab"))
    def register(self, data: st.DataObject, fresh: bool, tenant: str) -> None:
        block = data.draw(st.sampled_from(sorted(+self.owners)))
        self.names += fresh
        identity = block_hash(ROOT, [self.names])
        known = self.pool.find(identity)
        if self.pool.register(block, identity, tenant):
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

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == self.pool.total
        self.pool.check(+self.owners, {})


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_pool_state_machine = PoolMachine.TestCase


def cache(pool: BlockPool, tenant: str, *numbers: int) -> None:
    """Take a block for each number, and leave it cached as the tenant's, in this order."""
    for number in numbers:
        block = pool.take()
        pool.register(block, block_hash(ROOT, [number]), tenant)
        pool.drop(block)


def cached_numbers(pool: BlockPool) -> set[int]:
    return {number for number in range(100) if pool.find(block_hash(ROOT, [number])) is not None}


def test_a_tenants_flood_evicts_its_own_blocks_and_not_those_within_their_share() -> None:
    pool = BlockPool(9, cached_share=0.5)
    cache(pool, "quiet", 1, 2, 3)
    cache(pool, "flood", *range(10, 60))
    assert cached_numbers(pool) == {1, 2, 3, 55, 56, 57, 58, 59}
    pool.check({}, {})
    plain = BlockPool(9)
    cache(plain, "quiet", 1, 2, 3)
    cache(plain, "flood", *range(10, 60))
    assert cached_numbers(plain) == set(range(52, 60)), "without shares the flood takes all"


def test_a_tenant_may_fill_what_nothing_else_needs() -> None:
    pool = BlockPool(9, cached_share=0.25)
    cache(pool, "only", *range(1, 12))
    assert cached_numbers(pool) == set(range(4, 12))
    cache(pool, "other", 50)
    assert cached_numbers(pool) == {*range(5, 12), 50}


def test_where_no_tenant_is_above_its_share_the_least_recently_used_block_is_evicted() -> None:
    pool = BlockPool(9, cached_share=0.5)
    cache(pool, "a", 1, 2)
    cache(pool, "b", 3, 4)
    cache(pool, "c", 5, 6, 7, 8)
    pool.touch([block for block in [pool.find(block_hash(ROOT, [1]))] if block is not None])
    cache(pool, "b", 9)
    assert cached_numbers(pool) == {1, 3, 4, 5, 6, 7, 8, 9}


def test_a_pool_needs_a_block_beside_the_pad_block() -> None:
    with pytest.raises(ValueError, match="pad block"):
        BlockPool(1)


def test_a_cached_block_knows_when_it_was_last_used() -> None:
    pool = BlockPool(4)
    first, second = pool.take(), pool.take()
    for i, block in enumerate((first, second)):
        pool.register(block, block_hash(ROOT, [i]))
        pool.steps.now = 10.0 + i
        pool.drop(block)
    assert list(pool.idle_since()) == [(first, 10.0), (second, 11.0)]
    pool.hold(first)
    pool.steps.now = 20.0
    pool.drop(first)
    assert list(pool.idle_since()) == [(second, 11.0), (first, 20.0)]


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


def not_read(_: Any) -> Iterator[Any]:
    raise AssertionError("each block was looked at")


class UnreadList(list[int]):
    __iter__ = not_read


class UnreadOwners(array):  # type: ignore[type-arg]
    __iter__ = not_read


class UnreadDict(dict[Any, Any]):
    __iter__ = items = keys = not_read  # type: ignore[assignment]


class UnreadOrderedDict(OrderedDict[Any, Any]):
    __iter__ = items = keys = not_read  # type: ignore[assignment]


@pytest.mark.parametrize("is_large", [False, True])
def test_a_check_looks_at_each_block_of_small_pools_alone(is_large: bool) -> None:
    """A million blocks took 0.4 s, during which a request waited."""
    pool = BlockPool(MAX_CHECKED_BLOCKS + is_large)
    blocks = pool.take_many(MAX_CHECKED_BLOCKS // 2)
    for block in blocks:
        pool.register(block, BlockHash(os.urandom(32)))
    pool.drop(*blocks[1:])
    pool.check({blocks[0]: 1}, {})
    pool._free, pool._cached = UnreadList(pool._free), UnreadOrderedDict(pool._cached.copy().items())
    pool._num_owners = UnreadOwners("i", pool._num_owners)
    pool._hash_of, pool._by_hash = UnreadDict(pool._hash_of), UnreadDict(pool._by_hash)
    if is_large:
        pool.check({blocks[0]: 1}, {})
        with pytest.raises(AssertionError, match="other owners"):
            pool.check({blocks[0]: 2}, {})
        with pytest.raises(AssertionError, match="free \\+ cached"):
            pool.check({}, {})
    else:
        with pytest.raises(AssertionError, match="each block"):
            pool.check({blocks[0]: 1}, {})
