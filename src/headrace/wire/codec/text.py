"""Shortens a text and makes it valid Unicode, so that a message can carry it."""

from __future__ import annotations

MAX_MESSAGE_CHARS = 2000


def printable(text: str) -> str:
    """`text` shortened and made valid Unicode: an error message may quote a broken request."""
    return text[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode("utf-8")
