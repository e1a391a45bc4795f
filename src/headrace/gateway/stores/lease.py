"""The protocol by which a request has an entry of a store to itself for a time.

    an entry, or none --claim--> the claim, for `lasts_s`, renewed --replace--> another entry
                                   `-- free, or its gateway died and the time ran out --> no entry

No two claims have equal bytes, and each step is one atomic call that names the claim: what comes late, or twice, leaves the claim of
another request as it is.
"""

from __future__ import annotations

import asyncio

from headrace.gateway.stores.guard import Ended, GuardedStore
from headrace.gateway.stores.store import Store

GIVE_BACK_PAUSES_S = (0.25, 0.25, 0.5, 1.0, 2.0)


class EntryLease:
    """value    bytes of the entry while it is claimed, of this request alone
    lasts_s  seconds until a claim that is not renewed is over
    """

    def __init__(self, store: GuardedStore, key: str, value: bytes, *, tenant: str, lasts_s: float) -> None:
        self._store = store
        self._key, self._tenant = key, tenant
        self.value, self.lasts_s = value, lasts_s
        self.is_ended = False
        self._renewing: asyncio.Task[None] | None = None

    # -- work on the bare store ----------------------------------------------------------------------------------------------------

    async def claim(self, store: Store, *, expected: bytes | None = None) -> bool:
        """Whether the entry was `expected` (None: there was none)."""
        return await self._swap(store, self.value, expected, self.lasts_s)

    async def renew(self, store: Store) -> bool:
        return await self._swap(store, self.value, self.value, self.lasts_s)

    async def replace(self, store: Store, value: bytes, *, ttl_s: float) -> bool:
        """Also after the claim is over, but never in the place of another request's entry."""
        return await self._swap(store, value, self.value, ttl_s) or await self._swap(store, value, None, ttl_s)

    async def give_back(self, store: Store, before: bytes) -> None:
        """Put back what was claimed, where the call of `claim` got no answer: tried several times, since the store may do it late."""
        for pause_s in GIVE_BACK_PAUSES_S:
            if await self._swap(store, before, self.value, self.lasts_s):
                return
            await asyncio.sleep(pause_s)

    async def _swap(self, store: Store, value: bytes, expected: bytes | None, ttl_s: float) -> bool:
        return await store.swap(self._key, value, expected=expected, tenant=self._tenant, ttl_s=ttl_s)

    # -- in the background ---------------------------------------------------------------------------------------------------------

    def begin_renewing(self, every_s: float) -> None:
        self._renewing = asyncio.create_task(self._renew(every_s))

    def end(self) -> None:
        self.is_ended = True
        renewing, self._renewing = self._renewing, None  # a cancelled task holds its frame, which holds what the claim is for
        if renewing is not None:
            renewing.cancel()

    def free(self, ended: Ended = lambda _: None) -> None:
        if not self.is_ended:
            self.end()
            self._store.write(lambda store: store.delete(self._key, expected=self.value), 0, ended, within_s=self.lasts_s)

    async def _renew(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self._store.tried(self.renew, every_s)
