"""Keeps keys and tenants in Redis (6.2 or later) or Valkey, for gateways on several machines.

Redis needs persistence, and a `maxmemory-policy` that evicts no key without an expiry. If Redis has lost the records, gateways still
require keys and refuse all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.gateway.access.key_records import AuditRecord, DirectoryChange, DirectoryState, KeyRecord, R, StoredKey, TenantRecord, decoded
from headrace.gateway.stores.redis import PREFIX, RedisCalls, read_script

VERSION, RECORDS, DIGESTS, TENANTS, AUDIT = (f"{PREFIX}keys:{name}" for name in ("version", "records", "digests", "tenants", "audit"))
"""The version of the directory; records of keys by id; ids by digest; records of tenants by name; audit records, oldest first."""

HASHES: Mapping[type, str] = {KeyRecord: RECORDS, TenantRecord: TENANTS}


class RedisKeys(RedisCalls):
    """A `KeyStore` in Redis, which connects at the first call."""

    def __init__(self, client: Any) -> None:
        """client: what `open_redis` made"""
        super().__init__(client)
        self._script = client.register_script(read_script(__file__))

    async def _call(self, name: str, argument: str) -> Any:
        return await self.answer(self._script(keys=[VERSION, RECORDS, DIGESTS, TENANTS, AUDIT], args=[name, argument]))

    async def state(self) -> DirectoryState:
        pipe = self._client.pipeline(transaction=True).get(VERSION).hlen(RECORDS)
        version, num_keys = await self.answer(pipe.execute())
        return DirectoryState(int(version or 0), num_keys > 0)

    async def find(self, sha256: str) -> tuple[int, StoredKey | None]:
        version, *found = await self._call("find", sha256)
        return int(version), StoredKey(decoded(found[0], KeyRecord), decoded(found[1], TenantRecord)) if found else None

    async def record(self, kind: type[R], name: str) -> R | None:
        record = await self.answer(self._client.hget(HASHES[kind], name))
        return None if record is None else decoded(record, kind)

    async def records(self, kind: type[R]) -> list[R]:
        records = await self.answer(self._client.hvals(HASHES[kind]))
        return sorted((decoded(record, kind) for record in records), key=lambda record: (record.created_at, record.id))

    async def audit(self, limit: int) -> list[AuditRecord]:
        records = await self.answer(self._client.lrange(AUDIT, -limit, -1))
        return [decoded(record, AuditRecord) for record in reversed(records)]

    async def apply(self, change: DirectoryChange, *, expected: int, version: int) -> bool:
        content = {
            "expected": str(expected),
            "version": str(version),
            "keys": [{"id": key.id, "record": _encoded(key), "digests": key.digests} for key in change.keys],
            "removed_digests": change.removed_digests,
            "tenants": [{"name": tenant.name, "record": _encoded(tenant)} for tenant in change.tenants],
            "removed_tenants": change.removed_tenants,
            "audit": _encoded(change.audit),
        }
        return bool(await self._call("apply", json.dumps(content)))


def _encoded(record: object) -> str:
    return msgspec.json.encode(record).decode()
