"""Handles requests with an Idempotency-Key: keeps the first one's answer, and gives it to later ones. docs/caches.md has the rules."""

from __future__ import annotations

from headrace.core.errors import InvalidRequest
from headrace.gateway.cache.recorded_answer import WholeAnswer
from headrace.gateway.cache.replays import HEADER, IDEMPOTENCY_KEY, KeyClaim, retry_key
from headrace.gateway.generation.event_log import HEADER as LAST_EVENT
from headrace.gateway.generation.event_log import LAST_EVENT_ID
from headrace.gateway.generation.generation import CallNext, Generation
from headrace.gateway.generation.stages.kept_answers import AnswerRecorder, given_again, recorder_of, report_cache
from headrace.gateway.http.errors import ClientLeft, SlowReader
from headrace.gateway.upstream.seam import Prepared
from headrace.observe.store_metrics import CacheResult


async def answer_once(generation: Generation, call_next: CallNext) -> Prepared:
    """Answer a retry by the stored answer, or keep the first answer.

    Raises InvalidRequest for a malformed key or an answer that cannot be kept, IdempotencyConflict while the first request runs,
    IdempotencyMismatch when it had another body, and Unavailable when the store does not answer.
    """
    exchange, config = generation.exchange, generation.service.config.idempotency
    key = retry_key(exchange, config)
    if not key:
        if not config.ttl_s and any(name == IDEMPOTENCY_KEY for name, _ in exchange.headers):
            exchange.ignored.append(HEADER)
        return await call_next()
    _check_can_be_kept(generation)
    found = await generation.service.replays.find(key, tenant=exchange.principal.tenant_key, body=exchange.body_digest)
    if isinstance(found, WholeAnswer):
        generation.is_replayed = True
        exchange.record.cache_tier = "idempotency"
        report_cache(generation, CacheResult.OFF, (b"idempotent-replayed", b"true"))
        return given_again(generation, found)
    first = FirstAnswer(generation, found)
    generation.ends.callback(first.end)
    prepared = await call_next()
    first.record(prepared)
    return prepared


def _check_can_be_kept(generation: Generation) -> None:
    """Raises InvalidRequest for a request whose answer cannot be kept: a continued stream, or prompt log-probabilities."""
    continues = generation.exchange.header(LAST_EVENT_ID) is not None
    for other, is_given in ((LAST_EVENT, continues), ("prompt_logprobs", generation.client_params.prompt_logprobs is not None)):
        if is_given:
            raise InvalidRequest(HEADER, f"no {other} beside it", None, "Such an answer is not kept for a retry.")


class FirstAnswer:
    """The first answer under a key, which is kept for retries."""

    def __init__(self, generation: Generation, claim: KeyClaim) -> None:
        self._generation, self._claim = generation, claim
        self._recorder: AnswerRecorder | None = None

    def record(self, prepared: Prepared) -> None:
        generation = self._generation
        self._recorder = recorder_of(generation, prepared, max_bytes=generation.service.replays.max_entry_bytes)
        generation.outlives_client = self.outlives_client

    def outlives_client(self) -> bool:
        """Whether the client has left, so that the answer is finished for the retry."""
        return isinstance(self._generation.exchange.end_reason, ClientLeft | SlowReader)

    def end(self) -> None:
        """Store a whole answer, in the background. Otherwise free the key, and its next request is the first again."""
        generation, recorder, replays = self._generation, self._recorder, self._generation.service.replays
        if recorder is None or not recorder.is_whole or generation.is_refused_at_end:
            replays.free(self._claim)
            return
        answer = recorder.answer(generation.usage(), generation.service.unix_time())
        replays.keep(self._claim, answer, ttl_s=generation.service.config.idempotency.ttl_s)
