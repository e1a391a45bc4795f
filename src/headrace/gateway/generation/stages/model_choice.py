"""Chooses the model that answers a request: the one that it asks for, or a fallback while that is busy or cannot answer (admission). A
request's wishes to models say which of them may answer, and in which order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, InvalidRequest, Overloaded, RequestTooLarge, TextQueueFull, Unavailable
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.generation.call import Call, CallNext, Ready
from headrace.gateway.http.asgi import Headers
from headrace.gateway.http.errors import ContentRefused, ContextLengthExceeded, RateLimitExceeded, forget_frames, naming
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.sessions.history import ContextFitting
from headrace.gateway.upstream.generation_request import Conversation
from headrace.gateway.upstream.served_models import ServedModel
from headrace.observe.finished_request import ModelStep
from headrace.observe.metrics import Metrics
from headrace.policy.admission import AdmissionOutcome, QueueState, TenantTurn
from headrace.policy.fallbacks import FAILED, SENTENCES, ChoiceTerms, FallbackReason, ModelFacts, NextModel, next_model
from headrace.policy.routing.wishes import NO_WISHES, ModelFigures, excess, ordered, server_places

MODEL_HEADER, REASON_HEADER = b"x-headrace-model", b"x-headrace-reason"
"""Headers of every generating answer but a continued stream, a refusal too."""

CONTEXT_HEADER = b"x-headrace-context"

MAX_TOKEN_CHARS = 128
"""Most characters in one token of the tokenizers of large models."""


class ModelBusy(Overloaded):
    """The model's queue is longer than the request may wait, or than it is to wait where a fallback may answer."""


async def choose_model(call: Call, call_next: CallNext, *, clock: Clock, open_requests: OpenRequests, metrics: Metrics) -> Ready:
    """A continued stream keeps its model. Raises ModelBusy, and InvalidRequest for wishes that leave no model."""
    return await call_next(call if call.earlier is not None else ModelChoice(wished(call), clock, open_requests, metrics).first())


