"""Text that must cross whatever it holds."""

from __future__ import annotations

MAX_MESSAGE_CHARS = 2000


def printable(text: str) -> str:
    """`text` bounded and as valid Unicode: a message about a broken request may quote what was broken."""
    return text[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode("utf-8")
