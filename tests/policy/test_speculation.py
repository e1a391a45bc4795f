"""Tests how many drafts are computed: what is most tokens per second, and that nothing is spent for long on drafts that are wrong."""

from __future__ import annotations

from array import array
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.cost_curve import STALE_STEPS, CostCurve
from headrace.policy.speculation import ASK_EVERY, DraftRecord, Offer, Speculation, StepShape, StepTime, best_counts

pytestmark = pytest.mark.pure

TOKEN_S = 0.001


def roofline(num_tokens: int) -> float:
    return 0.01 + TOKEN_S * max(0, num_tokens - 12)


def known_curve() -> CostCurve:
    curve = CostCurve()
    for num_tokens in range(1, 16):
        curve.observe(num_tokens, roofline(num_tokens))
    return curve


def rate(counts: tuple[int, ...], offers: list[Offer], num_prompt: int) -> float:
    rows = len(offers)
    expected = rows + sum(offer.chance ** (place + 1) for offer, count in zip(offers, counts, strict=True) for place in range(count))
    return expected / (roofline(rows) + roofline(rows + num_prompt + sum(counts)) - roofline(rows + num_prompt))


@given(
    offers=st.lists(st.builds(Offer, st.floats(0.06, 0.99), st.integers(0, 3)), min_size=1, max_size=4),
    num_prompt=st.integers(0, 40),
    most=st.integers(0, 12),
)
def test_no_other_choice_makes_more_tokens_per_second(offers: list[Offer], num_prompt: int, most: int) -> None:
    """The reference implementation tries all."""
    counts, gain = best_counts(offers, StepShape(len(offers), num_prompt, most, TOKEN_S), known_curve(), 0.0)
    assert sum(counts) <= most
    assert all(count <= offer.num_drafts for count, offer in zip(counts, offers, strict=True))
    ways = product(*(range(offer.num_drafts + 1) for offer in offers))
    likely = [
        way for way in ways if sum(way) <= most and all(offer.chance**n >= 0.05 or n == 0 for offer, n in zip(offers, way, strict=True))
    ]
    found = rate(tuple(counts), offers, num_prompt)
    assert found == pytest.approx(max(rate(way, offers, num_prompt) for way in likely))
    assert gain == pytest.approx(found / rate((0,) * len(offers), offers, num_prompt) - 1, abs=1e-9)


def test_a_draft_beside_many_prompt_tokens_costs_what_a_prompt_token_costs() -> None:
    offers = [Offer(0.5, 3)] * 8
    assert sum(best_counts(offers, StepShape(8, 0, 100, TOKEN_S), known_curve(), 0.0)[0]) > 0
    assert sum(best_counts(offers, StepShape(8, 300, 100, 0.01), known_curve(), 0.0)[0]) == 0


def test_drafts_that_no_step_computes_say_how_often_they_are_right() -> None:
    speculation, record, tokens = Speculation(4, is_free=True, is_overlapped=True), DraftRecord(), array("i", [1])
    first = speculation.chance(record)
    for token in range(2, 80):
        speculation.leave(record, array("i", [token, token + 1, -5, -6]), tokens)
        tokens.append(token)
    assert 0.6 < speculation.chance(record) < 0.75, "two of the three that were tried"
    for token in range(80, 120):
        speculation.leave(record, array("i", [-1]), tokens)
        tokens.append(token)
    assert speculation.chance(record) < 0.2 < first
    assert speculation.chance(DraftRecord()) < first, "other sequences begin with what was seen of all"


class Machine:
    """One sequence on a machine of its own pace; time is what it says."""

    def __init__(self, *, accuracy: float, is_free: bool = True, token_s: float = 0.0, draft_s: float = 0.0, seed: int = 0) -> None:
        self.speculation = Speculation(4, is_free=is_free, is_overlapped=False)
        self.record, self.tokens, self.random = DraftRecord(), array("i", [0]), Random(seed)
        self.accuracy, self.token_s, self.draft_s = accuracy, token_s, draft_s
        self.drafts = array("i")
        self.now, self.plain_s = 0.0, 0.01

    def step(self, extra_s: float = 0.0) -> int:
        """Returns the number of drafts it computed."""
        speculation, shape = self.speculation, StepShape(1, 0, 100, self.token_s)
        if speculation.is_due:
            speculation.consider([self.record], shape)
        count = speculation.choose([Offer(speculation.chance(self.record), len(self.drafts))], shape)[0]
        if self.drafts and not count:
            speculation.leave(self.record, self.drafts, self.tokens)
        asked = speculation.most_asked()
        asked = speculation.asked_for(self.record, asked)
        noise, drafting_s = self.random.uniform(0.9, 1.1), self.draft_s * asked
        seconds = (self.plain_s + self.token_s * count + drafting_s) * noise + extra_s
        self.now += seconds
        speculation.end_step(shape, count, StepTime(seconds, drafting_s=drafting_s * noise, num_drafted=asked))
        given, known = self.drafts[:count], len(self.tokens)
        for draft in given:
            self.tokens.append(len(self.tokens))
            if self.tokens[-1] != draft:
                break
        else:
            self.tokens.append(len(self.tokens))
        if count:
            num_right = len(self.tokens) - known - 1
            speculation.observe(self.record, num_right, count)
            speculation.note_accepted(num_right)
        following = range(len(self.tokens), len(self.tokens) + asked)
        self.drafts = array("i", [token if self.random.random() < self.accuracy else -1 for token in following])
        return count


