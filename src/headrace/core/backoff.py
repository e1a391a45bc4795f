"""Exponential backoff: each pause is twice the last, up to a limit; a long success resets it. The caller does the waiting."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """stable_s: an attempt that worked for this many seconds resets the pause to `first_s`."""

    first_s: float
    max_s: float
    stable_s: float
    _next_s: float = field(default=0.0, init=False)

    def pause_s(self, worked_s: float) -> float:
        """worked_s: seconds that the last attempt worked; 0: it failed at once."""
        pause_s = self.first_s if worked_s >= self.stable_s else max(self.first_s, self._next_s)
        self._next_s = min(2 * pause_s, self.max_s)
        return pause_s
