"""One request's part in answers that are given again: whether it takes one, and whether its own is kept.

`generation.run` calls this in order: `find` before the prompt is read, `recorder` for the events that come, `keep` at the end. Leaving the
`with` block ends what the request has claimed, however it ended. Rules: docs/caches.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.gateway.access.budget import Held
from headrace.gateway.cache.answer_cache import AnswerCache
from headrace.gateway.cache.control import NEITHER, NO_WISH, CacheControl, Question, entry_salt
from headrace.gateway.cache.flights import Flight
from headrace.gateway.cache.recorded_answer import FORM, EventRecording, WholeAnswer
from headrace.gateway.cache.replayed_stream import RecordedPrepared
from headrace.gateway.cache.replays import HEADER, IDEMPOTENCY_KEY, KeyClaim, Replays, retry_key
from headrace.gateway.generation.event_log import HEADER as LAST_EVENT
from headrace.gateway.generation.event_log import LAST_EVENT_ID
from headrace.gateway.generation.service import Service
from headrace.gateway.http.errors import ClientLeft, SlowReader
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.upstream.output_events import OutputEvent, TokenUsage
from headrace.gateway.upstream.seam import Prepared
from headrace.observe.cache_metrics import CacheResult, KeptAnswer

HOLD_STEP_BYTES = 16 << 10
"""A recording asks the memory budget each time it has grown by this many bytes."""


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


class AnswerReuse:
    """A context, around everything that a request does after its body was parsed."""

    def __init__(self, service: Service, exchange: Exchange, held: Held) -> None:
        self._service = service
        self._exchange = exchange
        self._held = held
        self._cache: AnswerCache = service.answer_cache
        self._replays: Replays = service.replays
        self._claim: KeyClaim | None = None
        self._flight: Flight | None = None
        self._key = ""
        self._ttl_s = 0.0
        self._recorder: AnswerRecorder | None = None
        self.is_replayed = False
        """The answer is that to an earlier request with the same Idempotency-Key: nothing new happened."""

    def __enter__(self) -> AnswerReuse:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """What was not kept is free for the next request."""
        self.free_key()
        if self._flight is not None:
            self._cache.flights.land(self._flight, None)

    # -- before anything is computed -----------------------------------------------------------------------------------------------

    async def find(self, question: Question, cache_salt: str, *, version: Callable[[], str]) -> RecordedPrepared | None:
        """An answer that is there already; None: it has to be computed.

        version  gives what `Question.key` wants; called where the response cache is looked at

        Raises InvalidRequest for an Idempotency-Key that cannot be honoured, and what `Replays.find` raises.
        """
        if (replayed := await self._replayed(question)) is not None:
            self.is_replayed = True
            self._say(CacheResult.OFF, (b"idempotent-replayed", b"true"))
            self._exchange.record.cache_tier = "idempotency"
            return RecordedPrepared(replayed)
        if not self._may_cache(question):
            self._say(CacheResult.OFF)
            return None
        found = await self._cached(question.key(entry_salt(self._exchange.principal.tenant_key, cache_salt), version()), question.control)
        if found is None:
            self._say(CacheResult.MISS)
            return None
        self._say(CacheResult.HIT, (b"age", b"%d" % self._cache.age_s(found)))
        self._exchange.record.cache_tier = "response"
        self._key = ""  # it is kept already
        return RecordedPrepared(found)

    async def _replayed(self, question: Question) -> WholeAnswer | None:
        """The first answer under the request's key; None where it has none, where it is the first, or where the header has no effect."""
        config, tenant = self._service.config.idempotency, self._exchange.principal.tenant_key
        key = retry_key(self._exchange, config)
        if not key:
            if not config.ttl_s and any(name == IDEMPOTENCY_KEY for name, _ in self._exchange.headers):
                self._exchange.ignored.append(HEADER)
            return None
        for other, is_given in ((LAST_EVENT, self._continues), ("prompt_logprobs", question.has_prompt_logprobs)):
            if is_given:
                raise InvalidRequest(HEADER, f"no {other} beside it", None, "Such an answer is not kept for a retry.")
        found = await self._replays.find(key, tenant=tenant, body=self._exchange.body_digest, ttl_s=config.ttl_s)
        if isinstance(found, WholeAnswer):
            return found
        self._claim = found
        return None

    @property
    def _continues(self) -> bool:
        """Whether the stream may be continued event by event, which is another way to get the rest of an answer."""
        return self._exchange.header(LAST_EVENT_ID) is not None

    def _may_cache(self, question: Question) -> bool:
        config, control = self._service.config.cache, question.control
        is_on = self._exchange.principal.options.get("cache", config.enabled) is True
        if not is_on or (config.models and question.model not in config.models):
            self._exchange.ignored += ["cache"] if control not in (NO_WISH, NEITHER) else []
            return False
        is_kept = not (self._continues or question.has_prompt_logprobs or (control.no_cache and control.no_store))
        return is_kept and (question.is_deterministic or control.use_cache)

    async def _cached(self, key: str, control: CacheControl) -> WholeAnswer | None:
        """The cached answer, or that of an equal request that is running."""
        config = self._service.config.cache
        if not control.no_store:
            self._key, self._ttl_s = key, min(config.ttl_s, control.ttl or config.ttl_s)
        if control.no_cache:
            return None
        found = await self._cache.find(key, max_age_s=control.s_maxage)
        if found is None and not control.no_store:
            waited = await self._cache.wait(key)
            if isinstance(waited, WholeAnswer):
                return waited
            self._flight = waited
        return found

    def _say(self, result: CacheResult, *headers: tuple[bytes, bytes]) -> None:
        self._cache.metrics.request(result)
        self._exchange.more_headers = (*self._exchange.more_headers, (b"x-headrace-cache", result.encode()), *headers)

    # -- while it is computed ------------------------------------------------------------------------------------------------------

    def turn_off_cache(self) -> None:
        """Another model than the one that was asked for answers: its answer is not the one that an equal request means."""
        self._key = ""
        if self._flight is not None:
            self._cache.flights.land(self._flight, None)
            self._flight = None

    def recorder(self, prepared: Prepared, model: str) -> AnswerRecorder | None:
        """Gets every event of the answer. None: nothing is kept. model: name of the one that computes it"""
        if not (self._claim or self._key):
            return None
        most = max(self._replays.max_entry_bytes if self._claim else 0, self._cache.max_entry_bytes if self._key else 0)
        self._recorder = AnswerRecorder(prepared, model, self._held, max_bytes=most)
        return self._recorder

    def cancels(self, cancel: Callable[[], None]) -> Callable[[], None]:
        """`cancel` for the end of the exchange. An answer under an Idempotency-Key goes on without its client, for the retry."""

        def end() -> None:
            if not self.outlives_client:
                cancel()

        return end

    @property
    def is_whole(self) -> bool:
        """Whether all of the answer is there to be kept."""
        return self._recorder is not None and self._recorder.is_whole

    @property
    def outlives_client(self) -> bool:
        return self._claim is not None and self._recorder is not None and isinstance(self._exchange.end_reason, ClientLeft | SlowReader)

    # -- at the end ----------------------------------------------------------------------------------------------------------------

    def free_key(self) -> None:
        """The answer is not to be given to a retry: the next request with the Idempotency-Key is the first."""
        if self._claim is not None:
            claim, self._claim = self._claim, None
            self._replays.free(claim)

    def keep(self, usage: TokenUsage) -> None:
        """Keep the answer, if it is whole. Returns at once."""
        recorder = self._recorder
        if recorder is None or not self.is_whole:
            return
        answer = recorder.answer(usage, self._service.unix_time())
        if self._claim is not None:
            claim, self._claim = self._claim, None
            self._replays.keep(claim, answer, ttl_s=self._service.config.idempotency.ttl_s)
        if self._key and answer is None:
            self._cache.metrics.kept(KeptAnswer.TOO_LARGE)
        elif self._key and answer is not None:
            flight, self._flight = self._flight, None
            self._cache.keep(self._key, answer, tenant=self._exchange.principal.tenant_key, ttl_s=self._ttl_s, flight=flight)