class ModelChoice:
    """The models that one request is given to, one after another. At each moment it is counted as a user of one of them, and as unsent
    there.
    """

    def __init__(self, call: Call, clock: Clock, open_requests: OpenRequests, metrics: Metrics) -> None:
        self._call, self._clock, self._open_requests, self._metrics = call, clock, open_requests, metrics
        self._models = {model.name: model for model in (*[model for _, model in call.fallbacks], call.asked)}
        self._ignored = tuple(call.exchange.ignored)
        self._tried: list[str] = []
        self._looked_at: set[str] = set()
        self._met: tuple[FallbackReason, ...] = ()
        self._error: HeadraceError | None = None
        goal_ms = call.principal.tier.ttft_ms
        self._terms = ChoiceTerms(
            _least_tokens(call), call.parsed.priority, call.config.admission, None if goal_ms is None else goal_ms / 1000
        )

    def first(self) -> Call:
        """Raises ModelBusy."""
        asked = self._call.asked
        return self._go(self._arrive(asked, wished_queue(self._call, asked)))

    def after(self, error: HeadraceError) -> Call:
        """The call at the next model. Raises an error where none is left: that of the asked model, if it was asked."""
        call, reasons = self._call, reasons_of(error)
        is_asked = call.model.name == call.asked.name
        if not reasons and (is_asked or not isinstance(error, InvalidRequest)):
            raise error
        self._tried.append(call.model.name)
        if is_asked:
            self._error = error
        forget_frames(error)
        self._met = (*reasons, *self._met)
        why = SENTENCES[reasons[0]] if reasons else "It cannot take a request of this form."
        call.ending.steps.append(ModelStep(call.model.name, False, why))
        return self._go(self._next({}))

    def _admit(self) -> None:
        """The engines of the model are to answer after all, and foreign servers came first when it was chosen. Raises ModelBusy."""
        exchange, model, unsent = self._call.exchange, self._call.model, self._call.unsent
        if model.name not in self._looked_at:
            next_model = self._arrive(model, model.upstream.queue(self._terms.priority, model.unsent))
            if next_model.model != model.name:
                raise _busy(model, next_model)
            exchange.more_headers = with_outcome(exchange.more_headers, next_model.outcome)
        assert unsent is not None
        unsent.count()

    def _arrive(self, model: ServedModel, queue: QueueState | None) -> NextModel:
        """The request arrives at this queue of the model, which may be busy."""
        overload, turn, now, rules = model.overload[self._terms.priority], self._turn(model), self._clock(), self._terms.rules
        if queue is not None:
            self._looked_at.add(model.name)
            queue = overload.arrive(queue, rules, num_open=turn.num_open, now=now).at_turn(turn)
        next_model = self._next({model.name: queue})
        if next_model.model is None and queue is not None:
            overload.refuse(queue, rules, now=now)
        return next_model

    def _next(self, arrived: Mapping[str, QueueState | None]) -> NextModel:
        """arrived: the queue of a model that counts the request"""

        def facts(name: str) -> ModelFacts:
            model = self._models[name]
            queue = arrived[name] if name in arrived else self._queue(model)
            if not self._call.fallbacks:  # it goes to its model, whatever that is able to do
                return ModelFacts(name, is_alive=True, max_model_len=None, queue=queue)
            return ModelFacts(name, model.is_alive, model.upstream.max_model_len, queue)

        asked = None if self._error is not None else facts(self._call.asked.name)
        left = [(reason, model.name) for reason, model in self._call.fallbacks if model.name not in self._tried]
        return next_model(asked, left, self._met, self._terms, facts)

    def _queue(self, model: ServedModel) -> QueueState | None:
        whole = wished_queue(self._call, model)
        if whole is None:
            return None
        self._looked_at.add(model.name)
        return model.overload[self._terms.priority].seen(whole, self._clock()).at_turn(self._turn(model))

    def _turn(self, model: ServedModel) -> TenantTurn:
        return model.users.turn_of(self._call.principal.tenant, num_new=int(model.users is not self._call.model.users))

    def _go(self, next_model: NextModel) -> Call:
        call, exchange = self._call, self._call.exchange
        if call.fallbacks or call.ending.steps:
            call.ending.steps += [ModelStep(*step) for step in next_model.steps]
        if call.unsent is not None:
            call.unsent.uncount()
        if next_model.model is None:
            if self._tried != [call.asked.name]:
                call.ending.answered_by(call.asked)
                show(exchange, call.asked, AdmissionOutcome.REFUSED)
            error = self._error or _busy(call.asked, next_model)
            raise naming(error, [name for name in self._tried if name != call.asked.name])
        model = self._models[next_model.model]
        if model.users is not call.model.users:
            self._open_requests.use(exchange.request_id, call.principal.tenant, model.users)
        if next_model.reason is not None:
            self._metrics.fallbacks.labels(call.asked.base_name, model.base_name, next_model.reason).inc()
        exchange.ignored = list(self._ignored)
        show(exchange, model, next_model.outcome)
        unsent = model.unsent.add(self._terms.priority)
        call.ending.ends.callback(unsent.uncount)
        left = [reason for reason, other in call.fallbacks if other.name not in (*self._tried, model.name) and other.is_alive]
        self._call = call.answered_by(model).changed(
            unsent=unsent,
            admit=self._admit if call.parsed.routing.order else None,  # else no foreign server comes before engines that may answer
            has_fallback=not {None, FAILED}.isdisjoint(left),
        )
        return self._call.changed(after=self.after) if call.fallbacks else self._call


def _busy(model: ServedModel, next_model: NextModel) -> ModelBusy:
    state = "full" if next_model.retry_after_s else "long"  # and a fallback was preferred to it
    return ModelBusy(f"The queue of the model {model.name} is {state}; try again later.", retry_after_s=next_model.retry_after_s)


def reasons_of(error: HeadraceError) -> tuple[FallbackReason, ...]:
    """For which a fallback may answer; empty: another model would not help. What a model refuses since it is busy, it fails to answer."""
    if isinstance(error, ContextLengthExceeded | RequestTooLarge):
        is_of_tier = isinstance(error, ContextLengthExceeded) and error.is_of_tier
        return () if is_of_tier else (FallbackReason.CONTEXT_WINDOW,)
    if isinstance(error, ContentRefused):
        return (FallbackReason.CONTENT_POLICY,)
    if isinstance(error, Overloaded):
        return () if isinstance(error, RateLimitExceeded | TextQueueFull) else (FallbackReason.BUSY, FAILED)
    return (FAILED,) if isinstance(error, Unavailable) else ()


