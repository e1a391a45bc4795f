"""Answers retries with an Idempotency-Key.

no entry --claim--> running, for LEASE_S at a time, renewed --keep--> the answer, for TTL_S
    ^                    |
    `-- free: it failed, or its gateway died and the lease ran out
"""

from __future__ import annotations

import logging
import os
import re
from hashlib import blake2b

import msgspec

from headrace.core.errors import InvalidRequest, Unavailable
from headrace.gateway.cache.recorded_answer import FORM, WholeAnswer
from headrace.gateway.http.asgi import Headers
from headrace.gateway.http.errors import IdempotencyConflict, IdempotencyMismatch
from headrace.gateway.stores.config import Stores
from headrace.gateway.stores.guard import GuardedStore
from headrace.gateway.stores.lease import EntryLease
from headrace.gateway.stores.store import Store, StoredEntry, StoreFailed, StoreLimits, entry_in
from headrace.observe.store_metrics import ReplayMetrics, ReplayOutcome

log = logging.getLogger("headrace.gateway")

HEADER = "Idempotency-Key"
IDEMPOTENCY_KEY = HEADER.lower().encode()

_KEY = re.compile(rb"[\x21-\x7e]{1,255}")

TTL_S = 86_400.0
"""A day, as clients of Stripe's API expect."""

LEASE_S = 10.0

RENEW_S = 3.0

BUSY_RETRY_S = 1.0

REPLAYS = "replays"


MAX_REPLAYS_BYTES = 64 << 20

MAX_REPLAY_BYTES = 1 << 20
"""A retry of a request with a larger answer gets 409."""


def replay_limits(stores: Stores) -> StoreLimits:
    return stores.limits(entry=MAX_REPLAY_BYTES, total=MAX_REPLAYS_BYTES)


def open_replay_store(stores: Stores) -> Store:
    """Raises ConfigError."""
    return stores.open(REPLAYS, replay_limits(stores))


class ReplayEntry(StoredEntry, frozen=True):
    """body    digest of the path, the session and the body of the request
    answer  None while the request runs; None with an empty claim: the answer was too large to be kept
    """

    body: bytes
    claim: bytes = b""
    answer: WholeAnswer | None = None


_encode, _decoder = msgspec.msgpack.encode, msgspec.msgpack.Decoder(ReplayEntry)


def replay_key(given: bytes, tenant: str) -> str:
    if _KEY.fullmatch(given) is None:
        raise InvalidRequest(HEADER, "1..255 visible ASCII characters", len(given), "A UUID is a good one.")
    name = tenant.encode()
    digest = blake2b(len(name).to_bytes(8, "little") + name, digest_size=32, person=b"headrace-replay")
    digest.update(given)
    return digest.hexdigest()


def retry_key(headers: Headers, tenant: str) -> str:
    """Raises InvalidRequest for a malformed key."""
    given = [value for name, value in headers if name == IDEMPOTENCY_KEY]
    if not given:
        return ""
    return replay_key(given[0] if len(given) == 1 else b"", tenant)


class KeyClaim:
    def __init__(self, store: GuardedStore, key: str, *, tenant: str, body: bytes) -> None:
        self.key = key
        self.body = body
        self.lease = EntryLease(store, key, _encode(ReplayEntry(FORM, body, os.urandom(12))), tenant=tenant, lasts_s=LEASE_S)
        self.answer: WholeAnswer | None = None


class Replays:
    def __init__(self, store: GuardedStore, metrics: ReplayMetrics, *, limits: StoreLimits) -> None:
        self._limits = limits
        self._store = store
        self._metrics = metrics
        self._claims: dict[str, KeyClaim] = {}

    @property
    def max_entry_bytes(self) -> int:
        return min(self._limits.entry, self._limits.tenant)

    @property
    def claims(self) -> list[KeyClaim]:
        return list(self._claims.values())

    async def find(self, key: str, *, tenant: str, body: bytes) -> WholeAnswer | KeyClaim:
        """Raises IdempotencyConflict while the first request runs, or when its answer was too large; IdempotencyMismatch when it had
        another body; Unavailable when the store does not answer.
        """
        if (writing := self._claims.get(key)) is not None:
            return self._of_claim(writing, body)
        claim = KeyClaim(self._store, key, tenant=tenant, body=body)
        try:
            entry = await self._store.asked(lambda store: self._claimed(store, claim))
        except StoreFailed:
            self._metrics.count(ReplayOutcome.FAILED)
            raise Unavailable("The store of answers does not answer; send the request again.", retry_after_s=BUSY_RETRY_S) from None
        if entry is not None:
            return self._of_entry(entry, body)
        self._metrics.count(ReplayOutcome.FIRST)
        self._claims[key] = claim
        claim.lease.begin_renewing(RENEW_S)
        return claim

    def keep(self, claim: KeyClaim, answer: WholeAnswer | None) -> None:
        """answer None: too large, and a retry gets an error that says so"""
        value = _encode(ReplayEntry(FORM, claim.body, b"", answer))
        if len(value) > self.max_entry_bytes:
            answer, value = None, _encode(ReplayEntry(FORM, claim.body))
        claim.answer = answer
        claim.lease.end()
        self._store.write(lambda store: claim.lease.replace(store, value, ttl_s=TTL_S), len(value), lambda _: self._forget(claim))

    def free(self, claim: KeyClaim) -> None:
        claim.lease.free(lambda _: self._forget(claim))

    def check(self) -> None:
        assert all(claim.lease.is_ended for claim in self._claims.values()), "a claim was not ended"

    def _forget(self, claim: KeyClaim) -> None:
        if self._claims.get(claim.key) is claim:
            del self._claims[claim.key]

    def _of_claim(self, claim: KeyClaim, body: bytes) -> WholeAnswer:
        if claim.body != body:
            raise self._mismatch()
        if claim.answer is None:
            raise self._busy()
        self._metrics.count(ReplayOutcome.REPLAYED)
        return claim.answer

    def _of_entry(self, entry: ReplayEntry, body: bytes) -> WholeAnswer:
        if entry.body != body:
            raise self._mismatch()
        if entry.claim:
            raise self._busy()
        if entry.answer is None:
            self._metrics.count(ReplayOutcome.TOO_LARGE)
            raise IdempotencyConflict(f"The answer to the first request with this {HEADER} was too large to be kept.")
        self._metrics.count(ReplayOutcome.REPLAYED)
        return entry.answer

    def _mismatch(self) -> IdempotencyMismatch:
        self._metrics.count(ReplayOutcome.MISMATCH)
        return IdempotencyMismatch(
            f"This {HEADER} was used for a request with another path, body or session: use a new one for each request."
        )

    def _busy(self) -> IdempotencyConflict:
        self._metrics.count(ReplayOutcome.RUNNING)
        return IdempotencyConflict(
            f"A request with this {HEADER} is running; its answer comes under the same key.", retry_after_s=BUSY_RETRY_S
        )

    # -- in the store --------------------------------------------------------------------------------------------------------------

    async def _claimed(self, store: Store, claim: KeyClaim) -> ReplayEntry | None:
        """None: there was no entry, and the claim has been stored."""
        while True:
            value = await store.get(claim.key)
            if (entry := entry_in(value, _decoder, FORM)) is not None:
                return entry
            if await claim.lease.claim(store, expected=value):
                return None
