"""Tests what administration decides about keys and tenants, in both stores alike."""

from __future__ import annotations

import asyncio
import hashlib
import stat
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.clock import SteadyUnixTime
from headrace.core.errors import ConfigError, InvalidRequest
from headrace.gateway.access.admin_requests import shown
from headrace.gateway.access.administration import Administration, IssuedKey, NewKey, NewTenant, TenantChange, digest
from headrace.gateway.access.key_store import KeyRecord, KeyStore, RedisKeys, TenantRecord, open_keys
from headrace.gateway.access.principal import READER_TIER, KeyLimits, KeyRole
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.stores.redis import open_redis
from headrace.gateway.stores.store import StoreFailed
from headrace.policy.limits.tier import BUILT_IN_TIERS

pytestmark = pytest.mark.socket

HOUR, YEAR = 3600.0, 365 * 86_400.0


class ManualTime:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def unix_time() -> ManualTime:
    return ManualTime()


@pytest.fixture(params=["file", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[KeyStore]:
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    opened = open_keys(str(tmp_path), StoreConfig(url=url))
    assert opened is not None
    yield opened
    await opened.close()


@pytest.fixture
def admin(store: KeyStore, unix_time: ManualTime) -> Administration:
    return Administration(store, tiers=BUILT_IN_TIERS, unix_time=unix_time, actor="ada, by command")


async def found(store: KeyStore, issued: IssuedKey) -> KeyRecord | None:
    _, stored = await store.find(digest(issued.key))
    return None if stored is None else stored.key


async def refusal(work: Awaitable[Any]) -> str:
    with pytest.raises(InvalidRequest) as raised:
        await work
    return str(raised.value)


async def test_a_key_is_256_random_bits_and_only_its_digest_is_kept(admin: Administration, store: KeyStore) -> None:
    issued = await admin.create_key(NewKey(tenant="acme", tier="free"))
    assert issued.key.startswith("hr-")
    assert len(issued.key) == 3 + 43, "32 bytes in base64"
    assert issued.record.sha256 == hashlib.sha256(issued.key.encode()).hexdigest()
    assert issued.record.first_chars == issued.key[:8]
    assert issued.key not in repr(issued)
    assert await found(store, issued) == issued.record
    kept = repr([await store.records(KeyRecord), await store.records(TenantRecord), await store.audit(10)])
    assert issued.key not in kept
    assert issued.key[9:] not in kept


async def test_a_file_is_closed_to_other_users_and_the_key_is_not_in_it(tmp_path: Path, unix_time: ManualTime) -> None:
    store = open_keys(str(tmp_path), StoreConfig())
    assert store is not None
    issued = await Administration(store, tiers=BUILT_IN_TIERS, unix_time=unix_time, actor="x").create_key(NewKey(tenant="acme"))
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert issued.key[9:].encode() not in file.read_bytes()
    await store.close()


async def test_the_first_key_makes_the_tenant_and_later_keys_may_have_a_tier_of_their_own(
    admin: Administration, unix_time: ManualTime
) -> None:
    first = await admin.create_key(NewKey(tenant="acme", tier="free"))
    assert (await admin.tenant("acme")).tier == "free"
    assert first.record.tier == "", "a change of the tenant's tier is a change of this key's"
    unix_time.now += 1.0
    second = await admin.create_key(NewKey(tenant="acme", tier="premium", user="bob"))
    assert (second.record.tier, second.record.user) == ("premium", "bob")
    assert (await admin.tenant("acme")).tier == "free"
    await admin.create_key(NewKey(tenant="other"))
    assert (await admin.tenant("other")).tier == "standard"
    assert [key.id for key in await admin.keys("acme")] == [first.record.id, second.record.id]


LIMITED_READERS = [NewKey(tenant="a", role="reader", **more) for more in ({"tier": "free"}, {"budget": 1.0}, {"models": ("m",)})]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (NewKey(tenant="a/b"), "tenant: expected 1 to 128 letters, digits and . _ -"),
        (NewKey(tenant=""), "tenant: expected"),
        (NewKey(tenant="a", user="x y"), "user: expected"),
        (NewKey(tenant="a", tier="gold"), "tier: expected one of enterprise, premium, standard, free, batch"),
        (NewKey(tenant="a", expires_s=0.0), "expires: expected"),
        (NewKey(tenant="a", expires_s=float("nan")), "expires: expected"),
        (NewKey(tenant="a", budget=-1.0), "budget: expected above 0"),
        (NewKey(tenant="a", budget=float("inf")), "budget: expected above 0"),
        (NewKey(tenant="a", requests_per_minute=0), "requests_per_minute: expected"),
        (NewKey(tenant="a", role="root"), "role: expected one of user, reader"),
        *((wanted, "role: expected user beside tier, budget or models") for wanted in LIMITED_READERS),
        (NewKey(tenant="a", tier=READER_TIER), "tier: expected one of"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(tmp_path: Path, unix_time: ManualTime, wanted: NewKey, reason: str) -> None:
    store = open_keys(str(tmp_path), StoreConfig())
    assert store is not None
    admin = Administration(store, tiers=BUILT_IN_TIERS, unix_time=unix_time, actor="x")
    assert reason in await refusal(admin.create_key(wanted))
    assert [await admin.keys(), await admin.tenants(), await admin.audit(1)] == [[], [], []]
    await admin.close()


async def test_a_revoked_key_stays_revoked(admin: Administration, store: KeyStore, unix_time: ManualTime) -> None:
    issued = await admin.create_key(NewKey(tenant="acme"))
    revoked = await admin.revoke_key(issued.record.id)
    unix_time.now += HOUR
    assert await admin.revoke_key(issued.record.id) == revoked
    assert not revoked.is_active(unix_time.now)
    assert "neither revoked nor expired" in await refusal(admin.rotate_key(issued.record.id))
    assert "the id of a key" in await refusal(admin.revoke_key("key-unknown"))
    assert (await store.state()).has_keys, "a server that had a key wants one for good"


async def test_a_rotated_key_goes_on_for_its_grace_and_no_earlier_one_does(
    admin: Administration, store: KeyStore, unix_time: ManualTime
) -> None:
    first = await admin.create_key(NewKey(tenant="acme", budget=5.0))
    second = await admin.rotate_key(first.record.id, grace_s=HOUR)
    assert (second.record.id, second.record.limits) == (first.record.id, first.record.limits)
    record = await found(store, first)
    assert record is not None
    assert record.is_valid(digest(first.key), unix_time.now + HOUR - 1)
    assert not record.is_valid(digest(first.key), unix_time.now + HOUR)
    assert record.is_valid(digest(second.key), unix_time.now + YEAR)
    third = await admin.rotate_key(first.record.id)
    assert [await found(store, issued) is not None for issued in (first, second, third)] == [False, False, True]


async def test_a_tenant_is_changed_value_by_value(admin: Administration) -> None:
    await admin.create_tenant(NewTenant(name="acme", tier="free", options={"log_prompts": True}))
    changed = await admin.set_tenant("acme", TenantChange(budget=7.5, options={"context_fitting": "summary"}))
    assert (changed.tier, changed.monthly_budget) == ("free", 7.5)
    assert changed.options == {"log_prompts": True, "context_fitting": "summary"}
    changed = await admin.set_tenant("acme", TenantChange(budget=0.0, options={"log_prompts": None}))
    assert (changed.monthly_budget, changed.options) == (None, {"context_fitting": "summary"})
    assert "a name that is not taken" in await refusal(admin.create_tenant(NewTenant(name="acme")))
    for options, reason in (({"x": 1}, "names of log_prompts, cache, context_fitting"), ({"log_prompts": 1}, "one of true, false")):
        assert reason in await refusal(admin.set_tenant("acme", TenantChange(options=options)))  # type: ignore[arg-type]  # no bool
    assert "the name of a tenant" in await refusal(admin.set_tenant("unknown", TenantChange(tier="free")))


async def test_a_tenant_with_active_keys_is_removed_only_with_them(admin: Administration, store: KeyStore) -> None:
    issued = await admin.create_key(NewKey(tenant="acme"))
    assert "a tenant without active keys" in await refusal(admin.remove_tenant("acme"))
    await admin.remove_tenant("acme", revoke_keys=True)
    assert await found(store, issued) is None
    await admin.create_tenant(NewTenant(name="acme"))
    record = await found(store, issued)
    assert record is not None
    assert record.revoked_at is not None, "a tenant of the same name gets no key back"


async def test_every_change_leaves_a_record_without_the_key(admin: Administration, unix_time: ManualTime) -> None:
    issued = await admin.create_key(NewKey(tenant="acme", tier="free", user="bob"))
    rotated = await admin.rotate_key(issued.record.id, grace_s=60.0)
    await admin.revoke_key(issued.record.id)
    await admin.set_tenant("acme", TenantChange(tier="premium"))
    await admin.remove_tenant("acme")
    records = shown(await admin.audit(100), unix_time.now)
    assert [record["action"] for record in records] == ["tenant.remove", "tenant.set", "key.revoke", "key.rotate", "key.create"]
    assert {record["actor"] for record in records} == {"ada, by command"}
    assert {record["time"] for record in records} == {unix_time.now}
    assert records[1]["detail"] == {"tier": "premium"}
    assert records[4]["detail"] == {"tenant": "acme", "user": "bob", "created_tenant": {"tier": "free"}}
    text = repr([records, shown(rotated.record, unix_time.now)])
    assert not any(part in text for issue in (issued, rotated) for part in (issue.key, issue.record.sha256))
    assert len(await admin.audit(2)) == 2


async def test_changes_at_once_are_all_made(store: KeyStore, unix_time: ManualTime) -> None:
    """Of changes that were decided on the same directory one is written; the others are decided again."""
    admins = [Administration(store, tiers=BUILT_IN_TIERS, unix_time=unix_time, actor=f"a{index}") for index in range(8)]
    await asyncio.gather(*(admin.create_key(NewKey(tenant="acme", tier="free")) for admin in admins))
    assert len(await store.records(KeyRecord)) == len(await store.audit(100)) == 8
    assert len(await store.records(TenantRecord)) == 1
    assert sum("created_tenant" in record.detail for record in await store.audit(100)) == 1


async def test_a_lost_directory_comes_back_with_another_version(redis_url: str, unix_time: ManualTime) -> None:
    store = RedisKeys(open_redis(redis_url))
    admin = Administration(store, tiers=BUILT_IN_TIERS, unix_time=unix_time, actor="x")
    await admin.create_key(NewKey(tenant="acme"))
    before = (await store.state()).version
    await store._client.flushall()
    unix_time.now += 1.0
    await admin.create_key(NewKey(tenant="acme"))
    assert (await store.state()).version > before
    await store.close()


async def test_a_store_that_is_down_fails_by_its_own_error(tmp_path: Path, unix_time: ManualTime) -> None:
    pytest.importorskip("redis")
    store = RedisKeys(open_redis(f"unix://{tmp_path}/nothing"))
    with pytest.raises(StoreFailed):
        await Administration(store, tiers=BUILT_IN_TIERS, unix_time=unix_time, actor="x").create_key(NewKey(tenant="acme"))
    await store.close()


@dataclass(frozen=True, kw_only=True)
class RecordBeforeRoles:
    """What a gateway of the version before roles decodes from a stored key, by the same rules for unknown fields."""

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


RECORD = (
    b'{"id":"key-1","sha256":"aa","first_chars":"hr-3uNvQ","tenant":"acme","created_at":1.0,"user":"","tier":"%b","expires_at":null,'
    b'"revoked_at":null,"previous_sha256":"","previous_until":0.0,"limits":{"monthly_budget":null,"requests_per_minute":null,"models":[]}%b}'
)


@pytest.mark.pure
def test_a_gateway_that_knows_no_roles_refuses_a_reader_and_its_commands_make_no_user_of_one() -> None:
    def seen_before(record: bytes) -> tuple[RecordBeforeRoles, bool]:
        """With whether the key is used: not while its tier is unknown, whatever the configuration has."""
        old = msgspec.json.decode(record, type=RecordBeforeRoles)
        return old, (old.tier or "standard") in {"role", "reader", *BUILT_IN_TIERS}

    reader = KeyRecord(id="key-1", sha256="aa", first_chars="hr-3uNvQ", tenant="acme", created_at=1.0, tier=READER_TIER)
    stored = RECORD % (b"role:reader", b"")
    assert msgspec.json.encode(reader) == stored
    old, is_used = seen_before(stored)
    assert not is_used
    rotated = msgspec.json.encode(replace(old, sha256="bb", previous_sha256="aa", previous_until=9.0))
    assert msgspec.json.decode(rotated, type=KeyRecord).role is KeyRole.READER
    assert seen_before(RECORD % (b"", b',"role":"reader"'))[1], "why the role is no field of its own"
    for tier in (b"", b"free"):
        assert seen_before(RECORD % (tier, b""))[1]
        user = msgspec.json.decode(RECORD % (tier, b""), type=KeyRecord)
        assert (user.role, user.own_tier) == (KeyRole.USER, tier.decode()), "keys of that version stay what they are"


async def test_a_readers_role_outlives_rotation_and_is_in_the_audit(admin: Administration, store: KeyStore, unix_time: ManualTime) -> None:
    issued = await admin.create_key(NewKey(tenant="acme", role="reader", requests_per_minute=5))
    rotated = await admin.rotate_key(issued.record.id, grace_s=HOUR)
    for key in (issued, rotated):
        record = await found(store, key)
        assert record is not None
        assert (record.role, record.own_tier, record.limits.requests_per_minute) == (KeyRole.READER, "", 5)
    line = shown(rotated.record, unix_time.now)
    assert (line["role"], line["tier"]) == ("reader", None)
    assert (await admin.audit(2))[1].detail == {
        "tenant": "acme",
        "role": "reader",
        "requests_per_minute": 5,
        "created_tenant": {"tier": "standard"},
    }


@pytest.mark.pure
def test_a_file_that_cannot_be_opened_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state: .* cannot be used as a store"):
        open_keys(str(tmp_path / "missing"), StoreConfig())
    assert open_keys("", StoreConfig()) is None, "a bare gateway has the keys of its configuration"


@pytest.mark.pure
@pytest.mark.parametrize("jump", [-YEAR, -HOUR, HOUR, YEAR])
def test_a_jump_of_the_clock_revives_no_expired_key(jump: float) -> None:
    unix, monotonic = ManualTime(), ManualTime()
    now = SteadyUnixTime(unix, monotonic)
    started = now()
    for moved in (unix, monotonic):
        moved.now += 10.0
    assert now() == started + 10.0
    unix.now += jump
    assert now() >= started + 10.0
    assert now() == started + 10.0 + max(jump, 0.0), "and a forward jump is followed"
    unix.now -= jump
    assert now() == started + 10.0, "a jump that was taken back leaves nothing"
