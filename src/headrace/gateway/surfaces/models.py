"""Implements GET /v1/models: the models that the caller may use, each alias as a model of its own, with the caller's limits."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from headrace.gateway.access.principal import Principal
from headrace.gateway.generation.service import Service
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.upstream.served_models import ServedModel

_encode = msgspec.json.encode


class RateLimits(Struct):
    """A caller's limits; null: no such limit."""

    tier: str
    requests_per_minute: int | None
    input_tokens_per_minute: int | None
    output_tokens_per_minute: int | None
    max_concurrent_requests: int | None


class ModelCard(Struct):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    max_context_tokens: int | None
    rate_limits: RateLimits
    status: str


class ModelList(Struct):
    object: str
    data: list[ModelCard]


async def list_models(service: Service, exchange: Exchange) -> None:
    usable = service.models.usable_by(exchange.principal)
    cards = [_card(model, name, exchange.principal) for model in usable.models for name in model.names]
    await exchange.reply(200, _encode(ModelList(object="list", data=cards)))


async def one_model(service: Service, exchange: Exchange) -> None:
    name: str = exchange.scope["path_params"]["model"]
    model = service.models.usable_by(exchange.principal).get(name)
    await exchange.reply(200, _encode(_card(model, name, exchange.principal)))


def _card(model: ServedModel, name: str, principal: Principal) -> ModelCard:
    """A model that is still starting is listed with what is known: no context length yet."""
    tier = principal.tier
    return ModelCard(
        id=name,
        object="model",
        created=model.created,
        owned_by="headrace",
        root=model.name,
        parent=None,
        max_model_len=model.upstream.max_model_len,
        max_context_tokens=_least(model.upstream.max_model_len, tier.max_context_tokens),
        rate_limits=RateLimits(
            tier=principal.tier_name,
            requests_per_minute=_least(tier.requests_per_minute, principal.limits.requests_per_minute),
            input_tokens_per_minute=tier.input_tokens_per_minute,
            output_tokens_per_minute=tier.output_tokens_per_minute,
            max_concurrent_requests=tier.max_concurrent_requests,
        ),
        status="ready" if any(not replica.reason for replica in model.upstream.replicas()) else "starting",
    )


def _least(*limits: int | None) -> int | None:
    """The smallest of several limits. None: no limit"""
    return min((limit for limit in limits if limit is not None), default=None)
