"""Checks the names of sessions, and reads and writes the sessions of one gateway.

A store that fails or is slow means 503: an answer without the history would answer another question.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

import msgspec

from headrace.core.clock import Clock
from headrace.core.errors import InvalidRequest, RequestTooLarge, Unavailable
from headrace.gateway.http.errors import SessionConflict, UnknownSession
from headrace.gateway.sessions.history import (
    Message,
    StoredSession,
    entry_of,
    messages_json,
    packed,
    stored_in,
    unpacked,
)
from headrace.gateway.stores.config import Stores
from headrace.gateway.stores.guard import GuardedStore
from headrace.gateway.stores.lease import EntryLease
from headrace.gateway.stores.store import EntryTooLarge, Store, StoreFailed
from headrace.observe.store_metrics import SessionMetrics, TurnOutcome

HEADER = "x-session-id"
RAW_HEADER = HEADER.encode()

METADATA_FIELD = "metadata.session_id"
SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

T = TypeVar("T")

CLAIM_WAIT_S = 0.5
"""A turn that waits longer for the one before it is refused with 409."""

CLAIM_CHECK_S = 0.02

LEASE_S, RENEW_S = 15.0, 5.0
"""LEASE_S after its gateway's death a claim is gone."""

INLINE_BYTES = 32 << 10
"""Histories up to this size are packed on the event loop, in half a millisecond; larger ones in a thread."""

MAX_SESSION_BYTES = 1 << 20

MAX_SESSIONS_BYTES = 256 << 20
"""Compressed; one tenant may fill `limits.max_tenant_share` of it."""

_DOWN = "The store of sessions does not answer; send the request again."
_BUSY = "Another request of this session is being answered; send this one again after it."


def checked_session_id(field: str, given: object) -> str:
    """Raises InvalidRequest without the value: the id alone gives access to a session."""
    if not isinstance(given, str) or SESSION_ID.fullmatch(given) is None:
        raise InvalidRequest(field, "1..128 of A-Z a-z 0-9 . _ : -", None)
    return given


@dataclass(frozen=True, slots=True)
class SessionKey:
    tenant: str
    session_id: str

    @property
    def entry(self) -> str:
        return f"{tenant_digest(self.tenant)}:ctx:{self.session_id}"

    @property
    def claim(self) -> str:
        return f"{tenant_digest(self.tenant)}:claim:{self.session_id}"


def tenant_digest(tenant: str) -> str:
    return blake2b(tenant.encode(), digest_size=16, person=b"headrace-session").hexdigest()


@dataclass(frozen=True, slots=True)
class ReadSession:
    """entry: bytes in the store; None: a new session"""

    entry: bytes | None = None
    stored: StoredSession | None = None
    messages: Sequence[Message] = ()


