"""Implements what a key may read of its own: models, usage, explanations of requests, and its sessions, which it may delete as well."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct, structs

from headrace.core.errors import InvalidRequest
from headrace.gateway.access.principal import Principal
from headrace.gateway.generation.account import RequestAccount
from headrace.gateway.generation.service import Service
from headrace.gateway.http.errors import RequestNotFound, RouteNotFound
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.ledger.usage_query import GROUPS, UsageQuery, groups_of, unix_ms_of
from headrace.gateway.sessions.sessions import SessionKey, checked_session_id
from headrace.gateway.surfaces.endpoint import QueryParameter, query_of
from headrace.gateway.upstream.served_models import ModelTable, NamedModels

MAX_ROWS = 1000

USAGE_QUERY = (
    QueryParameter("by", f"Groups: one or more of {', '.join(GROUPS)}, with commas between. Default day."),
    QueryParameter("since", "From this time on: a day, a time in UTC, or how long ago (90m, 24h, 7d). Default 30d."),
    QueryParameter("until", "Before this time. Default now."),
)


class UsageRow(Struct, omit_defaults=True):
    """Sums of one group. cost: in the operator's currency"""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int
    cost: float
    tenant: str | None = None
    user: str | None = None
    key: str | None = None
    model: str | None = None
    adapter: str | None = None
    day: str | None = None


class UsageList(Struct):
    object: str
    data: list[UsageRow]
    has_more: bool


async def usage(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    if (ledger := service.explanations.ledger) is None:
        raise RouteNotFound(exchange.scope["path"])
    query = _query(exchange, account.principal, service.unix_time())
    rows = await ledger.rows(query)
    shown = [msgspec.convert(row, UsageRow) for row in rows[:MAX_ROWS]]
    await exchange.reply(200, msgspec.json.encode(UsageList(object="list", data=shown, has_more=len(rows) > MAX_ROWS)))


def _query(exchange: Exchange, caller: Principal, now: float) -> UsageQuery:
    given = query_of(exchange, USAGE_QUERY, "a parameter of /v1/usage: by, since, until")
    return UsageQuery(
        by=groups_of([given.get("by", "day")]),
        since_ms=max(unix_ms_of("since", given.get("since", "30d"), now), 0 if caller.reads_all else int(1000 * caller.tenant_since)),
        until_ms=unix_ms_of("until", given["until"], now) if "until" in given else None,
        tenant=None if caller.reads_all else caller.tenant,
        max_rows=MAX_ROWS + 1,
    )


_encode = msgspec.json.encode

_REQUEST_ID = re.compile(r"(?:chatcmpl-|cmpl-)?([0-9a-f]{24})(?:-[0-9]{1,4}(?:\.[0-9]{1,4})?)?")
"""As an answer, its headers and the log of an engine have it."""


async def explain(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    if (match := _REQUEST_ID.fullmatch(exchange.scope["path_params"]["id"])) is None:
        raise InvalidRequest("id", "the `id` of an answer, or its x-request-id", exchange.scope["path_params"]["id"])
    reader = account.principal
    found = await service.explanations.find(match[1], reader, sees_site=service.shown_tenants(reader).is_all)
    if found is None:
        raise RequestNotFound
    await exchange.reply(200, found)


class SessionReply(Struct):
    """A session as its tenant may read it. summary: of messages that were left out to fit the context; empty: none were summarised"""

    id: str
    object: str
    created: int
    updated: int
    summary: str
    messages: list[dict[str, Any]]


class SessionDeleted(Struct):
    id: str
    object: str
    deleted: bool


async def show_session(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    key = _key(service, exchange, account.principal)
    stored, messages = await service.stages.sessions.shown(key)
    reply = SessionReply(
        id=key.session_id,
        object="session",
        created=stored.created,
        updated=stored.updated,
        summary=stored.summary,
        messages=[dict(message) for message in messages],
    )
    await exchange.reply(200, _encode(reply))


async def delete_session(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    key = _key(service, exchange, account.principal)
    await service.stages.sessions.delete(key)
    await exchange.reply(200, _encode(SessionDeleted(id=key.session_id, object="session.deleted", deleted=True)))


def _key(service: Service, exchange: Exchange, principal: Principal) -> SessionKey:
    service.stages.sessions.check_on("id")
    return SessionKey(principal.tenant_key, checked_session_id("id", exchange.scope["path_params"]["id"]))


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
    parent: str | None
    max_model_len: int | None
    max_context_tokens: int | None
    rate_limits: RateLimits
    status: str


class ModelList(Struct):
    object: str
    data: list[ModelCard]


async def list_models(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    usable = service.models.usable_by(account.principal)
    names = [*(name for model in usable.models for name in model.names), *usable.routes]
    cards = [_card(usable.find(name), name, account.principal) for name in names]
    cards += _adapter_cards(usable, account.principal)
    await exchange.reply(200, _encode(ModelList(object="list", data=cards)))


def _adapter_cards(usable: ModelTable, principal: Principal) -> Iterator[ModelCard]:
    """There may be thousands: those of one base model are alike but for their names."""
    made: dict[str, ModelCard] = {}
    for name, base in usable.adapters().items():
        if base.name not in made:
            made[base.name] = _card(usable.find(name), name, principal)
        yield structs.replace(made[base.name], id=name, root=name)


async def one_model(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    name: str = exchange.scope["path_params"]["model"]
    found = service.models.usable_by(account.principal).find(name)
    await exchange.reply(200, _encode(_card(found, name, account.principal)))


def _card(found: NamedModels, name: str, principal: Principal) -> ModelCard:
    model, tier = found.models[0], principal.tier
    max_model_len = _least(*(each.upstream.max_model_len for each in found.models))
    return ModelCard(
        id=name,
        object="model",
        created=model.created,
        owned_by="headrace",
        root=model.name if found.route is None else found.wish.route,
        parent=model.parent or None,
        max_model_len=max_model_len,
        max_context_tokens=_least(max_model_len, tier.max_context_tokens),
        rate_limits=RateLimits(
            tier=principal.tier_name,
            requests_per_minute=_least(tier.requests_per_minute, principal.limits.requests_per_minute),
            input_tokens_per_minute=tier.input_tokens_per_minute,
            output_tokens_per_minute=tier.output_tokens_per_minute,
            max_concurrent_requests=tier.max_concurrent_requests,
        ),
        status="ready" if any(not replica.reason for each in found.models for replica in each.upstream.replicas()) else "starting",
    )


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
