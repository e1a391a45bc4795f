"""The response cache: whole answers, keyed by everything that they depend on, each computed at most once at a time. A store that
fails costs only the cache: equal requests still wait for one `Computation`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from headrace.core.clock import Clock
from headrace.gateway.cache.recorded_answer import WholeAnswer, decode_answer, encode_answer
from headrace.gateway.stores.config import Stores
from headrace.gateway.stores.guard import GuardedStore
from headrace.gateway.stores.store import Store, StoreFailed
from headrace.observe.store_metrics import AnswerCacheMetrics, KeptAnswer


@dataclass(slots=True, eq=False)
class Computation:
    key: str
    answer: WholeAnswer | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


ANSWERS = "answers"

MAX_ANSWER_BYTES = 1 << 20

MAX_ANSWERS_BYTES = 64 << 20


def open_answer_store(stores: Stores) -> Store:
    """Raises ConfigError."""
    return stores.open(ANSWERS, stores.limits(entry=MAX_ANSWER_BYTES, total=MAX_ANSWERS_BYTES))


EQUAL_WAIT_S = 30.0


class AnswerCache:
    def __init__(self, store: GuardedStore, metrics: AnswerCacheMetrics, unix_time: Clock) -> None:
        self.max_entry_bytes = MAX_ANSWER_BYTES
        self._store = store
        self.metrics = metrics
        self._unix_time = unix_time
        self._computing: dict[str, Computation] = {}

    def age_s(self, answer: WholeAnswer) -> float:
        return max(0.0, self._unix_time() - answer.recorded_at)

    async def find(self, key: str, *, max_age_s: float | None) -> WholeAnswer | None:
        try:
            value = await self._store.asked(lambda store: store.get(key))
        except StoreFailed:
            self.metrics.lookup_failed()
            return None
        answer = decode_answer(value)
        return None if answer is None or (max_age_s is not None and self.age_s(answer) > max_age_s) else answer

    @property
    def num_computing(self) -> int:
        return len(self._computing)

    async def wait(self, key: str) -> WholeAnswer | Computation | None:
        """An equal request's answer; or a new computation, which the caller must end in every case; or None after EQUAL_WAIT_S."""
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
        computation.answer = answer
        computation.ended.set()
        if answer is None:
            self._forget(computation)

    def keep(self, key: str, answer: WholeAnswer, *, tenant: str, ttl_s: float, computation: Computation | None) -> None:
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
        assert all(computation.ended.is_set() for computation in self._computing.values()), "a computation was not ended"

    def _forget(self, computation: Computation) -> None:
        if self._computing.get(computation.key) is computation:
            del self._computing[computation.key]
