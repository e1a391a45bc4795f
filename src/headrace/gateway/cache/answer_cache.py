"""The response cache: whole answers, keyed by everything that they depend on, and at most one `Computation` of each at a time.

Which requests use it: `generation.stages.response_cache`. A store that fails costs only the cache: equal requests still wait for one
another.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from headrace.core.clock import Clock
from headrace.gateway.cache.recorded_answer import WholeAnswer, decode_answer, encode_answer
from headrace.gateway.stores.guarded_store import GuardedStore
from headrace.gateway.stores.open import Stores
from headrace.gateway.stores.store import Store, StoreFailed
from headrace.observe.cache_metrics import AnswerCacheMetrics, KeptAnswer


@dataclass(slots=True, eq=False)
class Computation:
    """One answer. answer: None until it is whole, and for ever where it failed;  ended: set once it is whole or has failed"""

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
        """store: closed by `close`"""
        self.max_entry_bytes = MAX_ANSWER_BYTES
        self._store = store
        self.metrics = metrics
        self._unix_time = unix_time
        self._computing: dict[str, Computation] = {}

    async def close(self) -> None:
        await self._store.close()

    def age_s(self, answer: WholeAnswer) -> float:
        """Never negative, whatever the clock did."""
        return max(0.0, self._unix_time() - answer.recorded_at)

    async def find(self, key: str, *, max_age_s: float | None) -> WholeAnswer | None:
        """The answer that is kept, no older than `max_age_s`; None too where the store fails."""
        try:
            value = await self._store.asked(lambda store: store.get(key))
        except StoreFailed:
            self.metrics.lookup_failed()
            return None
        answer = decode_answer(value)
        return None if answer is None or (max_age_s is not None and self.age_s(answer) > max_age_s) else answer

    @property
    def num_computing(self) -> int:
        """Answers that are computed, or that are whole and not in the store yet."""
        return len(self._computing)

    async def wait(self, key: str) -> WholeAnswer | Computation | None:
        """The answer of an equal request, once it is whole; where none is computed, a computation that the caller has to end, whatever
        happens; None where one takes too long, so that this request is computed beside it."""
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
        """Wake the requests that wait for it. answer: None where it failed; else the computation stays until its answer is in the store"""
        computation.answer = answer
        computation.ended.set()
        if answer is None:
            self._forget(computation)

    def keep(self, key: str, answer: WholeAnswer, *, tenant: str, ttl_s: float, computation: Computation | None) -> None:
        """Write an answer, in the background. computation: ends with it"""
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
