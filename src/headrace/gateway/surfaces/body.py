"""The body of a POST: read within its bounds, decoded, and parsed into what its surface asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from headrace.gateway.config import Limits
from headrace.gateway.generation.service import Service
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.json_border import Caps, decode_object

T = TypeVar("T")

MAX_INLINE_BYTES = 64 << 10
"""A body up to this size is parsed on the event loop: handing it to a thread costs more than parsing it."""


async def parsed(service: Service, exchange: Exchange, parse: Callable[[dict[str, object], Limits], T]) -> T:
    """The request a body holds. A large one is taken apart off the event loop. Raises what reading, decoding and `parse` raise."""
    limits = service.config.limits
    body = await exchange.json_body(max_bytes=limits.max_body_bytes, timeout_s=service.config.timeouts.body_s)

    def work() -> T:
        return parse(decode_object(body, Caps(depth=limits.max_json_depth)), limits)

    return work() if len(body) <= MAX_INLINE_BYTES else await service.text_pool.run(work)
