"""Checks the names that clients give sessions, and makes a session's keys in the store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b

from headrace.core.errors import InvalidRequest

HEADER = "x-session-id"
RAW_HEADER = HEADER.encode()

METADATA_FIELD = "metadata.session_id"
SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def checked_session_id(field: str, given: object) -> str:
    """Raises InvalidRequest without the value: the id alone gives access to a session."""
    if not isinstance(given, str) or SESSION_ID.fullmatch(given) is None:
        raise InvalidRequest(field, "1..128 of A-Z a-z 0-9 . _ : -", None)
    return given


@dataclass(frozen=True, slots=True)
class SessionKey:
    tenant: str
    session_id: str

    @property
    def entry(self) -> str:
        return f"{tenant_digest(self.tenant)}:ctx:{self.session_id}"

    @property
    def claim(self) -> str:
        return f"{tenant_digest(self.tenant)}:claim:{self.session_id}"


def tenant_digest(tenant: str) -> str:
    return blake2b(tenant.encode(), digest_size=16, person=b"headrace-session").hexdigest()
