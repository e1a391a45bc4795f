"""Gives a sequence its KV blocks over all groups.

A method that may fail checks first, so it changes everything or nothing. Changes of block tables and block moves go into the plan being
built.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import pairwise

from headrace.core.hashing import TENANT_SALT_BYTES, BlockHash, block_hash, chain_root
from headrace.core.model_info import KvGroup
from headrace.core.update import MissReason
from headrace.policy.kvcache.leases import Leases
from headrace.policy.kvcache.misses import Beginnings
from headrace.policy.kvcache.pool import PAD_BLOCK, BlockPool, StepClock
from headrace.policy.sequence import Sequence
from headrace.policy.step_builder import StepBuilder


class KvManager:
    """Owns the KV blocks of one engine: a `BlockPool` for each KV group.

    caching  False: no block is registered and none is found (the reference implementation)
    """

    def __init__(
        self,
        groups: tuple[KvGroup, ...],
        num_blocks: tuple[int, ...],
        block_size: int,
        *,
        key: bytes = b"",
        model_digest: bytes = b"",
        kv_dtype: str = "",
        caching: bool = True,
        cached_share: float = 1.0,
    ) -> None:
        self.groups = groups
        self.steps = StepClock()
        self.pools = [BlockPool(total, self.steps, cached_share=cached_share) for total in num_blocks]
        self.leases = Leases(self.pools)
        self.block_size = block_size
        self.caching = caching
        self._chain_root = partial(chain_root, key, model_digest=model_digest, kv_dtype=kv_dtype)
        self._beginnings = Beginnings()
        self._windows = [(index, group.window) for index, group in enumerate(groups) if group.window is not None]
        self._by_group = [(index, group.window, self.pools[index]) for index, group in enumerate(groups)]

    # questions

    @property
    def has_pending_free(self) -> bool:
        return any(pool.num_pending_free for pool in self.pools)

    def shortage(self, num_tokens: int, step_tokens: int) -> str | None:
        """Why it can never fit; None when it can. step_tokens: held beyond a window by uncommitted steps"""
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            resident = num_tokens if group.window is None else min(num_tokens, group.window + step_tokens)
            needed = self.blocks_for(resident) + (group.window is not None)
            usable = pool.total - 1 - self.leases.num_overdue_blocks(index)
            if needed > usable:
                return f"{resident} tokens need {needed} KV blocks of {self.block_size}, the pool has {usable}"
        return None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_allocated(self, seq: Sequence) -> int:
        return min(map(len, seq.blocks)) * self.block_size if seq.blocks else seq.limit

    def num_held(self, seq: Sequence) -> int:
        """A shared block counts in full for each of its sequences."""
        held = (len(seq.blocks[i]) - (0 if window is None else seq.blocks[i].count(PAD_BLOCK)) for i, window, _ in self._by_group)
        return max(held, default=0)

    def num_that_may_grow(self, sequences: Iterable[Sequence]) -> int:
        size = self.block_size
        return sum([1 for seq in sequences if len(seq.blocks[0]) * size < seq.limit]) if self.pools else 0

    def num_hit_tokens(self, seq: Sequence) -> int:
        if not (self.caching and seq.uses_prefix_cache):
            return 0
        limit = (len(seq.tokens) - 1) // self.block_size
        self._extend_hashes(seq, limit)
        hits = self._chain_hits(seq, limit)
        return hits * self.block_size

    def hashes_after_hits(self, seq: Sequence) -> list[BlockHash]:
        if not (self.caching and seq.uses_prefix_cache):
            return []
        hits = self.num_hit_tokens(seq) // self.block_size
        return seq.hashes[hits : (len(seq.tokens) - 1) // self.block_size]

    def hashes_before(self, seq: Sequence, last: BlockHash) -> list[BlockHash]:
        return seq.hashes[: seq.hashes.index(last)]

    def _chain_hits(self, seq: Sequence, limit: int) -> int:
        hits = limit if self.pools else 0
        for _, window, pool in self._by_group:
            if window is None:
                hits = pool.num_leading_hits(seq.hashes[:hits])
        if self._windows:
            while hits and not all(self._window_holds(seq, hits, window, self.pools[index]) for index, window in self._windows):
                hits -= 1
        return hits

    def _window_holds(self, seq: Sequence, hits: int, window: int, pool: BlockPool) -> bool:
        first = self._first_live(hits * self.block_size, window)
        return all(pool.find(seq.hashes[i]) is not None for i in range(first, hits))

    def _first_live(self, num_computed: int, window: int) -> int:
        return max(0, num_computed - window + 1) // self.block_size

    @property
    def has_blocks_in_use(self) -> bool:
        """Whether a sequence, a lease or an uncommitted plan names one."""
        return any(pool.num_used > 1 for pool in self.pools)

    # changes

    def evict_all(self) -> None:
        for pool in self.pools:
            pool.evict_all()

    def open(self, seq: Sequence) -> None:
        seq.root = self._root(seq, seq.request.salt)
        seq.blocks = [[] for _ in self.groups]
        seq.registered = [0 for _ in self.groups]

    def _root(self, seq: Sequence, salt: bytes) -> BlockHash:
        """The digest and not the name of the adapter: a name may be loaded anew."""
        return self._chain_root(salt=salt, adapter_digest=bytes.fromhex(seq.request.adapter_digest))

    def miss_reason(self, seq: Sequence, num_tokens: int) -> MissReason:
        """Asked once, when the sequence first starts: its beginning is remembered."""
        if not (self.caching and self.pools and seq.uses_prefix_cache) or seq.needs_prompt_logprobs:
            return MissReason.NOT_USED
        hits = num_tokens // self.block_size
        if hits == (len(seq.tokens) - 1) // self.block_size:
            return MissReason.LESS_THAN_A_BLOCK
        is_salted = hits == 0 and self._came_under_another_salt(seq)
        missing = seq.hashes[hits]  # with a window too: one more hit needs this block, and none that these hits do not
        if any(pool.find(missing) is None and missing in pool.evicted for pool in self.pools):
            return MissReason.EVICTED
        return MissReason.ANOTHER_SALT if is_salted else MissReason.NEVER_SEEN

    def _came_under_another_salt(self, seq: Sequence) -> bool:
        root = self._root(seq, seq.request.salt[:TENANT_SALT_BYTES])
        return self._beginnings.add(block_hash(root, seq.tokens[: self.block_size]), seq.hashes[0])

    def take_hits(self, seq: Sequence, num_tokens: int) -> None:
        count = num_tokens // self.block_size
        for index, window, pool in self._by_group:
            first = 0 if window is None else self._first_live(num_tokens, window)
            blocks = [PAD_BLOCK] * first
            for i in range(first, count):
                block = pool.find(seq.hashes[i])
                assert block is not None, "num_hit_tokens counted this block"
                pool.hold(block)
                blocks.append(block)
            seq.blocks[index] = blocks
            seq.registered[index] = count
        seq.start_after(num_tokens)

    def num_left(self, seq: Sequence, hit_tokens: int, first_end: int, chunk_blocks: int = 0) -> float:
        """Blocks left in the shortest pool if a waiting sequence started now; below 0 when it does not fit.

        chunk_blocks  not counted as left in groups with a window, where a prompt takes its blocks chunk by chunk
        """
        left = math.inf
        for index, window, pool in self._by_group:
            end = first_end if window is not None else len(seq.tokens)
            held = seq.blocks[index]
            if held:
                needed = max(0, self.blocks_for(end) - len(held)) + self._num_copies(seq, index)
            else:
                hits = hit_tokens // self.block_size
                first = 0 if window is None else self._first_live(hit_tokens, window)
                needed = self.blocks_for(end) - hits + pool.num_idle_hits(seq.hashes[first:hits])
            left = min(left, pool.num_available - needed - (0 if window is None else chunk_blocks))
        return left

    def grow(self, seq: Sequence, end: int, step: StepBuilder) -> bool:
        """Make positions [planned, end) of a running sequence writable. False (and no change) when blocks are short."""
        size, known = self.block_size, max(end, len(seq.tokens))
        if len(self.pools) == 1 and known == seq.num_planned + 1 == len(seq.blocks[0]) * size + 1:
            return self._add_block(seq, step)
        first = seq.num_planned // size
        missing: list[int] = []
        for index, window, pool in self._by_group:
            held = len(seq.blocks[index])
            missing.append(-(-(known if window is None else end) // size) - held)
            copies = self._num_copies(seq, index) if first < held else 0
            if missing[index] + copies > pool.num_available:
                return False
        for index, _, pool in self._by_group:
            blocks = seq.blocks[index]
            if first < len(blocks):
                self._copy_on_write(seq, index, step)
            if missing[index] > 0:
                taken = pool.take_many(missing[index])
                step.tables(index, seq.slot, len(blocks), taken)
                blocks += taken
        seq.allocate(self.num_allocated(seq))
        return True

    def _add_block(self, seq: Sequence, step: StepBuilder) -> bool:
        pool, blocks = self.pools[0], seq.blocks[0]
        if not pool.num_available:
            return False
        block = pool.take()
        step.table(0, seq.slot, len(blocks), block)
        blocks.append(block)
        seq.allocate(seq.num_planned + self.block_size)
        return True

    def _num_copies(self, seq: Sequence, group: int) -> int:
        blocks, first = seq.blocks[group], seq.num_planned // self.block_size
        return int(first < len(blocks) and not self.pools[group].is_writable(blocks[first]))

    def _copy_on_write(self, seq: Sequence, group: int, step: StepBuilder) -> None:
        if not self._num_copies(seq, group):
            return
        pool, first = self.pools[group], seq.num_planned // self.block_size
        source, target = seq.blocks[group][first], self.pools[group].take()
        step.copy(group, source, target)
        step.table(group, seq.slot, first, target)
        seq.blocks[group][first] = target
        seq.registered[group] = min(seq.registered[group], first)
        pool.name_until(source, step.step_id)  # until the copy is made, whichever other sequence drops the source in this plan
        pool.drop(source)

    def write_tables(self, seq: Sequence, step: StepBuilder) -> None:
        for group, blocks in enumerate(seq.blocks):
            if blocks:
                first = blocks.count(PAD_BLOCK)  # a window has passed them
                step.tables(group, seq.slot, first, blocks[first:])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child recomputes the last prompt token, whose logits it samples from.

        The parent may go on writing in the shared last block: the child copies that block before it writes.
        """
        if not self.pools:
            return  # without KV there is nothing to share
        num_prompt = parent.num_prompt
        for index, pool in enumerate(self.pools):
            child.blocks[index] = parent.blocks[index][: self.blocks_for(num_prompt)]
            for block in child.blocks[index]:
                if block != PAD_BLOCK:
                    pool.hold(block)
            child.registered[index] = min(parent.registered[index], num_prompt // self.block_size)
        child.hashes = parent.hashes[: num_prompt // self.block_size]
        child.start_after(num_prompt - 1)

    def commit(self, seq: Sequence) -> int:
        """Returns `bulk_commit_limit`."""
        full = seq.num_computed // self.block_size
        for index, registered in enumerate(seq.registered):
            if full > registered:
                self._register(seq, index, full)
        for index, window in self._windows:
            self._pass_window(seq, index, window)
        return self.bulk_commit_limit(seq)

    def bulk_commit_limit(self, seq: Sequence) -> int:
        if not seq.registered:
            return seq.limit
        until = (min(seq.registered) + 1) * self.block_size
        for _, window in self._windows:
            first = self._first_live(seq.num_computed, window)
            until = min(until, (first + 1) * self.block_size + window - 1)
        return until

    def _register(self, seq: Sequence, group: int, full: int) -> None:
        first = seq.registered[group]
        seq.registered[group] = full
        if self.caching and seq.uses_prefix_cache:
            self._extend_hashes(seq, full)
            pool, blocks = self.pools[group], seq.blocks[group]
            for i in range(first, full):
                if blocks[i] != PAD_BLOCK:
                    pool.register(blocks[i], seq.hashes[i], seq.request.tenant)

    def _pass_window(self, seq: Sequence, group: int, window: int) -> None:
        blocks = seq.blocks[group]
        for i in range(min(self._first_live(seq.num_computed, window), len(blocks)) - 1, -1, -1):
            if blocks[i] == PAD_BLOCK:
                break
            self.pools[group].drop(blocks[i])
            blocks[i] = PAD_BLOCK

    def release(self, seq: Sequence, *, keep_tokens: int | None = None) -> None:
        """keep_tokens: full blocks beyond that length are not left in the cache"""
        keep = len(seq.tokens) if keep_tokens is None else keep_tokens
        for index, _, pool in self._by_group:
            blocks = seq.blocks[index]
            for i in range(keep // self.block_size, len(blocks)):
                self._unregister_own(pool, blocks[i], seq, i)
            pool.drop(*reversed(blocks[blocks.count(PAD_BLOCK) :]))
            seq.blocks[index] = []
            seq.registered[index] = 0
        seq.reset()

    @staticmethod
    def _unregister_own(pool: BlockPool, block: int, seq: Sequence, index: int) -> None:
        if index < len(seq.hashes) and pool.find(seq.hashes[index]) == block:
            pool.unregister(block)

    def note_planned(self, step_id: int) -> None:
        self.steps.last_planned = step_id

    def begin_plan(self, now: float) -> None:
        self.steps.now = now
        if len(self.leases):
            self.leases.expire(now)

    def release_pending(self, committed: int) -> None:
        self.steps.last_committed = max(self.steps.last_committed, committed)
        for pool in self.pools:
            pool.release_pending()

    def _extend_hashes(self, seq: Sequence, count: int) -> None:
        size, hashes = self.block_size, seq.hashes
        parent = hashes[-1] if hashes else seq.root
        for i in range(len(hashes), count):
            parent = block_hash(parent, seq.tokens[i * size : (i + 1) * size])
            hashes.append(parent)

    # invariants

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless pools, sequences and leases agree on every block's owners."""
        held: list[Counter[int]] = [Counter() for _ in self.pools]
        for seq in sequences:
            for group, blocks in enumerate(seq.blocks):
                held[group].update(block for block in blocks if block != PAD_BLOCK)
                live = [block != PAD_BLOCK for block in blocks]
                assert not any(a and not b for a, b in pairwise(live)), "a hole in a block table"
        self.leases.check()
        for group, pool in enumerate(self.pools):
            pool.check(held[group], self.leases.owned(group))
