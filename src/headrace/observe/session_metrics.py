"""Counts the turns of sessions by their outcome."""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry

from headrace.observe.tally import OutcomeCounter


class TurnOutcome(StrEnum):
    """The outcome of a turn of a session."""

    KEPT = "kept"
    CONFLICT = "conflict"
    """Another request of the session ran, or was stored first."""
    TOO_LARGE = "too_large"
    FAILED = "failed"
    """The store was down or slow."""


class SessionMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.turns = OutcomeCounter(registry, "headrace_session_turns", "Turns of sessions by what became of them.", TurnOutcome)
