"""Defines the option that says how long sessions are kept."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    ttl_s: float = option(
        3600.0,
        "Seconds since its last turn that a session is kept; 0: none is kept, and a request with one is refused.",
        low=0.0,
    )
