"""Bounds the replica-hours that a model takes in a day of UTC. Pure: the autoscaler asks (`policy.scaling.autoscaler`).

A replica counts from its start to its end, also while it loads, stands by or drains. Those that always run have the rest of their day
reserved. What else runs has reserved what it takes to leave: on this day, and on the next one, which it may reach.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headrace.policy.scaling.history import DAY_S

HOUR_S = 3600.0

MAX_S = 1e11
"""No time and no sum of a day is as large. Whole numbers of a file may be larger than any float."""


@dataclass(frozen=True, slots=True)
class DayUse:
    """What the replicas of a model have taken of a day.

    at         seconds since 1970, up to which they are counted
    replica_s  seconds of all of them together, since midnight
    spent_s    what was left when no further replica could be had: until midnight one takes more than that
    """

    at: float
    replica_s: float = 0.0
    spent_s: float = 0.0

    @staticmethod
    def of(given: object) -> DayUse:
        """What `astuple` has made. Raises ValueError where it is none."""
        numbers = given if isinstance(given, list) else []
        if len(numbers) != 3 or not all(type(each) in (int, float) and 0.0 <= each < MAX_S for each in numbers):
            raise ValueError("not the use of a day")
        return DayUse(*map(float, numbers))

    def later(self, num_replicas: int, now: float) -> DayUse:
        """num_replicas: the most since `at`. A clock that was set back gives nothing back."""
        midnight = now - now % DAY_S
        if midnight > self.at:
            return DayUse(now, num_replicas * (now - midnight))
        return replace(self, at=now, replica_s=self.replica_s + num_replicas * max(0.0, now - self.at))

    @property
    def next_midnight(self) -> float:
        return self.at - self.at % DAY_S + DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class DayBudget:
    """
    hours      of all replicas together, by day
    num_fixed  replicas that always run
    leave_s    from one decision until a replica has left that the next one gives up
    """

    hours: float
    num_fixed: int
    leave_s: float

    def left_s(self, use: DayUse) -> float:
        """Replica-seconds that are reserved for no replica."""
        return self.hours * HOUR_S - use.replica_s - self.num_fixed * (use.next_midnight - use.at)

    def is_spent(self, use: DayUse) -> bool:
        """More hours or fewer fixed replicas than when it was found to be so leave more. A second: sums of floats differ."""
        return self.left_s(use) < use.spent_s + 1.0

    def num_more(self, use: DayUse, *, stay_s: float = 0.0) -> int:
        """How many more than the fixed ones may run for `stay_s`, and leave then."""
        if self.is_spent(use):
            return 0
        need_s = stay_s + self.leave_s
        tomorrow_s = self.hours * HOUR_S - self.num_fixed * DAY_S
        return max(0, math.floor(min(self.left_s(use) / min(need_s, use.next_midnight - use.at), tomorrow_s / need_s)))
