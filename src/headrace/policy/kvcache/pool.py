"""One KV group's blocks: free, cached or used, and the prefix tree over the cached ones.

Life of a block:

    free --take--> used --drop--> (limbo until no uncommitted plan names it) --> cached if registered, else free
                    ^                                                             |
                    `----------------------- hold (prefix hit) -------------------'

A registered block is immutable: it holds the KV of one identity of the hash chain. The chain makes a dict a tree: a block's identity
contains its parent's, so a hit on block i implies hits on all before it. Cached blocks are forgotten least recently used first, and
`drop` is called tail first, so leaves go before their parents.

`free + cached + used == total`, where used = held by sequences + limbo + the pad block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from headrace.core.hashing import BlockHash

PAD_BLOCK = 0


class BlockPool:
    """Blocks 1..total-1; block 0 is the pad block, owned by nobody and never handed out."""

    def __init__(self, total: int) -> None:
        if total < 2:
            raise ValueError(f"a pool needs the pad block and at least one more, got {total}")
        self.total = total
        self._free = list(range(total - 1, 0, -1))
        self._refs = array("i", bytes(4 * total))
        self._hash_of: dict[int, BlockHash] = {}
        self._by_hash: dict[BlockHash, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._limbo: OrderedDict[int, int] = OrderedDict()
        """block -> step after which it is reusable, in the order of the steps."""

    # questions

    @property
    def num_available(self) -> int:
        """Blocks `take` could hand out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_limbo(self) -> int:
        """Blocks nobody holds but an uncommitted plan still names."""
        return len(self._limbo)

    @property
    def num_used(self) -> int:
        return self.total - self.num_available

    def find(self, identity: BlockHash) -> int | None:
        return self._by_hash.get(identity)

    def is_idle(self, block: int) -> bool:
        """Cached and held by nobody: holding it takes one from `num_available`."""
        return block in self._cached

    def is_writable(self, block: int) -> bool:
        return self._refs[block] == 1 and block not in self._hash_of

    # changes

    def take(self) -> int:
        """A block for one owner; the oldest cached block is forgotten when none is free. The caller asked `num_available` first."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._refs[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more owner of a used or cached block."""
        if self._refs[block] == 0 and self._limbo.pop(block, None) is None:
            del self._cached[block]
        self._refs[block] += 1

    def drop(self, block: int, *, until_step: int, committed: int) -> None:
        """One owner less. The last one's block is reusable once step `until_step` is committed."""
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if until_step > committed:
            self._limbo[block] = until_step
        else:
            self._settle(block)

    def settle_until(self, committed: int) -> None:
        """Blocks that waited for plans up to `committed` become reusable."""
        while self._limbo:
            block, until_step = next(iter(self._limbo.items()))
            if until_step > committed:
                return
            del self._limbo[block]
            self._settle(block)

    def register(self, block: int, identity: BlockHash) -> bool:
        """Offer a full, computed block to the prefix cache. False when that identity is cached already (the first stays)."""
        if identity in self._by_hash or block in self._hash_of:
            return False
        self._hash_of[block] = identity
        self._by_hash[identity] = block
        return True

    def unregister(self, block: int) -> None:
        """Forget what a block holds; it stays with its owners."""
        self._forget(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def reset_cache(self) -> None:
        for block in list(self._hash_of):
            self.unregister(block)

    def _settle(self, block: int) -> None:
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _forget(self, block: int) -> None:
        identity = self._hash_of.pop(block, None)
        if identity is not None:
            del self._by_hash[identity]

    # invariants

    def check(self, held: dict[int, int]) -> None:
        """Raise AssertionError unless every block has exactly one place. held: block -> number of owners, from the sequences."""
        limbo = set(self._limbo)
        owned = {block for block in range(self.total) if self._refs[block] > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        places = [free, cached, owned, limbo]
        assert sum(len(place) for place in places) == len(free | cached | owned | limbo), "a block is in two places"
        assert len(free) + len(cached) + len(owned) + len(limbo) + 1 == self.total, "free + cached + used != total"
        assert PAD_BLOCK not in free | cached | owned | limbo, "the pad block was handed out"
        assert held == {block: self._refs[block] for block in owned}, "owners and reference counts differ"
        assert all(block in self._hash_of for block in cached), "a cached block has no identity"
        assert {h: b for b, h in self._hash_of.items()} == self._by_hash, "the hash maps disagree"
        assert not any(block in self._hash_of for block in free), "a free block is still registered"
