"""Tracks the cached blocks of each tenant, so that one tenant's flood of prompts evicts its own cached blocks and not those of every
tenant.

A tenant may have more than its share while nothing else needs the blocks. When a block is needed, a tenant above its share loses its least
recently used one; only where no tenant is above it, the least recently used of all is evicted. Each change costs one dict operation.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection


class CachedShares:
    """Cached blocks of one pool by tenant. max_blocks: cached blocks of a tenant that are protected from eviction by other tenants"""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._tenant_of: dict[int, str] = {}
        """Registered block -> the tenant whose sequence computed it."""
        self._cached: dict[str, OrderedDict[int, None]] = {}
        """Tenant -> its cached blocks, the least recently used first; no tenant without one."""
        self._above: dict[str, None] = {}
        """Tenants with more than `max_blocks`: fewer than one divided by the share."""

    def victim(self) -> int | None:
        """The least recently used block of the tenant that is furthest above its share; None: no tenant is."""
        if not self._above:
            return None
        return next(iter(self._cached[max(self._above, key=lambda tenant: len(self._cached[tenant]))]))

    def register(self, block: int, tenant: str) -> None:
        self._tenant_of[block] = tenant

    def forget(self, block: int) -> None:
        """Drop a block's tenant: the block is not cached, and has no identity any more."""
        del self._tenant_of[block]

    def add(self, block: int) -> None:
        """A registered block is cached from now on, as the last one used."""
        tenant = self._tenant_of[block]
        blocks = self._cached.get(tenant)
        if blocks is None:
            blocks = self._cached[tenant] = OrderedDict()
        blocks[block] = None
        if len(blocks) > self.max_blocks:
            self._above[tenant] = None

    def remove(self, block: int) -> None:
        """A cached block is held or evicted."""
        tenant = self._tenant_of[block]
        blocks = self._cached[tenant]
        del blocks[block]
        if len(blocks) <= self.max_blocks:
            self._above.pop(tenant, None)
            if not blocks:
                del self._cached[tenant]

    def move(self, block: int, *, last: bool) -> None:
        """A cached block counts as the last one used, or as the first."""
        self._cached[self._tenant_of[block]].move_to_end(block, last=last)

    def check(self, cached: Collection[int], registered: Collection[int]) -> None:
        """Raise AssertionError unless every cached block is its tenant's, and the sums agree."""
        assert self._tenant_of.keys() == set(registered), "a registered block has no tenant"
        of_tenants = Counter(self._tenant_of[block] for block in cached)
        assert {tenant: len(blocks) for tenant, blocks in self._cached.items()} == of_tenants, "a tenant's cached blocks are miscounted"
        assert all(block in self._cached[self._tenant_of[block]] for block in cached), "a cached block is another tenant's"
        assert self._above.keys() == {tenant for tenant, count in of_tenants.items() if count > self.max_blocks}
