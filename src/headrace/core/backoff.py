"""Pauses between two tries of what may fail again: each twice the last, up to a limit, the first again after it has worked for a while.

Pure: whoever tries says how long the last try worked, and does the waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """
    first_s   the first pause
    max_s     no pause is longer
    stable_s  what worked for so long is not what failed before: its end counts as the first
    """

    first_s: float
    max_s: float
    stable_s: float
    _next_s: float = field(default=0.0, init=False)

    def pause_s(self, worked_s: float) -> float:
        """Before the next try, when the last one worked for `worked_s` seconds; 0: not at all."""
        pause_s = self.first_s if worked_s >= self.stable_s else max(self.first_s, self._next_s)
        self._next_s = min(2 * pause_s, self.max_s)
        return pause_s
