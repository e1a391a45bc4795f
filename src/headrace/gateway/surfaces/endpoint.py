"""The form of a row in `surfaces.routes`: what is known of one path and method before a request comes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.gateway.surfaces.dialect.field_rule import Surface

HandlerT = TypeVar("HandlerT", covariant=True)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[HandlerT]):
    """One method of one path.

    method      GET answers HEAD as well
    path        as the router reads it: {name} or {name:path}
    handler     writes the answer or raises
    request     wire type of the body; None: it reads none
    reply       wire type of the answer; None: no JSON of ours, see media_type
    chunk       wire type of a stream's events, where the body's `stream` asks for them
    fields      the field table its body is held to; only what generates has one, and is counted in headrace_requests_total
    is_public   answers without a key, and an HTTP/1.0 client without a Host. Never more than the probes and the front page
    is_quiet    asked every second by machines: no line in the request log where it was answered
    may_be_503  says "not now" with its own reply instead of an error
    """

    method: str
    path: str
    handler: HandlerT
    summary: str
    request: type | None = None
    reply: type | None = None
    chunk: type | None = None
    media_type: str = "application/json"
    fields: Surface | None = None
    is_public: bool = False
    is_quiet: bool = False
    may_be_503: bool = False

    @property
    def generates(self) -> bool:
        return self.fields is not None

    @property
    def shown_path(self) -> str:
        """The path as people and OpenAPI write it."""
        return re.sub(r":\w+}", "}", self.path)

    @property
    def path_params(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.shown_path)