class Sessions:
    def __init__(self, store: GuardedStore | None, *, ttl_s: float, metrics: SessionMetrics, unix_time: Clock) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self.metrics = metrics
        self.unix_time = unix_time

    @property
    def num_pending(self) -> int:
        return 0 if self._store is None else self._store.num_writing

    def check_on(self, field: str) -> None:
        if self._store is None:
            raise InvalidRequest(field, "no session: this server keeps none (sessions.ttl_s is 0)", None, "Send the whole conversation.")

    @property
    def store(self) -> GuardedStore:
        assert self._store is not None
        return self._store

    # -- what a turn does ----------------------------------------------------------------------------------------------------------

    def lease(self, key: SessionKey) -> EntryLease:
        return EntryLease(self.store, key.claim, os.urandom(12), tenant=key.tenant, lasts_s=LEASE_S)

    async def claimed(self, key: SessionKey, lease: EntryLease) -> ReadSession:
        """Raises SessionConflict or Unavailable."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + CLAIM_WAIT_S
        while True:
            session = await self._asked(lambda store: self._claimed(store, key, lease))
            if session is not None:
                return await self._read(session)
            if loop.time() >= give_up_at:
                self.metrics.turns(TurnOutcome.CONFLICT)
                raise SessionConflict(_BUSY)
            await asyncio.sleep(CLAIM_CHECK_S)

    async def _claimed(self, store: Store, key: SessionKey, lease: EntryLease) -> ReadSession | None:
        """None: another turn has the claim."""
        return ReadSession(await store.get(key.entry)) if await lease.claim(store) else None

    async def keep(self, key: SessionKey, session: ReadSession, stored: StoredSession, messages: Sequence[Message]) -> None:
        """Raises SessionConflict if another request has changed it, Unavailable, or RequestTooLarge."""
        entry = entry_of(await self._packed(stored, messages))
        try:
            is_kept = await self._asked(lambda store: self._swapped(store, key, entry, session.entry))
        except EntryTooLarge:
            self.metrics.turns(TurnOutcome.TOO_LARGE)
            raise self.too_large() from None
        self.metrics.turns(TurnOutcome.KEPT if is_kept else TurnOutcome.CONFLICT)
        if not is_kept:
            raise SessionConflict("Another request of this session was answered meanwhile, so this answer is not in the session.")

    async def _swapped(self, store: Store, key: SessionKey, entry: bytes, expected: bytes | None) -> bool:
        """A session that has vanished since it was read (expired, or the store was emptied) is written again."""
        for state in dict.fromkeys((expected, None)):
            if await store.swap(key.entry, entry, expected=state, tenant=key.tenant, ttl_s=self._ttl_s):
                return True
        return False

    def too_large(self) -> RequestTooLarge:
        limit = f"a session of at most {MAX_SESSION_BYTES} bytes"
        return RequestTooLarge("messages", limit, None, "Begin another session, or set context_fitting, which drops the oldest turns.")

    # -- what the paths below /v1/sessions do -------------------------------------------------------------------------------------

    async def shown(self, key: SessionKey) -> tuple[StoredSession, Sequence[Message]]:
        """Raises UnknownSession or Unavailable."""
        session = await self._read(ReadSession(await self._asked(lambda store: store.get(key.entry))))
        if session.stored is None:
            raise UnknownSession("There is no such session.")
        return session.stored, session.messages

    async def delete(self, key: SessionKey) -> None:
        """Raises UnknownSession, SessionConflict while a turn runs, or Unavailable."""
        lease = self.lease(key)
        session = await self.claimed(key, lease)
        try:
            if session.entry is None:
                raise UnknownSession("There is no such session.")
            await self._asked(lambda store: store.delete(key.entry))
        finally:
            lease.free()

    # -- the store -----------------------------------------------------------------------------------------------------------------

    async def _asked(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """Raises EntryTooLarge, or Unavailable for every other failure."""
        try:
            return await self.store.asked(work)
        except EntryTooLarge:
            raise
        except StoreFailed:
            self.metrics.turns(TurnOutcome.FAILED)
            raise Unavailable(_DOWN, retry_after_s=1.0) from None

    async def _read(self, session: ReadSession) -> ReadSession:
        stored = stored_in(session.entry)
        if stored is None:
            return session
        if len(stored.packed) <= INLINE_BYTES // 8:
            return ReadSession(session.entry, stored, unpacked(stored))
        return ReadSession(session.entry, stored, await asyncio.to_thread(unpacked, stored))

    async def _packed(self, stored: StoredSession, messages: Sequence[Message]) -> StoredSession:
        made = messages_json(messages)
        value = packed(made) if len(made) <= INLINE_BYTES else await asyncio.to_thread(packed, made)
        return msgspec.structs.replace(stored, packed=value)


NAME = "sessions"

ENTRY_MARGIN = 2
"""The answer of a session's last turn is not counted before it is given."""


def open_session_store(stores: Stores) -> Store:
    """Raises ConfigError."""
    return stores.open(NAME, stores.limits(entry=ENTRY_MARGIN * MAX_SESSION_BYTES, total=MAX_SESSIONS_BYTES))
