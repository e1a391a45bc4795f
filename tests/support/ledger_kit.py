"""Makes usage records, and sinks that fail when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.gateway.ledger import shipper, spool_thread
from headrace.gateway.ledger.record import SinkFailed, UsageRecord, decode_record


def usage(number: int, **changes: Any) -> UsageRecord:
    plain: dict[str, Any] = {
        "request_id": f"{number:024x}",
        "time_ms": 1_700_000_000_000 + number,
        "tenant": "acme",
        "model": "fox",
        "outcome": "completed",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "cost_nanos": 1000,
    }
    return UsageRecord(**(plain | changes))


class MemorySink:
    """A `Sink` that keeps records in a list, every one as often as it is shipped. failure: while set, nothing is taken"""

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self.shipped: list[str] = []
        self.failure = ""
        self.num_idle = 0
        self.is_closed = False

    def ship(self, payloads: Sequence[bytes]) -> None:
        if self.failure:
            raise SinkFailed(self.failure)
        self.shipped += [decode_record(payload).request_id for payload in payloads]

    def idle(self) -> None:
        self.num_idle += 1

    def interrupt(self) -> None:
        self.failure = "interrupted"

    def close(self) -> None:
        self.is_closed = True


def ship_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger of this process pauses for moments where it pauses for seconds."""
    for module, seconds in (
        (spool_thread, {"SEGMENT_S": 0.01, "ADOPT_S": 0.05}),
        (shipper, {"POLL_S": 0.02, "FIRST_RETRY_S": 0.01, "LAST_RETRY_S": 0.05}),
    ):
        for name, value in seconds.items():
            monkeypatch.setattr(module, name, value)
