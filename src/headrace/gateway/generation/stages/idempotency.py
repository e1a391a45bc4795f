"""Handles requests with an Idempotency-Key: keeps the first one's answer, and gives it to later ones. docs/caches.md has the rules."""

from __future__ import annotations

from headrace.core.clock import Clock
from headrace.core.errors import InvalidRequest
from headrace.gateway.cache.recorded_answer import WholeAnswer
from headrace.gateway.cache.replays import HEADER, KeyClaim, Replays, retry_key
from headrace.gateway.generation.call import Call, CallNext, Ready
from headrace.gateway.generation.event_log import HEADER as LAST_EVENT
from headrace.gateway.generation.stages.kept_answers import IDEMPOTENCY, AnswerRecorder, answered_again, recorder_of, report_cache
from headrace.gateway.http.errors import ClientLeft, SlowReader
from headrace.observe.store_metrics import AnswerCacheMetrics, CacheResult


async def answer_once(call: Call, call_next: CallNext, *, replays: Replays, metrics: AnswerCacheMetrics, unix_time: Clock) -> Ready:
    """Raises InvalidRequest, IdempotencyConflict while the first request runs, IdempotencyMismatch when it had another body, and
    Unavailable.
    """
    exchange = call.exchange
    key = retry_key(exchange.headers, call.principal.tenant_key)
    if not key:
        return await call_next(call)
    _check_can_be_kept(call)
    answer_or_claim = await replays.find(key, tenant=call.principal.tenant_key, body=exchange.body_digest)
    if isinstance(answer_or_claim, WholeAnswer):
        report_cache(call, metrics, CacheResult.OFF, (b"idempotent-replayed", b"true"))
        return answered_again(call, answer_or_claim, IDEMPOTENCY)
    first = FirstAnswer(call, answer_or_claim, replays, unix_time)
    call.ending.ends.callback(first.end)
    return first.recording(await call_next(call))


def _check_can_be_kept(call: Call) -> None:
    for other, is_given in ((LAST_EVENT, call.continues), ("prompt_logprobs", call.params.prompt_logprobs is not None)):
        if is_given:
            raise InvalidRequest(HEADER, f"no {other} beside it", None, "Such an answer is not kept for a retry.")


class FirstAnswer:
    def __init__(self, call: Call, claim: KeyClaim, replays: Replays, unix_time: Clock) -> None:
        self._call, self._claim, self._replays, self._unix_time = call, claim, replays, unix_time
        self._recorder: AnswerRecorder | None = None

    def recording(self, ready: Ready) -> Ready:
        """The answer is made to its end when the client leaves."""
        self._recorder, ready = recorder_of(ready, max_bytes=self._replays.max_entry_bytes)
        return ready.changed(outlives_client=self.outlives_client)

    def outlives_client(self) -> bool:
        return isinstance(self._call.exchange.end_reason, ClientLeft | SlowReader)

    def end(self) -> None:
        """Stores a whole answer, in the background; otherwise frees the key."""
        ending, recorder = self._call.ending, self._recorder
        if recorder is None or not recorder.is_whole or ending.is_refused_at_end:
            self._replays.free(self._claim)
            return
        answer = recorder.answer(ending.usage(), self._unix_time())
        self._replays.keep(self._claim, answer)
