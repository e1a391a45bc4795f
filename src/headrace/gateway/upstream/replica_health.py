"""Whether a replica is ready, and how long it has stalled: pure functions of what the wire reports about it.

A replica that stops answering, or whose idle loop stalls, must count as not ready within one second; thresholds leave room for one
heartbeat.
"""

from __future__ import annotations

from headrace.wire.client import ConnectionState, SeenLoad
from headrace.wire.leash import DRAINING
from headrace.wire.service import SILENT_AFTER_S

IDLE_STALL_S = 0.8
"""Seconds without a wake-up after which an idle loop counts as stuck. A healthy one wakes several times in this time."""

STEP_GRACE_S = 1.0
STEP_GRACE_FACTOR = 4.0
"""A replica is ready while its step takes at most max(STEP_GRACE_S, STEP_GRACE_FACTOR x the predicted duration)."""


def verdict(state: ConnectionState, seen: SeenLoad | None, now: float) -> str:
    """Why a replica is not ready, in a form that may be shown to clients; empty = ready."""
    if state is ConnectionState.DOWN:
        return "not connected"
    if state is ConnectionState.SILENT:
        return "does not answer"
    if state is ConnectionState.DRAINING:
        return DRAINING
    if state is ConnectionState.NOT_READING:
        return "does not read what is sent"
    if seen is None:
        return "has not reported yet"
    age = now - seen.received_s
    if seen.load.step_age_s is not None:
        allowed = max(STEP_GRACE_S, STEP_GRACE_FACTOR * seen.load.step_predicted_s)
        took = seen.load.step_age_s + age
        return f"a step has taken {took:.1f} s, expected at most {allowed:.1f} s" if took > allowed else ""
    idle = seen.load.loop_age_s + age
    return f"its loop has not turned for {idle:.1f} s" if idle > IDLE_STALL_S else ""


def stalled_s(state: ConnectionState, seen: SeenLoad | None, silent_s: float, now: float) -> float:
    """Seconds without progress beyond the predicted step of a connected replica; 0 for one without a connection or a report.

    silent_s  seconds without a frame, delays of this process left out. The age of the last report counts only as far as a replica may be
              silent: beyond that it may be this process that was stopped
    """
    if state is ConnectionState.DOWN or seen is None:
        return 0.0
    if state is ConnectionState.SILENT:
        return silent_s
    age = min(now - seen.received_s, SILENT_AFTER_S)
    if seen.load.step_age_s is not None:
        return max(0.0, seen.load.step_age_s + age - seen.load.step_predicted_s)
    return seen.load.loop_age_s + age
