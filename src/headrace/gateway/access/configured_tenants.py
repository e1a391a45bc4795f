"""Records in the store of tenants that keys of the configuration belong to, as they were read last.

These keys are good without the store, so a request waits for a record once at most: the first time that its tenant is asked for. From then
on records are read again after each change of the directory, in the background, and stay as they were while the store does not answer.
"""

from __future__ import annotations

from headrace.gateway.access.key_records import TenantRecord
from headrace.gateway.access.key_store import KeyStore
from headrace.gateway.stores.guard import StoreGuard
from headrace.gateway.stores.store import StoreFailed


class ConfiguredTenants:
    def __init__(self, store: KeyStore, guard: StoreGuard) -> None:
        """guard: of the store"""
        self._store = store
        self._guard = guard
        self._records: dict[str, TenantRecord | None] = {}
        self._version: int | None = None

    async def record(self, name: str) -> TenantRecord | None:
        """None: the tenant has none, or the store has not answered yet."""
        if name not in self._records:
            try:
                async with self._guard.waiting():
                    self._records[name] = await self._store.tenant(name)
            except StoreFailed:
                return None
        return self._records[name]

    async def read_again(self, version: int) -> None:
        """Read what was asked for, unless that was done for this version of the directory. Raises StoreFailed."""
        if version != self._version:
            for name in list(self._records):
                self._records[name] = await self._store.tenant(name)
            self._version = version
