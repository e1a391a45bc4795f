"""Keeps the directory of keys and tenants: in SQLite for one machine, in Redis for several."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.gateway.access.principal import READER_TIER, KeyLimits, KeyRole
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.stores.redis import PREFIX, RedisCalls, open_redis, read_script
from headrace.gateway.stores.sqlite_thread import SqliteForm, SqliteThread, open_sqlite
from headrace.gateway.stores.store import StoreProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """Times are Unix seconds; None: never.

    id               the same after a rotation
    tier             empty: the tenant's tier holds; READER_TIER: the role is reader, and the tenant's tier holds
    previous_sha256  digest before the last rotation, valid until previous_until; empty: there is none
    """

    id: str
    sha256: str
    first_chars: str
    tenant: str
    created_at: float
    user: str = ""
    tier: str = ""
    expires_at: float | None = None
    revoked_at: float | None = None
    previous_sha256: str = ""
    previous_until: float = 0.0
    limits: KeyLimits = field(default_factory=KeyLimits)

    @property
    def role(self) -> KeyRole:
        return KeyRole.READER if self.tier == READER_TIER else KeyRole.USER

    @property
    def own_tier(self) -> str:
        """Empty: the tenant's tier holds."""
        return "" if self.role is KeyRole.READER else self.tier

    @property
    def digests(self) -> tuple[str, ...]:
        return (self.sha256, self.previous_sha256) if self.previous_sha256 else (self.sha256,)

    def is_active(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def is_valid(self, sha256: str, now: float) -> bool:
        return self.is_active(now) and (sha256 == self.sha256 or now < self.previous_until)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord:
    """id: a later tenant of the same name has another one; "" in records of earlier versions."""

    name: str
    tier: str
    created_at: float
    id: str = ""
    monthly_budget: float | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """Never deleted.

    actor    user of the operating system, and the way: by command or through the admin socket
    action   "key.create", "tenant.set", "cache.purge", "deployment.scale", ...
    subject  a key's id, a tenant's name, a model, a replica, or "deployment"
    """

    time: float
    actor: str
    action: str
    subject: str
    detail: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredKey:
    key: KeyRecord
    tenant: TenantRecord

    @property
    def tier_name(self) -> str:
        return self.key.own_tier or self.tenant.tier


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """has_keys: a key was created at some time, valid or not"""

    version: int
    has_keys: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryChange:
    audit: AuditRecord
    keys: tuple[KeyRecord, ...] = ()
    removed_digests: tuple[str, ...] = ()
    tenants: tuple[TenantRecord, ...] = ()
    removed_tenants: tuple[str, ...] = ()

    @property
    def has_records(self) -> bool:
        return bool(self.keys or self.removed_digests or self.tenants or self.removed_tenants)


R = TypeVar("R", KeyRecord, TenantRecord)


def decoded(record: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(record, type=kind)


class KeyStore(Protocol):
    """Every method raises StoreFailed."""

    progress: StoreProgress

    async def state(self) -> DirectoryState: ...

    async def find(self, sha256: str) -> tuple[int, StoredKey | None]:
        """With the version of the directory; None: no such key."""
        ...

    async def record(self, kind: type[R], name: str) -> R | None: ...

    async def records(self, kind: type[R]) -> list[R]:
        """Oldest first."""
        ...

    async def audit(self, limit: int) -> list[AuditRecord]:
        """Newest first."""
        ...

    async def apply(self, change: DirectoryChange, *, expected: int, version: int) -> bool:
        """All or nothing. False: the directory has another version than expected. version: after the change; the same as before for an
        audit record alone
        """
        ...

    async def close(self) -> None: ...


VERSION, RECORDS, DIGESTS, TENANTS, AUDIT = (f"{PREFIX}keys:{name}" for name in ("version", "records", "digests", "tenants", "audit"))
"""Records of keys by id; ids by digest; records of tenants by name; audit records, oldest first."""

HASHES: Mapping[type, str] = {KeyRecord: RECORDS, TenantRecord: TENANTS}


class RedisKeys(RedisCalls):
    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._script = client.register_script(read_script(__file__))

    async def _call(self, name: str, argument: str) -> Any:
        return await self.answer(self._script(keys=[VERSION, RECORDS, DIGESTS, TENANTS, AUDIT], args=[name, argument]))

    async def state(self) -> DirectoryState:
        pipe = self._client.pipeline(transaction=True).get(VERSION).hlen(RECORDS)
        version, num_keys = await self.answer(pipe.execute())
        return DirectoryState(int(version or 0), num_keys > 0)

    async def find(self, sha256: str) -> tuple[int, StoredKey | None]:
        version, *records = await self._call("find", sha256)
        return int(version), StoredKey(decoded(records[0], KeyRecord), decoded(records[1], TenantRecord)) if records else None

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


T = TypeVar("T")

KEYS = SqliteForm(
    version=1,
    synchronous="FULL",
    statements=(
        "CREATE TABLE directory (version INTEGER NOT NULL)",
        "INSERT INTO directory VALUES (0)",
        "CREATE TABLE keys (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, record BLOB NOT NULL)",
        "CREATE TABLE digests (sha256 TEXT PRIMARY KEY, key_id TEXT NOT NULL)",
        "CREATE TABLE tenants (name TEXT PRIMARY KEY, record BLOB NOT NULL)",
        "CREATE TABLE audit (number INTEGER PRIMARY KEY AUTOINCREMENT, record BLOB NOT NULL)",
    ),
)
TABLES: Mapping[type, tuple[str, str]] = {KeyRecord: ("keys", "id"), TenantRecord: ("tenants", "name")}

FIND_ROW = (
    "SELECT keys.record, tenants.record FROM digests JOIN keys ON keys.id = digests.key_id JOIN tenants ON tenants.name = keys.tenant"
    " WHERE digests.sha256 = ?"
)


class SqliteKeys:
    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self._thread = SqliteThread(open_sqlite(path, KEYS))
        self._connection = self._thread.connection
        self.progress = self._thread.progress

    async def state(self) -> DirectoryState:
        return await self._read(lambda: DirectoryState(self._version(), bool(self._rows("SELECT 1 FROM keys LIMIT 1"))))

    async def find(self, sha256: str) -> tuple[int, StoredKey | None]:
        version, rows = await self._read(lambda: (self._version(), self._rows(FIND_ROW, sha256)))
        return version, StoredKey(decoded(rows[0][0], KeyRecord), decoded(rows[0][1], TenantRecord)) if rows else None

    async def record(self, kind: type[R], name: str) -> R | None:
        table, column = TABLES[kind]
        return next(iter(await self._records(kind, f"SELECT record FROM {table} WHERE {column} = ?", name)), None)

    async def records(self, kind: type[R]) -> list[R]:
        return await self._records(kind, f"SELECT record FROM {TABLES[kind][0]} ORDER BY rowid")

    async def audit(self, limit: int) -> list[AuditRecord]:
        return await self._records(AuditRecord, "SELECT record FROM audit ORDER BY number DESC LIMIT ?", limit)

    async def apply(self, change: DirectoryChange, *, expected: int, version: int) -> bool:
        return await self._thread.call(lambda: self._apply(change, expected, version))

    async def close(self) -> None:
        await self._thread.close()

    async def _read(self, work: Callable[[], T]) -> T:
        return await self._thread.call(work, is_read=True)

    async def _records(self, kind: type[T], query: str, *parameters: str | int) -> list[T]:
        return [decoded(record, kind) for (record,) in await self._read(lambda: self._rows(query, *parameters))]

    # -- in the thread -------------------------------------------------------------------------------------------------------------

    def _rows(self, query: str, *parameters: str | int) -> list[tuple[bytes, ...]]:
        return self._connection.execute(query, parameters).fetchall()

    def _version(self) -> int:
        version: int = self._connection.execute("SELECT version FROM directory").fetchone()[0]
        return version

    def _apply(self, change: DirectoryChange, expected: int, version: int) -> bool:
        if self._version() != expected:
            return False
        execute, encode = self._connection.execute, msgspec.json.encode
        execute("UPDATE directory SET version = ?", (version,))
        for digest in change.removed_digests:
            execute("DELETE FROM digests WHERE sha256 = ?", (digest,))
        for key in change.keys:
            row = (key.id, key.tenant, encode(key))
            execute("INSERT INTO keys VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET record = excluded.record", row)
            for digest in key.digests:
                execute("INSERT OR REPLACE INTO digests VALUES (?, ?)", (digest, key.id))
        for name in change.removed_tenants:
            execute("DELETE FROM tenants WHERE name = ?", (name,))
        for tenant in change.tenants:
            named = (tenant.name, encode(tenant))
            execute("INSERT INTO tenants VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET record = excluded.record", named)
        execute("INSERT INTO audit (record) VALUES (?)", (encode(change.audit),))
        return True


FILE = "keys.db"


def open_keys(state: str, store: StoreConfig) -> KeyStore | None:
    """state: existing folder; empty: None, for a gateway with only the keys of its configuration. Raises ConfigError."""
    if store.url:
        return RedisKeys(open_redis(store.url, password=store.password()))
    return SqliteKeys(str(Path(state) / FILE)) if state else None
