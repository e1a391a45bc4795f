"""Implements GET and DELETE /v1/sessions/{id}. docs/sessions.md has the rules."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from headrace.gateway.generation.service import Service
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.sessions.names import SessionKey, checked_session_id

_encode = msgspec.json.encode


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


async def show_session(service: Service, exchange: Exchange) -> None:
    key = _key(service, exchange)
    stored, messages = await service.sessions.shown(key)
    reply = SessionReply(
        id=key.session_id,
        object="session",
        created=stored.created,
        updated=stored.updated,
        summary=stored.summary,
        messages=[dict(message) for message in messages],
    )
    await exchange.reply(200, _encode(reply))


async def delete_session(service: Service, exchange: Exchange) -> None:
    key = _key(service, exchange)
    await service.sessions.delete(key)
    await exchange.reply(200, _encode(SessionDeleted(id=key.session_id, object="session.deleted", deleted=True)))


def _key(service: Service, exchange: Exchange) -> SessionKey:
    """Raises InvalidRequest."""
    service.sessions.check_on("id")
    return SessionKey(exchange.principal.tenant_key, checked_session_id("id", exchange.scope["path_params"]["id"]))