def _least_tokens(call: Call) -> int:
    """A lower bound of one sequence's prompt and output. A conversation that is shortened to fit has no least prompt. 0 without a choice"""
    if not call.fallbacks:
        return 0
    prompt, max_tokens = call.parsed.prompt, call.parsed.sampling.get("max_tokens") or 1
    if isinstance(prompt, Conversation):
        contents = [message.get("content") for message in prompt.messages if call.parsed.fitting is ContextFitting.REFUSE]
        return max_tokens + sum([len(content) for content in contents if isinstance(content, str)]) // MAX_TOKEN_CHARS
    return max_tokens + max([len(each) // (MAX_TOKEN_CHARS if isinstance(each, str) else 1) for each in prompt.prompts])


def show(exchange: Exchange, model: ServedModel, outcome: AdmissionOutcome) -> None:
    """What an earlier model has put into the headers goes."""
    kept = [header for header in exchange.more_headers if header[0] not in (MODEL_HEADER, REASON_HEADER, CONTEXT_HEADER)]
    exchange.more_headers = (*kept, (MODEL_HEADER, model.name.encode()), (REASON_HEADER, outcome.encode()))


def with_outcome(headers: Headers, outcome: AdmissionOutcome) -> Headers:
    return tuple((name, outcome.encode() if name == REASON_HEADER else value) for name, value in headers)


def wished(call: Call) -> Call:
    """The call with the model to ask first as `asked`, and the others as its fallbacks. Those that may not answer become steps of the
    `Ending`.

    Raises InvalidRequest for a server that none of them has, and where none may answer.
    """
    wishes = call.parsed.routing
    if wishes._replace(models=(), fallbacks=()) == NO_WISHES:
        return call
    models = [call.asked, *[model for reason, model in call.fallbacks if reason is None]]
    _check_servers(call, models)
    by_name: dict[str, ServedModel] = {}
    for model in models:
        if reason := why_not(call, model):
            call.ending.steps.append(ModelStep(model.name, False, reason))
        else:
            by_name[model.name] = model
    if not by_name:
        raise _refusal(call, models)
    (first, _), *others = places = ordered([_figures(call, model) for model in by_name.values()], wishes)
    call.ending.steps += [ModelStep(name, False, reason) for name, reason in places if name == call.asked.name != first]
    configured = [(reason, model) for reason, model in call.fallbacks if reason is not None and not why_not(call, model)]
    return call.changed(asked=by_name[first], fallbacks=(*[(None, by_name[name]) for name, _ in others], *configured))


def _check_servers(call: Call, models: Sequence[ServedModel]) -> None:
    known = {name for model in models for name in model.upstream.server_names}
    for field in ("order", "only", "ignore"):
        for name in getattr(call.parsed.routing, field):
            if name not in known:
                raise InvalidRequest(f"provider.{field}", f"one of the model's servers: {', '.join(sorted(known))}", name)


def why_not(call: Call, model: ServedModel) -> str:
    """Why the model may not answer. Empty: it may"""
    if not _has_server(call, model):
        return "None of its servers may answer, by the fields order, only and ignore of provider."
    return excess(_figures(call, model), call.parsed.routing)


def wished_queue(call: Call, model: ServedModel) -> QueueState | None:
    """The queue at a model that may answer. None also where the request does not join it first."""
    upstream = model.upstream
    return upstream.queue(call.parsed.priority, model.unsent) if upstream.is_queue_first(call.parsed.routing) else None


def _has_server(call: Call, model: ServedModel) -> bool:
    return bool(server_places(model.upstream.server_names, call.parsed.routing))


def _figures(call: Call, model: ServedModel) -> ModelFigures:
    means = model.means
    return ModelFigures(model.name, call.config.price_of(model.base_name), means.hit_rate, means.tokens_per_s)


def _refusal(call: Call, models: Sequence[ServedModel]) -> InvalidRequest:
    wishes = call.parsed.routing
    able = [_figures(call, model) for model in models if _has_server(call, model)]
    if not able:
        field = next(name for name in ("only", "ignore", "order") if getattr(wishes, name))
        return InvalidRequest(f"provider.{field}", "at least one server that may answer", list(getattr(wishes, field)))
    least = min(able, key=lambda each: 3 * each.price.input + each.price.output)
    shown = f"at least {least.price.input:.12g} for prompts and {least.price.output:.12g} for completions, what {least.name} costs"
    return InvalidRequest("provider.max_price", shown, {"prompt": wishes.max_input_price, "completion": wishes.max_output_price})
