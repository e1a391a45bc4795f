"""Remembers how many requests came in each part of earlier days, and expects as many at the same time of the day or week."""

from __future__ import annotations

import math

SLOT_S = 600.0
DAY_S = 86_400.0
WEEK_S = 7 * DAY_S
SLOTS_PER_DAY = round(DAY_S / SLOT_S)
SLOTS_PER_WEEK = 7 * SLOTS_PER_DAY
RECENT_SHARE = 0.4
"""Share of the last day (or week) in what is remembered of a slot: a lasting change counts half after two."""
UNKNOWN = -1.0


class ArrivalHistory:
    """Requests per second, in slots of the day and of the week: 1,152 numbers.

    days, weeks: by slot; UNKNOWN where none was seen
    """

    def __init__(self) -> None:
        self.days = [UNKNOWN] * SLOTS_PER_DAY
        self.weeks = [UNKNOWN] * SLOTS_PER_WEEK
        self._slot = math.nan
        self._num_arrived = 0.0
        self._since = math.nan

    @staticmethod
    def of(days: object, weeks: object) -> ArrivalHistory:
        """What an earlier one had. Raises ValueError where it is none."""
        made = ArrivalHistory()
        made.days, made.weeks = _rates(days, SLOTS_PER_DAY), _rates(weeks, SLOTS_PER_WEEK)
        return made

    def add(self, num_arrived: float, now: float) -> None:
        """num_arrived: since the last call; now: seconds since 1970, so that days begin where they begin in UTC"""
        slot = math.floor(now / SLOT_S)
        if slot != self._slot:
            self._close(now)
            self._slot, self._num_arrived, self._since = slot, 0.0, now
        self._num_arrived += num_arrived

    def expected(self, now: float, until: float) -> float:
        """The most requests per second that are expected in a slot from `now` to `until`; 0 where no earlier day is known."""
        slots = range(math.floor(now / SLOT_S), math.floor(until / SLOT_S) + 1)
        return max((self._expected_in(slot) for slot in slots), default=0.0)

    def _expected_in(self, slot: int) -> float:
        """As a week ago where that is known: weekends differ."""
        week = self.weeks[slot % SLOTS_PER_WEEK]
        return max(0.0, week if week != UNKNOWN else self.days[slot % SLOTS_PER_DAY])

    def _close(self, now: float) -> None:
        """A slot that was not seen whole, as the first one, tells nothing."""
        if math.isnan(self._slot) or self._since - self._slot * SLOT_S > SLOT_S / 10 or now - self._since > 1.5 * SLOT_S:
            return
        rate = self._num_arrived / SLOT_S
        for kept in (self.days, self.weeks):
            index = int(self._slot) % len(kept)
            kept[index] = rate if kept[index] == UNKNOWN else kept[index] + RECENT_SHARE * (rate - kept[index])


def _rates(given: object, count: int) -> list[float]:
    rates = [float(each) for each in given] if isinstance(given, list) and all(type(each) in (int, float) for each in given) else []
    if len(rates) != count or not all(rate == UNKNOWN or 0.0 <= rate < math.inf for rate in rates):
        raise ValueError(f"not {count} rates")
    return rates
