"""GET /v1/models: what is served, each alias as a model of its own."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from headrace.gateway.generation.service import Service
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.upstream.served_models import ServedModel

_encode = msgspec.json.encode


class ModelCard(Struct):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    status: str


class ModelList(Struct):
    object: str
    data: list[ModelCard]


async def list_models(service: Service, exchange: Exchange) -> None:
    cards = [_card(model, name) for model in service.models.models for name in (model.name, *model.aliases)]
    await exchange.reply(200, _encode(ModelList(object="list", data=cards)))


async def one_model(service: Service, exchange: Exchange) -> None:
    name: str = exchange.scope["path_params"]["model"]
    if not name:  # /v1/models/
        await list_models(service, exchange)
        return
    await exchange.reply(200, _encode(_card(service.models.get(name), name)))


def _card(model: ServedModel, name: str) -> ModelCard:
    """A model that is still starting is listed with what is known: no context length yet."""
    return ModelCard(
        id=name,
        object="model",
        created=model.created,
        owned_by="headrace",
        root=model.name,
        parent=None,
        max_model_len=model.upstream.max_model_len,
        status="ready" if any(not replica.reason for replica in model.upstream.replicas()) else "starting",
    )
