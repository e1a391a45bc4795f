"""Finds dead gateways: their beat has stood still for a time, measured on the watching gateway's own clock.

No two clocks are compared, so neither a jump of one nor a difference between two declares a living gateway dead.
"""

from __future__ import annotations

from collections.abc import Mapping

LEASE_S = 5.0
"""Seconds for which a beat may stand still. After that the gateway counts as dead, and another gateway charges its reservations."""


class PeerWatch:
    """One gateway's view of the others."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._seen: dict[str, tuple[int, float]] = {}

    def dead(self, beats: Mapping[str, int], now: float) -> list[tuple[str, int]]:
        """Gateways whose beat has not moved for LEASE_S, each with that beat. beats: of all gateways; now: monotonic seconds"""
        seen: dict[str, tuple[int, float]] = {}
        for gateway, beat in beats.items():
            before = self._seen.get(gateway)
            seen[gateway] = before if before is not None and before[0] == beat else (beat, now)
        self._seen = seen
        return [(gateway, beat) for gateway, (beat, since) in seen.items() if gateway != self._own and now - since >= LEASE_S]
