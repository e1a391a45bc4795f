"""How long sessions are kept, and how much they may hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """
    ttl_s              seconds since its last turn that a session is kept; 0: none is kept, and a request with one is refused
    max_session_bytes  of the messages of one session, as JSON
    max_bytes          of all sessions, compressed; one tenant may fill `limits.max_tenant_share` of it
    """

    ttl_s: float = 3600.0
    max_session_bytes: int = 1 << 20
    max_bytes: int = 256 << 20
