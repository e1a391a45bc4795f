"""Answers that are given again: whether a request takes one, and whether its own is kept. Rules: docs/caches.md."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from headrace.core.errors import HeadraceError, InvalidRequest, ModelNotFound
from headrace.gateway.access.held_memory import Held
from headrace.gateway.cache.answer_cache import AnswerCache, Computation
from headrace.gateway.cache.control import NEITHER, NO_WISH, CacheControl, Question, entry_salt
from headrace.gateway.cache.recorded_answer import FORM, EventRecording, WholeAnswer, recorded_prepared
from headrace.gateway.cache.replays import HEADER, IDEMPOTENCY_KEY, KeyClaim, Replays, retry_key
from headrace.gateway.generation.answer_memory import HOLD_STEP_BYTES
from headrace.gateway.generation.event_log import HEADER as LAST_EVENT
from headrace.gateway.generation.event_log import LAST_EVENT_ID
from headrace.gateway.generation.generation import CallNext, Generation
from headrace.gateway.generation.stages.model_choice import headers_of
from headrace.gateway.http.errors import ClientLeft, SlowReader
from headrace.gateway.sessions.history import ContextFitting
from headrace.gateway.upstream.seam import OutputEvent, Prepared, TokenUsage
from headrace.observe.cache_metrics import CacheResult, KeptAnswer
from headrace.policy.admission.ladder import AdmissionStep


class AnswerRecorder:
    """The events of one request while they come. is_given_up: they are more than may be kept"""

    def __init__(self, prepared: Prepared, model: str, held: Held, *, max_bytes: int) -> None:
        self._prepared = prepared
        self._model = model
        self._prompts = [(prompt.num_tokens, prompt.text) for prompt in prepared.prompts]
        self._held = held
        self._max_bytes = max_bytes
        self._recording = EventRecording()
        self._num_bytes = sum(len(text) for _, text in self._prompts)
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
        """Whether every sequence has ended with a finish reason that a retry may be given: no error and no abort."""
        return self._num_ended == self._prepared.num_sequences

    def answer(self, usage: TokenUsage, now: float) -> WholeAnswer | None:
        """now: Unix seconds. None where it was too large."""
        if self.is_given_up:
            return None
        prepared, recording = self._prepared, self._recording
        return WholeAnswer(
            FORM,
            now,
            self._model,
            prepared.num_sequences,
            self._prompts,
            prepared.seed,
            list(prepared.ignored),
            tuple(usage),
            recording.events,
            recording.vocabularies,
        )

    def _hold(self) -> None:
        """Charge the bytes that have come; a budget without room ends the recording, not the request."""
        try:
            if self._num_bytes > self._max_bytes:
                self.is_given_up = True
            else:
                self._held.add(self._num_bytes - self._held_bytes)
                self._held_bytes = self._num_bytes
        except HeadraceError:
            self.is_given_up = True
        if self.is_given_up:
            self._recording = EventRecording()


async def reuse(generation: Generation, call_next: CallNext) -> Prepared:
    """Raises InvalidRequest for an Idempotency-Key that cannot be honoured, and what `Replays.find` raises."""
    own = AnswerReuse(generation)
    generation.ends.callback(own.end)
    if (found := await own.find(_question(generation))) is None:
        prepared = await call_next()
        if generation.model is not generation.asked:
            own.turn_off_cache()
    else:
        prepared = recorded_prepared(found)
        _give_again(generation, found)
    if (recorder := own.recorder(prepared)) is not None:
        generation.recorders.append(recorder)
        generation.outlives_client = own.outlives_client
    return prepared


def _question(generation: Generation) -> Question:
    parsed = generation.parsed
    return Question(
        model=generation.model.name,
        prompt=parsed.prompt,
        sampling=parsed.sampling,
        grammar=parsed.grammar,
        control=parsed.cache if parsed.fitting is ContextFitting.REFUSE else NEITHER,
    )


def _give_again(generation: Generation, answer: WholeAnswer) -> None:
    """A smaller model may have computed the answer."""
    exchange = generation.exchange
    with suppress(ModelNotFound):
        generation.model = generation.service.models.only(answer.model)
    exchange.record.model, exchange.record.seed = generation.model.name, answer.seed
    exchange.ignored += answer.ignored
    exchange.add_headers(*headers_of(generation.model, AdmissionStep.CACHED_ANSWER))


class AnswerReuse:
    """One request's part in it."""

    def __init__(self, generation: Generation) -> None:
        service = generation.service
        self._generation = generation
        self._exchange = generation.exchange
        self._cache: AnswerCache = service.answer_cache
        self._replays: Replays = service.replays
        self._config, self._idempotency = service.config.cache, service.config.idempotency
        self._continues = self._exchange.header(LAST_EVENT_ID) is not None
        """The stream may be continued event by event, which is another way to get the rest of an answer."""
        self._claim: KeyClaim | None = None
        self._computation: Computation | None = None
        self._key = ""
        self._ttl_s = 0.0
        self._recorder: AnswerRecorder | None = None

    def end(self) -> None:
        """Keep the answer if it is whole. What was claimed and is not kept is free for the next request."""
        if self._generation.is_refused_at_end:
            self._free_key()
        if self._recorder is not None and self._recorder.is_whole:
            self._keep(self._recorder)
        self._free_key()
        self.turn_off_cache()

    def _free_key(self) -> None:
        """The answer is not to be given to a retry: the next request with the Idempotency-Key is the first."""
        if self._claim is not None:
            claim, self._claim = self._claim, None
            self._replays.free(claim)

    # -- before anything is computed -----------------------------------------------------------------------------------------------

    async def find(self, question: Question) -> WholeAnswer | None:
        """An answer that is there already; None: it has to be computed. Raises as `reuse`."""
        record = self._exchange.record
        if (replayed := await self._replayed(question)) is not None:
            self._generation.is_replayed = True
            self._say(CacheResult.OFF, (b"idempotent-replayed", b"true"))
            record.cache_tier = "idempotency"
            return replayed
        if not self._may_cache(question):
            self._say(CacheResult.OFF)
            return None
        found = await self._cached(self._key_of(question), question.control)
        if found is None:
            self._say(CacheResult.MISS)
            return None
        self._say(CacheResult.HIT, (b"age", b"%d" % self._cache.age_s(found)))
        record.cache_tier = "response"
        self._key = ""  # it is kept already
        return found

    def _key_of(self, question: Question) -> str:
        """Name of the cached answer: made of the question, the model's version, and the caller's limits as far as they bound the output."""
        generation, salt = self._generation, self._generation.parsed.cache_salt
        ceiling = generation.admission.ceiling(generation.price)
        bound = ceiling.deciding(has_max_tokens=question.sampling.get("max_tokens") is not None)
        return question.key(entry_salt(self._exchange.principal.tenant_key, salt), f"{generation.model.upstream.version}/{bound}")

    async def _replayed(self, question: Question) -> WholeAnswer | None:
        """The first answer under the request's key; None where it has none, where it is the first, or where the header has no effect."""
        config, tenant = self._idempotency, self._exchange.principal.tenant_key
        key = retry_key(self._exchange, config)
        if not key:
            if not config.ttl_s and any(name == IDEMPOTENCY_KEY for name, _ in self._exchange.headers):
                self._exchange.ignored.append(HEADER)
            return None
        for other, is_given in ((LAST_EVENT, self._continues), ("prompt_logprobs", question.has_prompt_logprobs)):
            if is_given:
                raise InvalidRequest(HEADER, f"no {other} beside it", None, "Such an answer is not kept for a retry.")
        found = await self._replays.find(key, tenant=tenant, body=self._exchange.body_digest)
        if isinstance(found, WholeAnswer):
            return found
        self._claim = found
        return None

    def _may_cache(self, question: Question) -> bool:
        config, control = self._config, question.control
        is_on = self._exchange.principal.options.get("cache", config.enabled) is True
        if not is_on or (config.models and question.model not in config.models):
            self._exchange.ignored += ["cache"] if control not in (NO_WISH, NEITHER) else []
            return False
        is_kept = not (self._continues or question.has_prompt_logprobs or (control.no_cache and control.no_store))
        return is_kept and (question.is_deterministic or control.use_cache)

    async def _cached(self, key: str, control: CacheControl) -> WholeAnswer | None:
        """The cached answer, or that of an equal request that is running."""
        if not control.no_store:
            self._key, self._ttl_s = key, min(self._config.ttl_s, control.ttl or self._config.ttl_s)
        if control.no_cache:
            return None
        found = await self._cache.find(key, max_age_s=control.s_maxage)
        if found is None and not control.no_store:
            waited = await self._cache.wait(key)
            if isinstance(waited, WholeAnswer):
                return waited
            self._computation = waited
        return found

    def _say(self, result: CacheResult, *headers: tuple[bytes, bytes]) -> None:
        self._cache.metrics.request(result)
        self._exchange.add_headers((b"x-headrace-cache", result.encode()), *headers)

    # -- while it is computed ------------------------------------------------------------------------------------------------------

    def turn_off_cache(self) -> None:
        """Another model than the one that was asked for answers: its answer is not the one that an equal request means."""
        self._key = ""
        if self._computation is not None:
            self._cache.end(self._computation)
            self._computation = None

    def recorder(self, prepared: Prepared) -> AnswerRecorder | None:
        """Gets every event of the answer. None: nothing is kept."""
        if not (self._claim or self._key):
            return None
        most = max(self._replays.max_entry_bytes if self._claim else 0, self._cache.max_entry_bytes if self._key else 0)
        self._recorder = AnswerRecorder(prepared, self._generation.model.name, self._generation.held.answers, max_bytes=most)
        return self._recorder

    def outlives_client(self) -> bool:
        """An answer under an Idempotency-Key goes on without its client, for the retry."""
        return self._claim is not None and isinstance(self._exchange.end_reason, ClientLeft | SlowReader)

    # -- at the end ----------------------------------------------------------------------------------------------------------------

    def _keep(self, recorder: AnswerRecorder) -> None:
        """Returns at once."""
        answer = recorder.answer(self._generation.usage(), self._generation.service.unix_time())
        if self._claim is not None:
            claim, self._claim = self._claim, None
            self._replays.keep(claim, answer, ttl_s=self._idempotency.ttl_s)
        if self._key and answer is None:
            self._cache.metrics.kept(KeptAnswer.TOO_LARGE)
        elif self._key and answer is not None:
            computation, self._computation = self._computation, None
            self._cache.keep(self._key, answer, tenant=self._exchange.principal.tenant_key, ttl_s=self._ttl_s, computation=computation)
