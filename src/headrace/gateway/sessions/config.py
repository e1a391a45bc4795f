"""How long sessions are kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """
    ttl_s  seconds since its last turn that a session is kept; 0: none is kept, and a request with one is refused
    """

    ttl_s: float = 3600.0
