"""Answers a request with an answer that is kept: of an earlier request with its Idempotency-Key, or of the response cache. Otherwise
records the answer, to keep it. docs/caches.md has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, InvalidRequest, ModelNotFound, Unavailable
from headrace.gateway.access.memory_charges import MemoryCharge
from headrace.gateway.cache.answer_cache import AnswerCache, Computation
from headrace.gateway.cache.control import NEITHER, NO_WISH, CacheControl, Question, entry_salt
from headrace.gateway.cache.recorded_answer import FORM, KEPT_USAGE, EventRecording, WholeAnswer, recorded_prepared
from headrace.gateway.cache.replays import HEADER, KeyClaim, Replays, retry_key
from headrace.gateway.generation.account import Ending
from headrace.gateway.generation.answer_memory import HOLD_STEP_BYTES
from headrace.gateway.generation.call import Call, CallNext, Ready
from headrace.gateway.generation.stages.model_choice import show
from headrace.gateway.http.errors import ClientLeft, SlowReader
from headrace.gateway.http.sse import LAST_EVENT
from headrace.gateway.sessions.history import ContextFitting
from headrace.gateway.upstream.seam import OutputEvent, Prepared, TokenUsage
from headrace.gateway.upstream.served_models import ServedModel, UnreadableModel
from headrace.observe.store_metrics import AnswerCacheMetrics, CacheResult, KeptAnswer
from headrace.policy.admission import AdmissionOutcome
from headrace.policy.routing.wishes import NO_WISHES

IDEMPOTENCY, RESPONSE = "idempotency", "response"


class AnswerRecorder:
    """max_bytes    size of the largest answer that a stage keeps
    is_given_up  the answer is too large, or the memory budget is full
    """

    def __init__(self, ending: Ending, prepared: Prepared, charge: MemoryCharge) -> None:
        self._ending, self._prepared = ending, prepared
        self._charge = charge
        self.max_bytes = 0
        self._recording = EventRecording()
        self._num_bytes = sum(len(prompt.text) for prompt in prepared.prompts)
        self._held_bytes = 0
        self._num_ended = 0
        self.is_given_up = False

    def add(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            self._num_ended += event.finish is not None and event.finish.is_answer
            if not self.is_given_up:
                self._num_bytes += self._recording.add(event)
        if self._num_bytes >= self._held_bytes + HOLD_STEP_BYTES and not self.is_given_up:
            self._hold()

    @property
    def is_whole(self) -> bool:
        return self._num_ended == self._prepared.num_sequences

    def answer(self, usage: TokenUsage, now: float) -> WholeAnswer | None:
        """None if recording was given up. now: Unix seconds"""
        if self.is_given_up:
            return None
        prepared, recording = self._ending.prepared or self._prepared, self._recording
        return WholeAnswer(
            FORM,
            now,
            self._ending.model.name,
            prepared.num_sequences,
            [(prompt.num_tokens, prompt.text) for prompt in prepared.prompts],
            prepared.seed,
            list(prepared.ignored),
            tuple([getattr(usage, name) for name in KEPT_USAGE]),
            recording.events,
            recording.vocabularies,
            usage.estimated_tokens,
        )

    def _hold(self) -> None:
        """A full memory budget ends the recording, not the request."""
        try:
            if self._num_bytes > self.max_bytes:
                self.is_given_up = True
            else:
                self._charge.add(self._num_bytes - self._held_bytes)
                self._held_bytes = self._num_bytes
        except HeadraceError:
            self.is_given_up = True
        if self.is_given_up:
            self._recording = EventRecording()


def recorder_of(ready: Ready, *, max_bytes: int) -> tuple[AnswerRecorder, Ready]:
    """Stages that keep the same answer share its recorder."""
    recorder = next((recorder for recorder in ready.recorders if isinstance(recorder, AnswerRecorder)), None)
    if recorder is None:
        recorder = AnswerRecorder(ready.call.ending, ready.prepared, ready.call.charges.answers)
        ready = ready.recorded_by(recorder)
    recorder.max_bytes = max(recorder.max_bytes, max_bytes)
    return recorder, ready


def answered_again(call: Call, answer: WholeAnswer, cache_tier: str) -> Ready:
    """The request's model becomes the answer's, which may be a fallback, or served no more."""
    call = call.answered_by(_model_of(call, answer.model))
    call.exchange.ignored += answer.ignored
    show(call.exchange, call.model, AdmissionOutcome.CACHED_ANSWER)
    return Ready(call=call, prepared=recorded_prepared(answer), cache_tier=cache_tier)


def _model_of(call: Call, name: str) -> ServedModel:
    """name: the answer's, of which an alias or a route may be the name now"""
    if name == call.model.name:
        return call.model
    with suppress(ModelNotFound, Unavailable):
        if (model := call.models.get(name)).name == name:
            return model
    return ServedModel(name, (), UnreadableModel(name, ()), call.created)


