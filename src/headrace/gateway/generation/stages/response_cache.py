"""Answers a request from the response cache, or keeps its answer there. docs/caches.md has the rules."""

from __future__ import annotations

from headrace.core.clock import Clock
from headrace.gateway.cache.answer_cache import AnswerCache, Computation
from headrace.gateway.cache.control import NEITHER, NO_WISH, CacheControl, Question, entry_salt
from headrace.gateway.cache.recorded_answer import WholeAnswer
from headrace.gateway.generation.call import Call, CallNext, Ready
from headrace.gateway.generation.stages.kept_answers import RESPONSE, AnswerRecorder, answered_again, recorder_of, report_cache
from headrace.gateway.sessions.history import ContextFitting
from headrace.observe.store_metrics import CacheResult, KeptAnswer
from headrace.policy.routing.wishes import NO_WISHES


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
    is_on = call.principal.options.get("cache", config.enabled) is True
    if not is_on or (config.models and call.model.base_name not in config.models):
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
