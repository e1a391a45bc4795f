"""The process log: one line per event, whatever is in it. A traceback or a client's words cannot forge lines or colour a terminal."""

from __future__ import annotations

import logging
import sys


class OneLine(logging.Formatter):
    """LEVEL logger: message, with every control character (newlines of tracebacks included) written as an escape."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Set up the root logger of a server process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine())
    logging.basicConfig(handlers=[handler], level=level, force=True)
