"""Implements the response cache: keeps whole answers, keyed by everything that they depend on, and computes each at most once at a time.

`generation.stages.response_cache` decides which requests use it. A store that fails costs only the cache: equal requests still wait for one
`Computation`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from headrace.core.clock import Clock
from headrace.gateway.cache.recorded_answer import WholeAnswer, decode_answer, encode_answer
from headrace.gateway.stores.guarded_store import GuardedStore
from headrace.gateway.stores.open import Stores
from headrace.gateway.stores.store import Store, StoreFailed
from headrace.observe.store_metrics import AnswerCacheMetrics, KeptAnswer


@dataclass(slots=True, eq=False)
class Computation:
    """One answer that is being computed. ended: set when it is whole or has failed;  answer: None before that, and after a failure"""

    key: str
    answer: WholeAnswer | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


ANSWERS = "answers"
"""Name of their part of the stores."""

MAX_ANSWER_BYTES = 1 << 20
"""Bytes of one answer: a larger one is not cached."""

MAX_ANSWERS_BYTES = 64 << 20
"""Bytes of all cached answers, with what the store takes beside each: some 30,000 answers of 2 KiB. The oldest ones go first."""


def open_answer_store(stores: Stores) -> Store:
    """Raises ConfigError."""
    return stores.open(ANSWERS, stores.limits(entry=MAX_ANSWER_BYTES, total=MAX_ANSWERS_BYTES))


EQUAL_WAIT_S = 30.0
"""Seconds that a request waits for an equal one; then it is computed too."""


class AnswerCache:
    def __init__(self, store: GuardedStore, metrics: AnswerCacheMetrics, unix_time: Clock) -> None:
        """store: closed by `close` of the cache"""
        self.max_entry_bytes = MAX_ANSWER_BYTES
        self._store = store
        self.metrics = metrics
        self._unix_time = unix_time
        self._computing: dict[str, Computation] = {}

    async def close(self) -> None:
        await self._store.close()

    def age_s(self, answer: WholeAnswer) -> float:
        """Seconds since the answer was recorded; 0 if the clock went back."""
        return max(0.0, self._unix_time() - answer.recorded_at)

    async def find(self, key: str, *, max_age_s: float | None) -> WholeAnswer | None:
        """The stored answer, if it is no older than `max_age_s`. None also when the store fails."""
        try:
            value = await self._store.asked(lambda store: store.get(key))
        except StoreFailed:
            self.metrics.lookup_failed()
            return None
        answer = decode_answer(value)
        return None if answer is None or (max_age_s is not None and self.age_s(answer) > max_age_s) else answer

    @property
    def num_computing(self) -> int:
        """Number of answers that are being computed or written to the store."""
        return len(self._computing)

    async def wait(self, key: str) -> WholeAnswer | Computation | None:
        """Wait for the answer of an equal request that runs.

        Returns that answer; or, when no equal request runs, a new computation, which the caller must end in every case; or None after
        EQUAL_WAIT_S, when the caller computes its own answer without a computation.
        """
        try:
            async with asyncio.timeout(EQUAL_WAIT_S):
                while (computation := self._computing.get(key)) is not None:
                    await computation.ended.wait()
                    if computation.answer is not None:
                        return computation.answer
        except TimeoutError:
            return None
        computation = self._computing[key] = Computation(key)
        return computation

    def end(self, computation: Computation, answer: WholeAnswer | None = None) -> None:
        """Wake the requests that wait for a computation. answer: None after a failure; else requests find it here until it is stored"""
        computation.answer = answer
        computation.ended.set()
        if answer is None:
            self._forget(computation)

    def keep(self, key: str, answer: WholeAnswer, *, tenant: str, ttl_s: float, computation: Computation | None) -> None:
        """Write an answer in the background. computation: ended with this answer"""
        value = encode_answer(answer)
        if computation is not None:
            self.end(computation, answer)

        def ended(outcome: KeptAnswer) -> None:
            self.metrics.kept(outcome)
            if computation is not None:
                self._forget(computation)

        if len(value) > self.max_entry_bytes:
            ended(KeptAnswer.TOO_LARGE)
        else:
            self._store.write(
                lambda store: store.put(key, value, tenant=tenant, ttl_s=ttl_s),
                len(value),
                lambda failure: ended(KeptAnswer.KEPT if failure is None else KeptAnswer.FAILED),
            )

    def check(self) -> None:
        """Assert that no request is open: nothing is computed."""
        assert all(computation.ended.is_set() for computation in self._computing.values()), "a computation was not ended"

    def _forget(self, computation: Computation) -> None:
        if self._computing.get(computation.key) is computation:
            del self._computing[computation.key]
