"""Records an answer and replays a recorded one, for the stages that keep answers. docs/caches.md has the rules."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from headrace.core.errors import HeadraceError, ModelNotFound, Unavailable
from headrace.gateway.access.memory_charges import MemoryCharge
from headrace.gateway.cache.recorded_answer import FORM, KEPT_USAGE, EventRecording, WholeAnswer, recorded_prepared
from headrace.gateway.generation.answer_memory import HOLD_STEP_BYTES
from headrace.gateway.generation.call import Call, Ending, Ready
from headrace.gateway.generation.stages.model_choice import show
from headrace.gateway.upstream.seam import OutputEvent, Prepared, TokenUsage
from headrace.gateway.upstream.served_models import ServedModel, UnreadableModel
from headrace.observe.store_metrics import AnswerCacheMetrics, CacheResult
from headrace.policy.admission import AdmissionOutcome

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