@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("accuracy", [0.0, 0.1, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("token_s", [0.0, 0.003, 0.02])
def test_no_pace_and_no_accuracy_makes_it_slower_by_three_percent(is_free: bool, accuracy: float, token_s: float) -> None:
    machine = Machine(accuracy=accuracy, is_free=is_free, token_s=token_s, draft_s=0.0 if is_free else 0.001)
    while machine.now < 20.0:
        machine.step()
    plain = machine.now / 0.01
    assert len(machine.tokens) > 0.97 * plain
    if accuracy >= 0.6 and token_s <= 0.003:
        assert len(machine.tokens) > 1.1 * plain


@pytest.mark.parametrize("is_free", [True, False])
def test_drafts_that_are_never_right_are_tried_again_now_and_then(is_free: bool) -> None:
    machine = Machine(accuracy=0.0, is_free=is_free, token_s=0.002, draft_s=0.001)
    first = [machine.step() for _ in range(2000)]
    assert 0 < sum(count > 0 for count in first) < 100
    machine.accuracy = 0.95
    later = [machine.step() for _ in range(2000)]
    assert sum(count > 0 for count in later) > 1000, "they have become right"


def test_a_machine_that_stands_still_does_not_switch_drafting_off() -> None:
    machine = Machine(accuracy=0.9, token_s=0.001)
    counts = [machine.step(extra_s=1.0 if step % 50 == 49 else 0.0) for step in range(600)]
    assert sum(count == 0 for count in counts[20:]) < 10


def test_what_was_lost_ends_speculation_whatever_is_predicted_and_it_rests() -> None:
    speculation, record, shape = Speculation(4, is_free=True, is_overlapped=False), DraftRecord(), StepShape(1, 0, 100, 0.0)
    speculation.end_step(shape, 0, StepTime(0.010))
    offered, tokens = array("i", [-1] * 4), array("i")

    def consider() -> bool:
        speculation.leave(record, offered, tokens)
        speculation.consider([record], shape)
        return speculation.is_on

    assert consider()
    num_on = 0
    while speculation.choose([Offer(0.7, 4)], shape)[0]:  # nothing says that no draft was right
        num_on += 1
        speculation.end_step(shape, 4, StepTime(0.014))
        assert num_on < 10
    rest = 0
    while not consider():
        rest += 1
        speculation.end_step(shape, 0, StepTime(0.010))
    assert 150 < rest < 400, "a hundred times what was lost"


def test_while_speculation_is_off_most_steps_ask_for_nothing() -> None:
    speculation = Speculation(4, is_free=True, is_overlapped=True)
    asked = [speculation.most_asked() for _ in range(8 * ASK_EVERY)]
    assert asked.count(4) == 8
    assert asked.count(0) == len(asked) - 8


def test_the_plan_that_ends_speculation_has_no_drafts() -> None:
    speculation, shape = Speculation(1, is_free=True, is_overlapped=True), StepShape(1, 0, 100, 0.0)
    speculation.end_step(shape, 0, StepTime(0.01))
    speculation.is_on, speculation._gain = True, -1.0
    assert speculation.choose([Offer(0.5, 1)], shape) == [0]
    assert not speculation.is_on


def test_what_a_step_without_drafts_takes_is_seen_again_now_and_then() -> None:
    machine = Machine(accuracy=0.95)
    counts = [machine.step() for _ in range(1000)]
    assert 4 <= counts[200:].count(0) <= 800 // STALE_STEPS + 1


def test_drafts_end_that_paid_only_beside_steps_that_were_slow_at_first() -> None:
    machine = Machine(accuracy=0.3, token_s=0.004)
    machine.plain_s = 0.02
    for _ in range(40):
        machine.step()
    machine.plain_s = 0.01
    counts = [machine.step() for _ in range(2000)]
    assert sum(count > 0 for count in counts[1000:]) < 100
