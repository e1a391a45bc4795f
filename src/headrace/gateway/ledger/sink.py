"""The seam between the spool and whatever keeps usage records. `usage_db`, `kafka` and `clickhouse` are its implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.core.errors import HeadraceError


class SinkFailed(HeadraceError):
    """A sink cannot be reached or refuses records. For the log: they stay in the spool and are sent again."""


class Sink(Protocol):
    """Used by one thread. name: of its folder in the spool, and in metrics"""

    name: str

    def ship(self, payloads: Sequence[bytes]) -> None:
        """Keep records, each as JSON of `UsageRecord`. They may have been shipped before. Raises SinkFailed where not all are kept."""
        ...

    def idle(self) -> None:
        """Do what is due beside shipping. Called often while nothing waits. Raises SinkFailed."""
        ...

    def interrupt(self) -> None:
        """Have a `ship` that waits raise SinkFailed soon. From any thread."""
        ...

    def close(self) -> None: ...
