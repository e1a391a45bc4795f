"""The form of a row in `surfaces.routes`: one method of one path, its handler, its types and whether it wants a key."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

from headrace.core.errors import InvalidRequest
from headrace.gateway.http.config import Limits
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.framing import OPENAI, Framing
from headrace.gateway.surfaces.dialect.field_rule import Surface
from headrace.gateway.surfaces.generating import GeneratingSurface

HandlerT = TypeVar("HandlerT", covariant=True)

Parse = Callable[[dict[str, object], Limits], Any]
"""A decoded body -> the surface's own request, and the fields that change nothing."""


@dataclass(frozen=True, slots=True)
class QueryParameter:
    """A parameter behind the path's `?`; each may be left out."""

    name: str
    summary: str


def query_of(exchange: Exchange, parameters: Sequence[QueryParameter], rule: str) -> dict[str, str]:
    """Parameter -> value. Raises InvalidRequest for one that is not there: a misspelt one would ask for something else than was meant."""
    query = dict(parse_qsl(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True))
    for name in query:
        if all(name != parameter.name for parameter in parameters):
            raise InvalidRequest(name, rule)
    return query


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[HandlerT]):
    """One method of one path.

    method      GET answers HEAD as well
    path        as the router reads it: {name} or {name:path}
    handler     writes the answer or raises
    request     wire type of the body; None: it reads none
    reply       wire type of the answer; None: the answer has no wire type, see media_type
    chunk       wire type of a stream's events, where the body's `stream` asks for them
    query       parameters that it reads; without any it ignores what stands behind `?`
    parse       of its body, where the handler is no surface that generates; None: it reads none
    fields      the body's rows of the field table; None: it has none
    has_limits  it does work for its caller without generating, and its requests count in the caller's limits on requests
    is_public   wants no key and answers under every Host, or without one over HTTP/1.0: the probes and the front page alone
    is_quiet    machines ask it every second: a completed answer has no line in the request log
    may_be_503  answers 503 with its own reply type instead of an error
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
    parse: Parse | None = None
    fields: Surface | None = None
    has_limits: bool = False
    is_public: bool = False
    is_quiet: bool = False
    may_be_503: bool = False

    @property
    def generates(self) -> bool:
        """Whether headrace_requests_total counts its requests."""
        return isinstance(self.handler, GeneratingSurface)

    @property
    def parser(self) -> Parse | None:
        """Reads a large body in a text worker, which knows it by its name."""
        return self.handler.parse if isinstance(self.handler, GeneratingSurface) else self.parse

    @property
    def framing(self) -> Framing:
        return self.handler.framing if isinstance(self.handler, GeneratingSurface) else OPENAI

    @property
    def shown_path(self) -> str:
        """The path as OpenAPI writes it."""
        return re.sub(r":\w+}", "}", self.path)

    @property
    def path_params(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.shown_path)
