"""Defines the form of a row in `surfaces.routes`, reads what a client sent to it (the query, and the body of a POST), and handles the
requests that generate.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec

from headrace.core.errors import InvalidRequest
from headrace.gateway.access.memory_charges import RequestCharges
from headrace.gateway.access.principal import Principal
from headrace.gateway.cache.replays import IDEMPOTENCY_KEY
from headrace.gateway.generation.account import RequestAccount
from headrace.gateway.generation.answer_encoder import AnswerEncoder
from headrace.gateway.generation.call import Call, Ready
from headrace.gateway.generation.kept_streams import body_digest
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.generation.service import Service
from headrace.gateway.http.asgi import OPENAI, Framing
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.json_border import decode_object
from headrace.gateway.http.sse import LAST_EVENT_ID
from headrace.gateway.sessions.sessions import RAW_HEADER
from headrace.gateway.surfaces.dialect.parse import error_as_written
from headrace.observe.timeline import READ

T = TypeVar("T")

Handler = Callable[[Service, Exchange, RequestAccount], Awaitable[None]]

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
class Endpoint:
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
    handler: Handler
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


RequestT = TypeVar("RequestT")


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingSurface(Generic[RequestT]):
    """Handles the requests of a path that generates. tests/gateway/surfaces/test_another_surface.py has a whole surface of another API.

    names    gives the client's names of fields: name in `ParsedRequest` -> name in the body
    common   converts the surface's request to a `ParsedRequest`
    encoder  makes the encoder of the answer
    """

    parser: BodyParser[RequestT]
    names: Callable[[RequestT], Mapping[str, str]]
    common: Callable[[RequestT, Principal], ParsedRequest]
    encoder: Callable[[RequestT, Ready], AnswerEncoder]

    async def __call__(self, service: Service, exchange: Exchange, account: RequestAccount) -> None:
        principal, tenant = account.principal, account.principal.tenant
        with service.open_requests.admit(exchange.request_id, tenant, exchange.end), service.memory.open(tenant) as charges:
            exchange.marks.enter(READ)
            request = await parsed_body(service, exchange, principal, charges, self.parser)
            try:
                call = _call(service, exchange, account, charges, self.common(request, principal))
                await service.pipeline.run(call, partial(self.encoder, request))
            except InvalidRequest as error:
                if (renamed := error_as_written(error, self.names(request))) is None:
                    raise
                raise renamed from error


def _call(service: Service, exchange: Exchange, account: RequestAccount, charges: RequestCharges, parsed: ParsedRequest) -> Call:
    """Raises ModelNotFound, InvalidRequest or Unavailable."""
    chosen = service.choose_model(exchange, account.principal, parsed, charges.prompts.num_bytes)
    service.open_requests.use(exchange.request_id, account.principal.tenant, chosen.model.users)
    return Call.opened(
        exchange,
        account,
        charges,
        parsed,
        config=service.config,
        models=service.models,
        chosen=chosen,
        salt_key=service.salt_key,
        now=int(service.unix_time()),
    )
