"""Manages one KV group's blocks (free, cached or used) and the prefix tree over the cached ones.

    free --take--> used --drop--> (pending free until no uncommitted plan can name it) --> cached if registered, else free
                    ^                                                                    |
                    `----------------------- hold (prefix hit), lend (transfer) ---------'

A registered block is immutable: it holds the KV of one identity of the hash chain. `drop` is called tail first, so leaves of the prefix
tree go before their parents.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile

from headrace.core.hashing import BlockHash
from headrace.policy.kvcache.misses import EvictedBlocks


class CachedShares:
    """max_blocks  cached blocks of a tenant that are protected from eviction by other tenants"""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._tenant_of: dict[int, str] = {}
        self._cached: dict[str, OrderedDict[int, None]] = {}
        """Tenant -> its cached blocks, the least recently used first."""
        self._above: dict[str, None] = {}

    def victim(self) -> int | None:
        if not self._above:
            return None
        return next(iter(self._cached[max(self._above, key=lambda tenant: len(self._cached[tenant]))]))

    def register(self, block: int, tenant: str) -> None:
        self._tenant_of[block] = tenant

    def forget(self, block: int) -> None:
        del self._tenant_of[block]

    def add(self, block: int) -> None:
        tenant = self._tenant_of[block]
        blocks = self._cached.get(tenant)
        if blocks is None:
            blocks = self._cached[tenant] = OrderedDict()
        blocks[block] = None
        if len(blocks) > self.max_blocks:
            self._above[tenant] = None

    def remove(self, block: int) -> None:
        tenant = self._tenant_of[block]
        blocks = self._cached[tenant]
        del blocks[block]
        if len(blocks) <= self.max_blocks:
            self._above.pop(tenant, None)
            if not blocks:
                del self._cached[tenant]

    def move(self, block: int, *, last: bool) -> None:
        self._cached[self._tenant_of[block]].move_to_end(block, last=last)

    def check(self, cached: Collection[int], registered: Collection[int]) -> None:
        assert self._tenant_of.keys() == set(registered), "a registered block has no tenant"
        of_tenants = Counter(self._tenant_of[block] for block in cached)
        assert {tenant: len(blocks) for tenant, blocks in self._cached.items()} == of_tenants, "a tenant's cached blocks are miscounted"
        assert all(block in self._cached[self._tenant_of[block]] for block in cached), "a cached block is another tenant's"
        assert self._above.keys() == {tenant for tenant, count in of_tenants.items() if count > self.max_blocks}


PAD_BLOCK = 0

MAX_CHECKED_BLOCKS = 2**16
"""In a larger pool, `check` compares counts alone."""


@dataclass(slots=True)
class StepClock:
    """The present step and time, as pools see them. last_planned: its plan may name any block that is held now"""

    last_planned: int = 0
    last_committed: int = 0
    now: float = 0.0


class BlockPool:
    """The blocks of one KV group: free, cached and used ones. They are 1..total-1; block 0 is the pad block, without owner and never handed
    out.
    """

    def __init__(self, total: int, steps: StepClock | None = None, *, cached_share: float = 1.0) -> None:
        if total < 2:
            raise ValueError(f"a pool needs the pad block and at least one more, got {total}")
        self.total = total
        self.steps = steps or StepClock()
        self._shares = CachedShares(int(cached_share * (total - 1))) if cached_share < 1 else None
        self.evicted = EvictedBlocks()
        self._free = list(range(total - 1, 0, -1))
        self._num_owners = array("i", bytes(4 * total))
        self._hash_of: dict[int, BlockHash] = {}
        self._by_hash: dict[BlockHash, int] = {}
        self._cached: OrderedDict[int, float] = OrderedDict()
        """block -> when it was last used; the oldest first."""
        self._lent: dict[int, float] = {}
        """block -> last use, for cached blocks that a transfer holds and no sequence has used since."""
        self._pending_free: OrderedDict[int, int] = OrderedDict()
        """block -> step after which it is reusable, in the order of the steps."""
        self._named_until: dict[int, int] = {}
        """block -> the step that copies from it, which may have other owners than the copy's sequence."""

    # questions

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_pending_free(self) -> int:
        return len(self._pending_free)

    @property
    def num_used(self) -> int:
        return self.total - self.num_available

    def find(self, identity: BlockHash) -> int | None:
        return self._by_hash.get(identity)

    def num_leading_hits(self, identities: Sequence[BlockHash]) -> int:
        return next((count for count, identity in enumerate(identities) if identity not in self._by_hash), len(identities))

    def num_idle_hits(self, identities: Sequence[BlockHash]) -> int:
        return sum([1 for identity in identities if self._by_hash.get(identity) in self._cached])

    def identity(self, block: int) -> BlockHash | None:
        return self._hash_of.get(block)

    def is_writable(self, block: int) -> bool:
        return self._num_owners[block] == 1 and block not in self._hash_of

    def idle_since(self) -> Iterator[tuple[int, float]]:
        """The pool must not change while this is read."""
        return iter(self._cached.items())

    # changes

    def take(self) -> int:
        """The caller asked `num_available` first."""
        if self._free:
            block = self._free.pop()
        else:
            block = self._victim()
            self._uncache(block)
            self.evicted.add(self._hash_of[block])
            self._forget(block)
        self._num_owners[block] = 1
        return block

    def _victim(self) -> int:
        victim = None if self._shares is None else self._shares.victim()
        return next(iter(self._cached)) if victim is None else victim

    def _uncache(self, block: int) -> None:
        del self._cached[block]
        if self._shares is not None:
            self._shares.remove(block)

    def take_many(self, count: int) -> list[int]:
        return [self.take() for _ in range(count)]

    def hold(self, block: int) -> None:
        if self._num_owners[block] == 0 and self._pending_free.pop(block, None) is None:
            self._uncache(block)
        if self._lent:
            self._lent.pop(block, None)
        self._num_owners[block] += 1

    def touch(self, blocks: Sequence[int]) -> None:
        """Count a use of the cached ones: a waiting prompt begins with them."""
        for block in reversed(blocks):
            if block in self._cached:
                self._cached[block] = self.steps.now
                self._cached.move_to_end(block)
                if self._shares is not None:
                    self._shares.move(block, last=True)

    def lend(self, block: int) -> None:
        """A transfer is no use: a cached block that no sequence uses keeps its age."""
        last_used = self._cached.get(block)
        self.hold(block)
        if last_used is not None:
            self._lent[block] = last_used

    def name_until(self, block: int, step_id: int) -> None:
        self._named_until[block] = step_id

    def drop(self, *blocks: int) -> None:
        """A block without an owner is reusable once no uncommitted plan can name it."""
        owners, named_until = self._num_owners, self._named_until
        last_planned, last_committed = self.steps.last_planned, self.steps.last_committed
        for block in blocks:
            owners[block] -= 1
            if owners[block]:
                continue
            until_step = max(last_planned, named_until.get(block, 0)) if named_until else last_planned
            if until_step > last_committed:
                self._pending_free[block] = until_step
            else:
                self._make_reusable([block])

    def release_pending(self) -> None:
        committed = self.steps.last_committed
        if self._pending_free:
            due = list(takewhile(committed.__ge__, self._pending_free.values()))
            self._make_reusable([self._pending_free.popitem(last=False)[0] for _ in due])
        if self._named_until:
            self._named_until = {block: step_id for block, step_id in self._named_until.items() if step_id > committed}

    def register(self, block: int, identity: BlockHash, tenant: str = "") -> bool:
        """False when the cache has a block of that identity, which stays."""
        if identity in self._by_hash or block in self._hash_of:
            return False
        if self._shares is not None:
            self._shares.register(block, tenant)
        self._hash_of[block] = identity
        self._by_hash[identity] = block
        return True

    def evict_all(self) -> None:
        for block in [*self._cached]:
            self.evicted.add(self._hash_of[block])
            self.unregister(block)

    def unregister(self, block: int) -> None:
        if block in self._cached:
            self._uncache(block)
            self._free.append(block)
        self._forget(block)

    def _make_reusable(self, blocks: list[int]) -> None:
        registered, cached, free, now, shares = self._hash_of, self._cached, self._free, self.steps.now, self._shares
        for block in blocks:
            if block in registered:
                cached[block] = now
                if shares is not None:
                    shares.add(block)
            else:
                free.append(block)
        for block in blocks if self._lent else ():
            last_used = self._lent.pop(block, None)
            if last_used is not None and block in cached:
                cached[block] = last_used
                cached.move_to_end(block, last=False)
                if shares is not None:
                    shares.move(block, last=False)

    def _forget(self, block: int) -> None:
        identity = self._hash_of.pop(block, None)
        if identity is not None:
            del self._by_hash[identity]
            if self._shares is not None:
                self._shares.forget(block)

    # invariants

    def check(self, held: Mapping[int, int], leased: Mapping[int, int]) -> None:
        """In a pool of more than MAX_CHECKED_BLOCKS blocks, only owned blocks are checked one by one."""
        claimed = {block: held.get(block, 0) + leased.get(block, 0) for block in {*held, *leased}}
        assert all(self._num_owners[block] == count for block, count in claimed.items()), "a block has other owners than the pool says"
        if self.total <= MAX_CHECKED_BLOCKS:
            self._check_each(claimed)
        num_placed = len(self._free) + len(self._cached) + len(claimed) + len(self._pending_free)
        assert num_placed + 1 == self.total, "free + cached + used != total"
        assert len(self._hash_of) == len(self._by_hash), "the hash maps disagree"

    def _check_each(self, claimed: Mapping[int, int]) -> None:
        free, cached, pending = set(self._free), self._cached.keys(), self._pending_free.keys()
        owners = {block: count for block, count in enumerate(self._num_owners) if count}
        owned = owners.keys()
        assert len(free) == len(self._free), "a block is free twice"
        places = [free, cached, owned, pending]
        assert all(one.isdisjoint(other) for one, other in combinations(places, 2)), "a block is in two places"
        assert not any(PAD_BLOCK in place for place in places), "the pad block was handed out"
        assert claimed == owners, "sequences and leases own other blocks than the pool says"
        assert cached <= self._hash_of.keys(), "a cached block has no identity"
        assert {h: b for b, h in self._hash_of.items()} == self._by_hash, "the hash maps disagree"
        assert free.isdisjoint(self._hash_of), "a free block is still registered"
        assert self._lent.keys() <= owned | pending, "a lent block came back unseen"
        if self._shares is not None:
            self._shares.check(cached, self._hash_of)
