"""Decides how many drafted tokens are computed (docs/speculation.md, How many)."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.policy.cost_curve import MAX_CURVE_TOKENS, STALE_STEPS, CostCurve

FIRST_CHANCE, FIRST_WEIGHT = 0.7, 4.0
"""What is expected of drafts before any was seen, and as how many drafts that counts."""

MEAN_WEIGHT = 2.0
"""As how many drafts the mean of all sequences counts in the estimate for one."""

FADING, MEAN_FADING = 0.9, 0.98

LEAST_CHANCE = 0.05
"""A draft that is right less often is never computed."""

MIN_GAIN, LEAST_GAIN = 0.05, 0.01
"""Speculation begins above a predicted gain of the first, and ends below the second."""

QUICK_WEIGHT, SLOW_WEIGHT = 0.5, 0.125
"""The weight of a gain in the mean of gains. Slow: drafts that cost nothing are offered in some steps and not in others."""

MAX_LOSS_STEPS, MAX_CREDIT_STEPS = 2, 10
"""Speculation ends when it has lost the time of MAX_LOSS_STEPS steps. What it gained before is set off against it, up to the second."""

MAX_LOSS_SHARE = 0.01

CATCH_UP_STEPS = 64
"""What a draft model took for a prompt is charged over about this number of steps. For at most as many in a row its drafts' time is not
learned, because it catches up in them.
"""

MAX_CATCH_UP_STEPS = 4
"""Catching up counts in one step as the time of at most this number of steps: the machine may have stood still."""

NUM_DRAFT_TIMES = 8

PLAIN_EVERY = 16
"""At most one step of N is made without drafts because what such a step takes was not seen for long."""

START_EVERY, MAX_DEBT_STEPS = 2, 3
"""A draft model begins with one sequence, and doubles their number every START_EVERY steps, except while it owes the time of more than
MAX_DEBT_STEPS steps.
"""

ASK_EVERY = 4
"""While speculation is off, drafts that cost nothing are asked for in one step of N, and compared with the tokens that come."""

CONSIDER_EVERY_ON, CONSIDER_EVERY_OFF = 4, 16
"""Steps after which it is considered anew how many drafts a draft model makes."""

RETRY_EVERY = 32
"""In one consideration of N, a sequence without drafts gets one."""

NUM_EXACT = 16
EVERY_BEYOND = 4

NOTHING_OFFERED = array("i")


@dataclass(slots=True)
class DraftRecord:
    """right, tried  fading counts of drafts that were right, and of those that were tried: drafts behind a wrong one were not
    offered, at   drafts that no step computes, and the position of the first: they are compared with the tokens that come
    is_new        they were offered since the last plan
    wanted        drafts that a draft model makes in each step
    era           in which they were counted
    """

    right: float = 0.0
    tried: float = 0.0
    offered: array[int] = field(default_factory=lambda: NOTHING_OFFERED)
    at: int = 0
    is_new: bool = False
    wanted: int = 0
    era: int = 0


class Offer(NamedTuple):
    """chance: that a draft is right where those before it are"""

    chance: float
    num_drafts: int


class StepShape(NamedTuple):
    """A step without drafts. most: drafts that it has room for; token_s: of a token more, in a large step"""

    num_rows: int
    num_prompt_tokens: int
    most: int
    token_s: float


class StepTime(NamedTuple):
    """seconds that a step took, and gap_s for which the runner had waited for it

    drafting_s   of the seconds
    num_drafted  most drafts that a row got
    catches_up   a row that was asked for got none
    """

    seconds: float
    gap_s: float = 0.0
    drafting_s: float = 0.0
    num_drafted: int = 0
    catches_up: bool = False


class Speculation:
    """is_free        drafts take no time that counts
    is_overlapped  without speculation a step is planned while the one before runs; with it none is, and `gap_s` passes between two
    """

    def __init__(self, most: int, *, is_free: bool, is_overlapped: bool) -> None:
        self.most = most
        self.is_on = False
        self._is_free = is_free
        self._is_overlapped = is_overlapped
        self._curve = CostCurve()
        self._right = self._tried = 0.0
        self._era = 0
        self._gap_s = self._catch_up_s = 0.0
        self._draft_times: deque[float] = deque(maxlen=NUM_DRAFT_TIMES)
        self._num_catching_up = self._since_plain = 0
        self._gain: float | None = None
        self._loss_s = self._total_s = self._resume_at_s = 0.0
        self._value_s = self._rows_s = 0.0
        self._since_asked, self._since_considered = ASK_EVERY, CONSIDER_EVERY_OFF
        self._num_considered = 0
        self._has_offers = False

    # how often drafts are right

    def chance(self, record: DraftRecord) -> float:
        mean = (self._right + FIRST_CHANCE * FIRST_WEIGHT) / (self._tried + FIRST_WEIGHT)
        if record.era != self._era:
            return mean
        return (record.right + MEAN_WEIGHT * mean) / (record.tried + MEAN_WEIGHT)

    def observe(self, record: DraftRecord, num_right: int, num_drafts: int) -> None:
        tried = num_right + (num_right < num_drafts)
        if record.era != self._era:
            record.era, record.right, record.tried = self._era, 0.0, 0.0
        record.right, record.tried = FADING * record.right + num_right, FADING * record.tried + tried
        self._right, self._tried = MEAN_FADING * self._right + num_right, MEAN_FADING * self._tried + tried

    def note_accepted(self, num_accepted: int) -> None:
        """Drafts of the step that `end_step` was called for last."""
        self._loss_s -= num_accepted * self._value_s

    def leave(self, record: DraftRecord, drafts: array[int], tokens: array[int]) -> None:
        """No step computes the drafts, which follow `tokens`: what comes instead says whether they were right."""
        self.compare(record, tokens)
        record.is_new = self._has_offers = True
        if not record.offered:
            record.offered, record.at = drafts, len(tokens)

    def compare(self, record: DraftRecord, tokens: array[int]) -> None:
        """Drafts stay until one was wrong or all came: else only the first would ever be compared."""
        offered = record.offered
        came = tokens[record.at : record.at + len(offered)]
        right = next((place for place, (draft, token) in enumerate(zip(offered, came, strict=False)) if draft != token), len(came))
        if offered and (right < len(came) or len(came) == len(offered)):
            self.observe(record, right, len(came))
            record.offered = NOTHING_OFFERED

    # how long steps take

    def end_step(self, shape: StepShape, num_drafts: int, time: StepTime) -> None:
        num_plain = shape.num_rows + shape.num_prompt_tokens
        num_tokens = num_plain + num_drafts
        step_s = self._curve.seconds(num_tokens, shape.token_s)
        self._rows_s = self._curve.seconds(shape.num_rows, shape.token_s)
        self._value_s = self._rows_s / max(1, shape.num_rows)
        seconds = max(0.0, time.seconds - time.drafting_s)
        usual_s = min(max(seconds, step_s / 2), 1.5 * step_s) if step_s else seconds
        drafting_s = self._usual_drafting_s(time)
        self._total_s += usual_s + drafting_s
        self._loss_s = max(-MAX_CREDIT_STEPS * self._rows_s, self._loss_s)
        if self.is_on and shape.num_rows and step_s:
            gap_s = min(time.gap_s, self._rows_s) if self._is_overlapped else 0.0
            self._gap_s += 0.1 * (gap_s - self._gap_s)
            is_long = num_plain > MAX_CURVE_TOKENS  # the estimate of its seconds may be further off than drafts cost
            over_s = (step_s if is_long else usual_s) + gap_s - self._curve.seconds(num_plain, shape.token_s)
            self._catch_up_s += min(time.drafting_s - drafting_s, MAX_CATCH_UP_STEPS * self._rows_s)
            charged_s = self._catch_up_s / CATCH_UP_STEPS
            self._catch_up_s -= charged_s
            self._loss_s += min(over_s, self._rows_s) + drafting_s + charged_s
        if seconds:
            self._curve.observe(num_tokens, seconds)

    @property
    def _draft_s(self) -> float:
        """The least of the last ones: in some of them the draft model caught up too."""
        return min(self._draft_times, default=0.0)

    def _usual_drafting_s(self, time: StepTime) -> float:
        """What drafting took without catching up, which is charged apart from it."""
        if self._is_free or not time.num_drafted:
            return 0.0
        self._num_catching_up = self._num_catching_up + 1 if time.catches_up else 0
        is_first = not self._draft_times  # nothing says yet how much of it was catching up
        if not time.catches_up or self._num_catching_up > CATCH_UP_STEPS:
            self._draft_times.append(time.drafting_s / time.num_drafted)
        return 0.0 if is_first else min(time.drafting_s, time.num_drafted * self._draft_s)

    # decisions

    def choose(self, offers: Items[Offer], shape: StepShape) -> list[int]:
        if self.is_on and self._loss_s > MAX_LOSS_STEPS * self._rows_s > 0.0:
            self._turn_off()
        if not self.is_on:
            return [0] * len(offers)
        counts, gain = best_counts(offers, shape, self._curve, self._gap_s)
        if self._is_free:
            self._note_gain(gain)
        return counts if self.is_on and not self._needs_plain_step(shape) else [0] * len(offers)

    def _needs_plain_step(self, shape: StepShape) -> bool:
        """What a step of the rows alone takes is what loss and gain are judged by."""
        self._since_plain += 1
        since = self._curve.num_steps_since(shape.num_rows)
        if shape.num_prompt_tokens or self._since_plain < PLAIN_EVERY or (since is not None and since < STALE_STEPS):
            return False
        self._since_plain = 0
        return True

    @property
    def is_due(self) -> bool:
        """Whether `consider` is to be called in this plan; called once in each."""
        self._since_considered += 1
        if self._is_free:
            return self._has_offers and not self.is_on
        if self._since_considered < (CONSIDER_EVERY_ON if self.is_on else CONSIDER_EVERY_OFF):
            return False
        if not self.is_on and self._total_s < self._resume_at_s:
            return False
        self._since_considered = 0
        return True

    def consider(self, records: Items[DraftRecord], shape: StepShape) -> None:
        """Turn speculation on or off. records: of the sequences that decode"""
        if self._is_free:
            offers = [Offer(self.chance(record), len(record.offered)) for record in records if record.is_new]
            self._note_gain(best_counts(offers, shape, self._curve, self._gap_s)[1])
            for record in records:
                record.is_new = False
            self._has_offers = False
            return
        chances = [self.chance(record) for record in records]
        counts, gain = [0] * len(records), -1.0
        for most in sorted({min(most, self.most) for most in (1, 2, 4, 8, self.most)}):
            extra_s = self._gap_s + most * self._draft_s
            found, found_gain = best_counts([Offer(chance, most) for chance in chances], shape, self._curve, extra_s)
            if found_gain > gain:
                counts, gain = found, found_gain
        was_on = self.is_on
        self._note_gain(gain)
        self._num_considered += 1
        least = int(self._num_considered % RETRY_EVERY == 0)
        num_started = sum(record.wanted > 0 for record in records) if was_on else 0
        can_start = self._loss_s + self._catch_up_s <= MAX_DEBT_STEPS * self._rows_s
        left = max(1, num_started) if can_start else 0
        for record, count in zip(records, counts, strict=True):
            is_started, wanted = was_on and record.wanted > 0, max(count, least)
            if wanted and not is_started:
                left -= 1
            record.wanted = wanted if is_started or left >= 0 else 0
        if left < 0:
            self._since_considered = CONSIDER_EVERY_ON - START_EVERY

    def most_asked(self) -> int:
        """Drafts that are asked for in this plan, for each of its rows; a draft model's are `DraftRecord.wanted` at most. Called once in
        each plan with rows.
        """
        if self.is_on:
            return self.most
        self._since_asked += 1
        if not self._is_free or self._since_asked < ASK_EVERY:
            return 0
        self._since_asked = 0
        return self.most

    def asked_for(self, record: DraftRecord, most: int) -> int:
        return most if self._is_free else min(most, record.wanted)

    def _note_gain(self, gain: float) -> None:
        weight = SLOW_WEIGHT if self.is_on and self._is_free else QUICK_WEIGHT
        self._gain = gain if self._gain is None else self._gain + weight * (gain - self._gain)
        if self.is_on:
            if self._gain < LEAST_GAIN:
                self._turn_off()
        elif self._gain > MIN_GAIN and self._total_s >= self._resume_at_s:
            self.is_on, self._loss_s = True, 0.0

    def _turn_off(self) -> None:
        self.is_on = False
        self._resume_at_s = self._total_s + max(0.0, self._loss_s + self._catch_up_s) / MAX_LOSS_SHARE
        self._catch_up_s = 0.0
        if not self._is_free:  # nothing is learned of its drafts until it is tried again
            self._right = self._tried = 0.0
            self._era += 1
            self._gain = None
            self._draft_times.clear()


def best_counts(offers: Items[Offer], shape: StepShape, curve: CostCurve, extra_s: float) -> tuple[list[int], float]:
    """The drafts that make the most tokens per second, and the gain over the step without speculation; drafts are added in order of the
    chance that they count.

    extra_s  that speculation takes beside the drafts' share of the step

    The time of prompts is left out: a draft is worth what a row's token costs in a step of rows alone.
    """
    counts = [0] * len(offers)
    num_rows, num_prompt_tokens, most, token_s = shape
    rows_s = curve.seconds(num_rows, token_s) if num_rows else 0.0
    if not rows_s:
        return counts, 0.0
    chances = sorted(
        (-chance, place, i)
        for i, offer in enumerate(offers)
        for place in range(offer.num_drafts)
        if (chance := offer.chance ** (place + 1)) >= LEAST_CHANCE
    )[: max(0, most)]
    num_plain = num_rows + num_prompt_tokens
    others_s = rows_s + extra_s - curve.seconds(num_plain, token_s)
    expected, best_rate, best = float(num_rows), num_rows / (rows_s + extra_s), 0
    for num_drafts, (chance, _, _) in enumerate(chances, 1):
        expected -= chance
        if num_drafts > NUM_EXACT and num_drafts % EVERY_BEYOND and num_drafts < len(chances):
            continue
        rate = expected / (others_s + curve.seconds(num_plain + num_drafts, token_s))
        if rate > best_rate:
            best_rate, best = rate, num_drafts
    for _, _, i in chances[:best]:
        counts[i] += 1
    return counts, best_rate * rows_s / num_rows - 1
