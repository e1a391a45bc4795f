"""Answers a request from the response cache, or keeps its answer there. docs/caches.md has the rules."""

from __future__ import annotations

from headrace.gateway.cache.answer_cache import Computation
from headrace.gateway.cache.control import NEITHER, NO_WISH, CacheControl, Question, entry_salt
from headrace.gateway.cache.recorded_answer import WholeAnswer
from headrace.gateway.generation.event_log import LAST_EVENT_ID
from headrace.gateway.generation.generation import CallNext, Generation
from headrace.gateway.generation.stages.kept_answers import AnswerRecorder, given_again, recorder_of, report_cache
from headrace.gateway.sessions.history import ContextFitting
from headrace.gateway.upstream.seam import Prepared
from headrace.observe.store_metrics import CacheResult, KeptAnswer


async def use_cache(generation: Generation, call_next: CallNext) -> Prepared:
    """Answer from the response cache, or record the answer for it. A failing cache raises nothing: the answer is computed."""
    question = _question(generation)
    if not _may_cache(generation, question):
        report_cache(generation, CacheResult.OFF)
        return await call_next()
    entry = CacheEntry(generation, _key_of(generation, question), question.control)
    generation.ends.callback(entry.end)
    if (found := await entry.find()) is not None:
        generation.exchange.record.cache_tier = "response"
        report_cache(generation, CacheResult.HIT, (b"age", b"%d" % generation.service.answer_cache.age_s(found)))
        return given_again(generation, found)
    report_cache(generation, CacheResult.MISS)
    prepared = await call_next()
    entry.record(prepared)
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


def _may_cache(generation: Generation, question: Question) -> bool:
    exchange, config, control = generation.exchange, generation.service.config.cache, question.control
    is_on = exchange.principal.options.get("cache", config.enabled) is True
    if not is_on or (config.models and question.model not in config.models):
        exchange.ignored += ["cache"] if control not in (NO_WISH, NEITHER) else []
        return False
    continues = exchange.header(LAST_EVENT_ID) is not None  # event by event, which is another way to get the rest of an answer
    is_kept = not (continues or question.has_prompt_logprobs or (control.no_cache and control.no_store))
    return is_kept and (question.is_deterministic or control.use_cache)


def _key_of(generation: Generation, question: Question) -> str:
    """The store's key: a hash of the question, the model's version, and those limits of the caller that bound the output."""
    ceiling = generation.reservation.ceiling(generation.price)
    bound = ceiling.deciding(has_max_tokens=question.sampling.get("max_tokens") is not None)
    salt = entry_salt(generation.exchange.principal.tenant_key, generation.parsed.cache_salt)
    return question.key(salt, f"{generation.model.upstream.version}/{bound}")


class CacheEntry:
    """One request's use of a cache entry: reading it, and writing or ending its computation."""

    def __init__(self, generation: Generation, key: str, control: CacheControl) -> None:
        self._generation, self._cache = generation, generation.service.answer_cache
        self._key, self._control = key, control
        self._computation: Computation | None = None
        self._recorder: AnswerRecorder | None = None

    async def find(self) -> WholeAnswer | None:
        """The cached answer, or the answer of an equal running request after waiting for it. None: the answer must be computed."""
        control = self._control
        if control.no_cache:
            return None
        found = await self._cache.find(self._key, max_age_s=control.s_maxage)
        if found is None and not control.no_store:
            waited = await self._cache.wait(self._key)
            if isinstance(waited, WholeAnswer):
                return waited
            self._computation = waited
        return found

    def record(self, prepared: Prepared) -> None:
        """Begin to record the answer. An answer by another model than the wanted one is not kept; waiting requests compute their own."""
        if self._generation.model is not self._generation.asked:
            self._end_computation()
        elif not self._control.no_store:
            self._recorder = recorder_of(self._generation, prepared, max_bytes=self._cache.max_entry_bytes)

    def end(self) -> None:
        """Store a whole answer, in the background. Otherwise the equal requests that wait compute their own."""
        if self._recorder is not None and self._recorder.is_whole:
            self._keep(self._recorder)
        self._end_computation()

    def _keep(self, recorder: AnswerRecorder) -> None:
        generation = self._generation
        answer = recorder.answer(generation.usage(), generation.service.unix_time())
        if answer is None:
            self._cache.metrics.kept(KeptAnswer.TOO_LARGE)
            return
        computation, self._computation = self._computation, None
        default_s = generation.service.config.cache.ttl_s
        ttl_s, tenant = min(default_s, self._control.ttl or default_s), generation.exchange.principal.tenant_key
        self._cache.keep(self._key, answer, tenant=tenant, ttl_s=ttl_s, computation=computation)

    def _end_computation(self) -> None:
        if self._computation is not None:
            self._cache.end(self._computation)
            self._computation = None
