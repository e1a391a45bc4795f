"""Defines the form of a row in `surfaces.routes`, and reads what a client sent to it: the query, and the body of a POST."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec

from headrace.core.errors import InvalidRequest
from headrace.gateway.access.memory_charges import RequestCharges
from headrace.gateway.access.principal import Principal
from headrace.gateway.cache.replays import IDEMPOTENCY_KEY
from headrace.gateway.generation.event_log import LAST_EVENT_ID
from headrace.gateway.generation.kept_streams import body_digest
from headrace.gateway.generation.service import Service
from headrace.gateway.http.asgi import OPENAI, Framing
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.json_border import decode_object
from headrace.gateway.sessions.sessions import RAW_HEADER

T = TypeVar("T")
HandlerT = TypeVar("HandlerT", covariant=True)

MAX_INLINE_BYTES = 16 << 10
"""Parsed on the event loop in 4 ms at worst; handing a body to a text worker takes a quarter of a millisecond."""

MAX_INLINE_GBNF_BYTES = 2 << 10
"""A grammar in GBNF is rewritten as Lark: that takes 2 us per byte at worst."""

BODY_S = 30.0
"""From the headers to the last byte."""

_GBNF_MARKS = (b"::=", b"\\u003")


@dataclass(frozen=True, slots=True)
class BodyParser(Generic[T]):
    """How the bodies of one path are read. parse: decoded body -> (the surface's own request, names of fields that change nothing); kind:
    what a text worker sends as JSON
    """

    parse: Callable[[dict[str, object]], tuple[T, list[str]]]
    kind: Any

    def decode(self, sent: bytes | memoryview) -> tuple[T, list[str]]:
        made: tuple[T, list[str]] = _decoder(self.kind).decode(sent)
        return made


@dataclass(frozen=True, slots=True)
class QueryParameter:
    name: str
    summary: str


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[HandlerT]):
    """method       GET answers HEAD as well
    parser       a text worker finds it by the path; None: no body is read
    for_readers  a key of the role reader may ask: it generates, changes and stores nothing, and shows no conversation
    has_limits   its requests count in the caller's limits on requests
    is_probe     needs no key, and answers under every Host, or without one over HTTP/1.0
    is_manual    needs no key: a browser sends none before its page has asked for one
    is_quiet     a completed answer has no line in the request log
    may_be_503   answers 503 with its own reply type instead of an error
    """

    method: str
    path: str
    handler: HandlerT
    summary: str
    request: type | None = None
    reply: type | None = None
    chunk: type | None = None
    media_type: str = "application/json"
    query: tuple[QueryParameter, ...] = ()
    parser: BodyParser[Any] | None = None
    framing: Framing = OPENAI
    generates: bool = False
    for_readers: bool = False
    has_limits: bool = False
    is_probe: bool = False
    is_manual: bool = False
    is_quiet: bool = False
    may_be_503: bool = False

    @property
    def is_public(self) -> bool:
        return self.is_probe or self.is_manual

    @property
    def shown_path(self) -> str:
        return re.sub(r":\w+}", "}", self.path)

    @property
    def path_params(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.shown_path)


def query_of(exchange: Exchange, parameters: Sequence[QueryParameter], rule: str) -> dict[str, str]:
    """Raises InvalidRequest for an unknown parameter, which may be a misspelt one."""
    query = dict(parse_qsl(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True))
    for name in query:
        if all(name != parameter.name for parameter in parameters):
            raise InvalidRequest(name, rule)
    return query


async def parsed_body(service: Service, exchange: Exchange, principal: Principal, charges: RequestCharges, parser: BodyParser[T]) -> T:
    """Names of fields that change nothing go to `exchange.ignored`. charges: for the body's bytes as they arrive

    Raises what `Exchange.body` raises, InvalidRequest or RequestTooLarge, and Overloaded or Unavailable without memory or a text worker.
    """
    body = await exchange.json_body(max_bytes=service.config.limits.max_body_bytes, timeout_s=BODY_S, hold=charges.prompts.add)
    if exchange.header(LAST_EVENT_ID) is not None or exchange.header(IDEMPOTENCY_KEY) is not None:
        sessions = [value for name, value in exchange.headers if name == RAW_HEADER]
        exchange.body_digest = body_digest(exchange.scope["path"], body, sessions)
    if len(body) <= MAX_INLINE_GBNF_BYTES or (len(body) <= MAX_INLINE_BYTES and not any(mark in body for mark in _GBNF_MARKS)):
        made, ignored = parser.parse(decode_object(body))
        exchange.ignored += ignored
        return made
    async with exchange.watching():
        asked = service.text_pool.parse_body(exchange.scope["path"], body, tenant=principal.tenant)
        _, tail = await exchange.unless_ended(asked)
    made, ignored = parser.decode(tail)
    exchange.ignored += ignored
    return made


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(tuple[kind, list[str]])
