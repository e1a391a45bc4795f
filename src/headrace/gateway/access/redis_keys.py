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
from headrace.gateway.stores.redis import PREFIX, RedisCalls

VERSION, RECORDS, DIGESTS, TENANTS, AUDIT = (f"{PREFIX}keys:{name}" for name in ("version", "records", "digests", "tenants", "audit"))
"""The version of the directory; records of keys by id; ids by digest; records of tenants by name; audit records, oldest first."""

HASHES: Mapping[type, str] = {KeyRecord: RECORDS, TenantRecord: TENANTS}
FIND = """
local version = redis.call('GET', KEYS[1]) or '0'
local id = redis.call('HGET', KEYS[3], ARGV[1])
local record = id and redis.call('HGET', KEYS[2], id)
local tenant = record and redis.call('HGET', KEYS[4], cjson.decode(record).tenant)
return tenant and {version, record, tenant} or {version}
"""
APPLY = """
local change = cjson.decode(ARGV[1])
if (redis.call('GET', KEYS[1]) or '0') ~= change.expected then return 0 end
redis.call('SET', KEYS[1], change.version)
for _, digest in ipairs(change.removed_digests) do redis.call('HDEL', KEYS[3], digest) end
for _, key in ipairs(change.keys) do
  redis.call('HSET', KEYS[2], key.id, key.record)
  for _, digest in ipairs(key.digests) do redis.call('HSET', KEYS[3], digest, key.id) end
end
for _, name in ipairs(change.removed_tenants) do redis.call('HDEL', KEYS[4], name) end
for _, tenant in ipairs(change.tenants) do redis.call('HSET', KEYS[4], tenant.name, tenant.record) end
redis.call('RPUSH', KEYS[5], change.audit)
return 1
"""


class RedisKeys(RedisCalls):
    """A `KeyStore` in Redis, which connects at the first call."""

    def __init__(self, client: Any) -> None:
        """client: what `open_redis` made"""
        super().__init__(client)
        self._find_script = client.register_script(FIND)
        self._apply_script = client.register_script(APPLY)

    async def state(self) -> DirectoryState:
        pipe = self._client.pipeline(transaction=True).get(VERSION).hlen(RECORDS)
        version, num_keys = await self.answer(pipe.execute())
        return DirectoryState(int(version or 0), num_keys > 0)

    async def find(self, sha256: str) -> tuple[int, StoredKey | None]:
        version, *found = await self.answer(self._find_script(keys=[VERSION, RECORDS, DIGESTS, TENANTS], args=[sha256]))
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
        return bool(await self.answer(self._apply_script(keys=[VERSION, RECORDS, DIGESTS, TENANTS, AUDIT], args=[json.dumps(content)])))


def _encoded(record: object) -> str:
    return msgspec.json.encode(record).decode()
