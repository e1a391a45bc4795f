"""Applies a request's wishes to models: which of them may answer, in which order, and why."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.errors import InvalidRequest
from headrace.gateway.generation.call import Call
from headrace.gateway.upstream.fallback import FallbackUpstream
from headrace.gateway.upstream.served_models import ServedModel
from headrace.observe.finished_request import ModelStep
from headrace.policy.admission import QueueState
from headrace.policy.routing.wishes import NO_WISHES, OWN_ENGINES, ModelFigures, excess, ordered, server_places


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
    """The queue at a model that may answer. None also where foreign servers are asked alone, or before our engines and one of them is
    alive: they have another.
    """
    places = server_places(model.upstream.server_names, call.parsed.routing)
    if isinstance(model.upstream, FallbackUpstream) and (own_place := places.get(OWN_ENGINES)) != min(places.values()):
        servers = model.upstream.foreign.replicas()
        if own_place is None or any(not server.reason and places.get(server.name, own_place) < own_place for server in servers):
            return None
    return model.upstream.queue(call.parsed.priority, model.unsent)


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
