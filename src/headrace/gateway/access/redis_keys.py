"""Keys and tenants in Redis (6.2 or later) or Valkey, for gateways on several machines.

They last as long as Redis keeps them: it needs persistence, and a `maxmemory-policy` that evicts no key without an expiry. Where it has
lost them, gateways go on wanting keys, and refuse all.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from headrace.gateway.access.key_store import AuditRecord, DirectoryChange, DirectoryState, KeyRecord, StoredKey, TenantRecord
from headrace.gateway.stores.redis_client import PREFIX, RedisCalls, open_redis

T = TypeVar("T")

VERSION, RECORDS, DIGESTS, TENANTS, AUDIT = (f"{PREFIX}keys:{name}" for name in ("version", "records", "digests", "tenants", "audit"))
"""The version of the directory; records of keys by id; ids by digest; records of tenants by name; audit records, oldest first."""

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
    """A `KeyStore`. Made by `open`; it connects with the first call."""

    def __init__(self, client: Any) -> None:
        """client: the package's asynchronous one"""
        super().__init__(client)
        self._find_script = client.register_script(FIND)
        self._apply_script = client.register_script(APPLY)

    @classmethod
    def open(cls, url: str, *, password: str | None) -> RedisKeys:
        """Raises ConfigError, as `open_redis` does."""
        return cls(open_redis(url, password=password))

    async def state(self) -> DirectoryState:
        pipe = self._client.pipeline(transaction=True).get(VERSION).hlen(RECORDS)
        version, num_keys = await self.answer(pipe.execute())
        return DirectoryState(int(version or 0), num_keys > 0)

    async def find(self, sha256: str) -> tuple[int, StoredKey | None]:
        version, *found = await self.answer(self._find_script(keys=[VERSION, RECORDS, DIGESTS, TENANTS], args=[sha256]))
        return int(version), StoredKey(_decoded(found[0], KeyRecord), _decoded(found[1], TenantRecord)) if found else None

    async def key(self, key_id: str) -> KeyRecord | None:
        record = await self.answer(self._client.hget(RECORDS, key_id))
        return None if record is None else _decoded(record, KeyRecord)

    async def keys(self) -> list[KeyRecord]:
        records = await self.answer(self._client.hvals(RECORDS))
        return sorted((_decoded(record, KeyRecord) for record in records), key=lambda key: (key.created_at, key.id))

    async def tenant(self, name: str) -> TenantRecord | None:
        record = await self.answer(self._client.hget(TENANTS, name))
        return None if record is None else _decoded(record, TenantRecord)

    async def tenants(self) -> list[TenantRecord]:
        records = await self.answer(self._client.hvals(TENANTS))
        return sorted((_decoded(record, TenantRecord) for record in records), key=lambda tenant: (tenant.created_at, tenant.name))

    async def audit(self, limit: int) -> list[AuditRecord]:
        records = await self.answer(self._client.lrange(AUDIT, -limit, -1))
        return [_decoded(record, AuditRecord) for record in reversed(records)]

    async def apply(self, change: DirectoryChange) -> bool:
        content = {
            "expected": str(change.expected),
            "version": str(change.version),
            "keys": [{"id": key.id, "record": _encoded(key), "digests": key.digests} for key in change.keys],
            "removed_digests": change.removed_digests,
            "tenants": [{"name": tenant.name, "record": _encoded(tenant)} for tenant in change.tenants],
            "removed_tenants": change.removed_tenants,
            "audit": _encoded(change.audit),
        }
        return bool(await self.answer(self._apply_script(keys=[VERSION, RECORDS, DIGESTS, TENANTS, AUDIT], args=[json.dumps(content)])))


def _encoded(record: object) -> str:
    return msgspec.json.encode(record).decode()


def _decoded(record: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(record, type=kind)
