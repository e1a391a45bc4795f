"""Builds the chain of a request: the models that may answer in the place of the one that it asks for, in order."""

from __future__ import annotations

from contextlib import suppress

from headrace.core.errors import InvalidRequest, ModelNotFound
from headrace.gateway.access.principal import Principal
from headrace.gateway.upstream.served_models import ModelTable, ServedModel
from headrace.policy.fallbacks import NO_FALLBACKS, FallbackReason
from headrace.policy.routing.wishes import RoutingWishes

FallbackChain = tuple[tuple[FallbackReason | None, ServedModel], ...]
"""Reason None: for every reason."""


def fallback_chain(asked: ServedModel, wishes: RoutingWishes, models: ModelTable, principal: Principal, *, by: str | None) -> FallbackChain:
    """The client's own fallbacks, then the configured ones. A configured one that the key may not use is left out.

    by  the name that the client asked for

    Raises InvalidRequest for a name of the client's that its key may not use, and Unavailable while it may be that of an adapter.
    """
    named = [("models", name) for name in wishes.models] + [("fallbacks", name) for name in wishes.fallbacks]
    if not named and asked.fallbacks == NO_FALLBACKS:
        return ()
    models = models.usable_by(principal)
    chain: list[tuple[FallbackReason | None, ServedModel]] = []
    for field, name in named:
        try:
            found = models.find(name)
        except ModelNotFound as error:
            raise InvalidRequest(field, f"names of models that are served ({error.limit})", name, error.remedy) from None
        if found.route is not None:
            raise InvalidRequest(field, "names of models, and this is a route", name, "Name one of its models.")
        chain.append((None, found.models[0]))
    for reason, name in asked.fallbacks.named():
        with suppress(ModelNotFound):
            chain.append((reason, models.reached(name, by)))
    return tuple([(reason, model) for reason, model in chain if model.name != asked.name])