def report_cache(call: Call, metrics: AnswerCacheMetrics, result: CacheResult, *headers: tuple[bytes, bytes]) -> None:
    metrics.request(result)
    call.exchange.add_headers((b"x-headrace-cache", result.encode()), *headers)


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


async def use_cache(call: Call, call_next: CallNext, *, cache: AnswerCache, unix_time: Clock) -> Ready:
    """A failing cache raises nothing: the answer is computed."""
    question = _question(call)
    if not _may_cache(call, question):
        report_cache(call, cache.metrics, CacheResult.OFF)
        return await call_next(call)
    entry = CacheEntry(call, cache, _key_of(call, question), question.control, unix_time)
    call.ending.ends.callback(entry.end)
    if (answer := await entry.find()) is not None:
        report_cache(call, cache.metrics, CacheResult.HIT, (b"age", b"%d" % cache.age_s(answer)))
        return answered_again(call, answer, RESPONSE)
    report_cache(call, cache.metrics, CacheResult.MISS)
    return entry.recording(await call_next(call))


def _question(call: Call) -> Question:
    parsed = call.parsed
    return Question(
        model=call.model.name,
        prompt=parsed.prompt,
        sampling=parsed.sampling,
        grammar=parsed.grammar,
        control=parsed.cache if parsed.fitting is ContextFitting.REFUSE else NEITHER,
    )


def _may_cache(call: Call, question: Question) -> bool:
    exchange, config, control = call.exchange, call.config.cache, question.control
    if call.principal.options.get("cache", config.enabled) is not True:
        exchange.ignored += ["cache"] if control not in (NO_WISH, NEITHER) else []
        return False
    is_kept = not (call.continues or question.has_prompt_logprobs or (control.no_cache and control.no_store))
    return is_kept and (question.is_deterministic or control.use_cache)


def _key_of(call: Call, question: Question) -> str:
    ceiling = call.reservation.ceiling(call.highest_price)
    bound = ceiling.deciding(has_max_tokens=question.sampling.get("max_tokens") is not None)
    salt = entry_salt(call.principal.tenant_key, call.parsed.cache_salt)
    servers = call.parsed.routing.of_servers
    return question.key(salt, f"{call.model.upstream.version}/{bound}{'' if servers == NO_WISHES else servers}")


class CacheEntry:
    def __init__(self, call: Call, cache: AnswerCache, key: str, control: CacheControl, unix_time: Clock) -> None:
        self._call, self._cache, self._key, self._control, self._unix_time = call, cache, key, control, unix_time
        self._computation: Computation | None = None
        self._recorder: AnswerRecorder | None = None

    async def find(self) -> WholeAnswer | None:
        """Waits for the answer of an equal running request. None: the answer must be computed."""
        control = self._control
        if control.no_cache:
            return None
        answer = await self._cache.find(self._key, max_age_s=control.s_maxage)
        if answer is None and not control.no_store:
            waited = await self._cache.wait(self._key)
            if isinstance(waited, WholeAnswer):
                return waited
            self._computation = waited
        return answer

    def recording(self, ready: Ready) -> Ready:
        """An answer by another model than the wanted one is not kept; waiting requests compute their own."""
        if ready.call.model is not self._call.asked:
            self._end_computation()
        elif not self._control.no_store:
            self._recorder, ready = recorder_of(ready, max_bytes=self._cache.max_entry_bytes)
        return ready

    def end(self) -> None:
        if self._recorder is not None and self._recorder.is_whole and self._call.ending.model is self._call.asked:
            self._keep(self._recorder)
        self._end_computation()

    def _keep(self, recorder: AnswerRecorder) -> None:
        call = self._call
        answer = recorder.answer(call.ending.usage(), self._unix_time())
        if answer is None:
            self._cache.metrics.kept(KeptAnswer.TOO_LARGE)
            return
        computation, self._computation = self._computation, None
        default_s = call.config.cache.ttl_s
        ttl_s, tenant = min(default_s, self._control.ttl or default_s), call.principal.tenant_key
        self._cache.keep(self._key, answer, tenant=tenant, ttl_s=ttl_s, computation=computation)

    def _end_computation(self) -> None:
        if self._computation is not None:
            self._cache.end(self._computation)
            self._computation = None
