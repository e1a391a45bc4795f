"""Reads and writes W3C Trace Context (level 1): the headers `traceparent` and `tracestate`. A header that breaks its rules is left out."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_STATE_BYTES = 512
MAX_STATE_MEMBERS = 32

_PARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_MEMBER = re.compile(r"[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")


class TraceContext(NamedTuple):
    """Where a request stands in a trace. Ids are hex.

    span_id    of the request's own span; the caller's where this gateway sends no spans
    parent_id  of the caller's span; empty: the trace begins here
    state      `tracestate`, for servers behind this one
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    is_sampled: bool = True
    state: str = ""

    def headers(self) -> dict[str, str]:
        made = {"traceparent": f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"}
        return made | {"tracestate": self.state} if self.state else made


def trace_context(headers: Sequence[tuple[bytes, bytes]], *, has_spans: bool) -> TraceContext | None:
    """has_spans: whether this gateway sends spans. None: it does not, and no trace comes from the client."""
    given = [value for name, value in headers if name == b"traceparent"]
    parent = _PARENT.fullmatch(given[0].strip()) if len(given) == 1 else None
    if parent is None or (parent[1] == b"00" and parent[5] is not None):
        return TraceContext(os.urandom(16).hex(), new_span_id()) if has_spans else None
    trace_id, parent_id = parent[2].decode(), parent[3].decode()
    span_id = new_span_id() if has_spans else parent_id
    return TraceContext(trace_id, span_id, parent_id, bool(int(parent[4], 16) & 1), _state(headers))


def new_span_id() -> str:
    return os.urandom(8).hex()


def _state(headers: Sequence[tuple[bytes, bytes]]) -> str:
    given = b",".join([value for name, value in headers if name == b"tracestate"]).decode("latin-1")
    if len(given) > MAX_STATE_BYTES:
        return ""
    members = [member.strip(" \t") for member in given.split(",") if member.strip(" \t")]
    return ",".join(members) if len(members) <= MAX_STATE_MEMBERS and all(map(_MEMBER.fullmatch, members)) else ""
