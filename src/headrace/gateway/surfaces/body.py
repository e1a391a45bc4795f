"""The body of a POST: read within its bounds, decoded, and parsed into its surface's request type."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

from headrace.gateway.access.budget import RequestHeld
from headrace.gateway.cache.replays import IDEMPOTENCY_KEY
from headrace.gateway.generation.event_log import LAST_EVENT_ID
from headrace.gateway.generation.kept_streams import body_digest
from headrace.gateway.generation.service import Service
from headrace.gateway.http.config import Limits
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.json_border import Caps, decode_object
from headrace.gateway.sessions.names import RAW_HEADER

T = TypeVar("T")

MAX_INLINE_BYTES = 16 << 10
"""Bytes of the largest body that is parsed on the event loop, which takes 4 ms at worst; handing it to a text worker takes a quarter of a
millisecond."""

MAX_INLINE_GBNF_BYTES = 2 << 10
"""The same for a body that may hold a grammar in GBNF, which is rewritten as Lark: that takes 2 us per byte at worst."""

_GBNF_MARKS = (b"::=", b"\\u003")
"""What every body with a grammar in GBNF has: its sign for a rule, or an escape that one of the sign's characters may be written as."""


async def parsed(
    service: Service, exchange: Exchange, held: RequestHeld, parse: Callable[[dict[str, object], Limits], tuple[T, list[str]]]
) -> T:
    """The request in a body. Fields that change nothing go to `exchange.ignored`. Raises what reading, decoding and `parse` raise.

    held   counts the bytes of the body as they arrive; the parsed request is taken to be as large and not counted again
    parse  of a row of `surfaces.routes`: a text worker parses a large body and sends the request back
    """
    limits = service.config.limits
    body = await exchange.json_body(max_bytes=limits.max_body_bytes, timeout_s=service.config.timeouts.body_s, hold=held.prompts.add)
    if exchange.header(LAST_EVENT_ID) is not None or exchange.header(IDEMPOTENCY_KEY) is not None:
        sessions = [value for name, value in exchange.headers if name == RAW_HEADER]
        exchange.body_digest = body_digest(exchange.scope["path"], body, sessions)
    if len(body) <= MAX_INLINE_GBNF_BYTES or (len(body) <= MAX_INLINE_BYTES and not any(mark in body for mark in _GBNF_MARKS)):
        made, ignored = parse(decode_object(body, Caps(depth=limits.max_json_depth)), limits)
        exchange.ignored += ignored
        return made
    async with exchange.watching():
        _, tail = await exchange.unless_ended(service.text_pool.parse_body(parse.__name__, body, tenant=exchange.principal.tenant))
    made, ignored = _decoder(parse).decode(tail)
    exchange.ignored += ignored
    return made


@cache
def _decoder(parse: Callable[..., object]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(get_type_hints(parse)["return"])
