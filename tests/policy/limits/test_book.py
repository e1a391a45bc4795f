"""Tests the book of limits: nothing is taken beyond a limit, and what was taken is charged exactly once, whatever dies."""

from __future__ import annotations

import copy

import pytest
from dict_rows import DictRows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.policy.limits.book import LATE_MS, LEASE_S, UNNAMED_BEATS, Charges, Claim, Holder, LimitBook, PeerWatch, is_over
from headrace.policy.limits.counters import DAY_MS, KEPT_BUCKETS, Amounts, Moment, Unit, Window, bucket_of

pytestmark = pytest.mark.pure

NOON = 20_000 * DAY_MS + DAY_MS // 2
YEAR_MS = 365 * DAY_MS
START = Moment(1_000_000, NOON)


def tokens(amount: int | None, limit: int = 100) -> Claim:
    return Claim("t:acme/daily_tokens", Window.DAY, Unit.TOKENS, limit, amount)


def concurrent(limit: int = 2) -> Claim:
    return Claim("t:acme/max_concurrent_requests", Window.OPEN, Unit.OPEN, limit, 1)


def holder(name: str, *, gateway: str = "a", beat: int = 0, saved: int = 0) -> Holder:
    return Holder(id=name, gateway=gateway, beat=beat, saved=Amounts(requests=1, tokens=saved))


@pytest.fixture
def rows() -> DictRows:
    return DictRows()


@pytest.fixture
def book(rows: DictRows) -> LimitBook:
    return LimitBook(rows)


def used(book: LimitBook, claim: Claim, now: Moment = START) -> int:
    return book.read(claim, now).current


def test_a_request_takes_all_or_nothing(book: LimitBook) -> None:
    assert book.take(holder("r1"), [tokens(60), concurrent()], START).is_admitted
    refused = book.take(holder("r2"), [concurrent(), tokens(60)], START)
    assert not refused.is_admitted
    assert [reading.current for reading in refused.readings] == [1, 60]
    assert (used(book, tokens(0)), used(book, concurrent())) == (60, 1)


def test_a_charge_gives_back_what_was_not_used_once(book: LimitBook) -> None:
    book.take(holder("r1"), [tokens(60), concurrent()], START)
    assert book.charge("r1", Amounts(requests=1, tokens=10))
    assert (used(book, tokens(0)), used(book, concurrent())) == (10, 0)
    assert not book.charge("r1", Amounts(requests=1, tokens=60))
    assert used(book, tokens(0)) == 10


def test_more_than_was_reserved_is_charged_too(book: LimitBook) -> None:
    book.take(holder("r1"), [tokens(1)], START)
    book.charge("r1", Amounts(tokens=250))
    assert used(book, tokens(0)) == 250
    assert not book.take(holder("r2"), [tokens(1)], START).is_admitted


def test_a_request_is_charged_to_the_day_in_which_it_began(book: LimitBook) -> None:
    book.take(holder("r1"), [tokens(60)], START)
    tomorrow = Moment(START.steady_ms + DAY_MS, NOON + DAY_MS)
    book.take(holder("r2"), [tokens(5)], tomorrow)
    book.charge("r1", Amounts(tokens=10))
    assert (used(book, tokens(0)), used(book, tokens(0), tomorrow)) == (10, 5)


def test_a_counter_that_gave_twice_is_charged_once(book: LimitBook) -> None:
    book.take(holder("r1"), [tokens(20)], START)
    book.take(holder("r1"), [tokens(30)], START)
    assert used(book, tokens(0)) == 50
    book.charge("r1", Amounts(tokens=35))
    assert used(book, tokens(0)) == 35


def test_a_dead_gateways_requests_are_charged_by_what_was_saved(book: LimitBook, rows: DictRows) -> None:
    book.take(holder("r1", saved=7), [tokens(60), concurrent()], START)
    book.take(holder("r2", saved=9), [tokens(30)], START)
    book.renew("a", 1, {"r1": Amounts(requests=1, tokens=12), "r2": Amounts(requests=1, tokens=9)}, START)
    assert book.expire("a", 0, START) == 0, "it has moved since"
    assert book.expire("a", 1, START) == 2
    assert (used(book, tokens(0)), used(book, concurrent())) == (21, 0)
    assert book.expire("a", 1, START) == 0, "a second survivor finds nothing"
    rows.check()


def test_a_gateway_that_was_only_slow_corrects_what_a_survivor_charged(book: LimitBook, rows: DictRows) -> None:
    book.take(holder("r1", saved=7), [tokens(60)], START)
    book.expire("a", 0, START)
    assert book.charge("r1", Amounts(tokens=40))
    assert used(book, tokens(0)) == 40
    assert not rows.reservations


def test_an_expired_reservation_is_forgotten_after_its_time(book: LimitBook, rows: DictRows) -> None:
    book.take(holder("r1"), [tokens(60)], START)
    book.expire("a", 0, START)
    book.renew("b", 1, {}, Moment(START.steady_ms + LATE_MS - 1, NOON))
    assert rows.reservations
    book.renew("b", 2, {}, Moment(START.steady_ms + LATE_MS, NOON))
    assert not rows.reservations


def test_what_a_living_gateway_does_not_name_is_given_back(book: LimitBook) -> None:
    book.take(holder("given-up", saved=50), [tokens(60)], START)
    book.take(holder("open", beat=0), [tokens(30)], START)
    book.renew("a", UNNAMED_BEATS - 1, {"open": Amounts(tokens=30)}, START)
    assert used(book, tokens(0)) == 90
    book.renew("a", UNNAMED_BEATS, {"open": Amounts(tokens=30)}, START)
    assert used(book, tokens(0)) == 30


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000, YEAR_MS, -YEAR_MS])
def test_a_clock_that_jumps_and_comes_back_finds_every_count(book: LimitBook, jump_ms: int) -> None:
    minute = Claim("t:acme/requests_per_minute", Window.MINUTE, Unit.REQUESTS, 3, 1)
    month = Claim("t:acme/monthly_tokens", Window.MONTH, Unit.TOKENS, 100, 60)
    assert book.take(None, [minute, tokens(60), month], START).is_admitted
    jumped = Moment(START.steady_ms + 1000, NOON + jump_ms)
    in_jump = book.take(None, [minute, tokens(60), month], jumped)
    is_other_day = abs(jump_ms) > DAY_MS
    assert in_jump.is_admitted == is_other_day
    assert in_jump.readings[0].current == 1, "the minute is measured on the clock that does not jump"
    back = Moment(START.steady_ms + 2000, NOON + 2000)
    assert not book.take(None, [tokens(60)], back).is_admitted
    assert (used(book, tokens(0), back), used(book, month, back)) == (60, 60)
    assert book.read(minute, back).current == 1 + is_other_day


def test_a_counter_keeps_few_buckets(book: LimitBook, rows: DictRows) -> None:
    for day in range(3 * KEPT_BUCKETS):
        book.take(None, [tokens(5)], Moment(0, NOON + day * DAY_MS))
    assert len(rows.counters["t:acme/daily_tokens"]) == KEPT_BUCKETS


def test_a_gateway_is_dead_when_its_beat_stands_still() -> None:
    watch = PeerWatch("me")
    assert watch.dead({"me": 1, "other": 1}, 0.0) == []
    assert watch.dead({"me": 1, "other": 1}, LEASE_S - 0.1) == []
    assert watch.dead({"me": 1, "other": 2}, LEASE_S) == []
    assert watch.dead({"me": 1, "other": 2, "new": 9}, 2 * LEASE_S) == [("other", 2)]
    assert watch.dead({"me": 1, "new": 9}, 3 * LEASE_S) == [("new", 9)]


LIMITS = {"daily_tokens": 100, "max_concurrent_requests": 3, "input_tokens_per_minute": 60}


class BookMachine(RuleBasedStateMachine):
    """Two gateways of one tenant that take, charge, die and come back, while the calendar's clock jumps."""

    @initialize()
    def begin(self) -> None:
        self.rows = DictRows()
        self.book = LimitBook(self.rows)
        self.now = START
        self.open: dict[str, tuple[str, int]] = {}
        self.beats = {"a": 0, "b": 0}
        self.ended: dict[str, Amounts] = {}
        self.number = 0

    def claims(self, amount: int) -> list[Claim]:
        return [
            Claim("daily_tokens", Window.DAY, Unit.TOKENS, LIMITS["daily_tokens"], amount),
            Claim("max_concurrent_requests", Window.OPEN, Unit.OPEN, LIMITS["max_concurrent_requests"], 1),
            Claim("input_tokens_per_minute", Window.MINUTE, Unit.INPUT, LIMITS["input_tokens_per_minute"], amount // 2),
        ]

    @rule(gateway=st.sampled_from("ab"), amount=st.integers(0, 70), data=st.data())
    def take(self, gateway: str, amount: int, data: st.DataObject) -> None:
        self.number += 1
        name = f"r{self.number}"
        claims = self.claims(amount)
        charges = Charges(gateway, self.some_ended(gateway, data))
        twin = copy.deepcopy(self.rows)
        for charge in charges.used.items():
            LimitBook(twin).charge(*charge)
        before = [LimitBook(twin).read(claim, self.now) for claim in claims]
        one = Holder(id=name, gateway=gateway, beat=self.beats[gateway], saved=Amounts(tokens=amount))
        result = self.book.take(one, claims, self.now, charges)
        assert list(result.readings) == before, "what is charged on the way counts for the take"
        assert result.is_admitted == (not any(is_over(*pair, self.now) for pair in zip(claims, before, strict=True)))
        if result.is_admitted:
            self.open[name] = (gateway, amount)

        self.ended |= charges.used
        assert not any(self.book.charge(*again) for again in self.ended.items()), "a charge that is sent again finds nothing"

    def some_ended(self, gateway: str, data: st.DataObject) -> dict[str, Amounts]:
        """Some requests of a gateway end, and some that were charged before are charged again."""
        own = sorted(name for name, of in self.open.items() if of[0] == gateway)
        names = data.draw(st.sets(st.sampled_from(own))) if own else set[str]()
        again = data.draw(st.sets(st.sampled_from(sorted(self.ended)))) if self.ended else set[str]()
        parts = {name: data.draw(st.integers(0, self.open.pop(name)[1])) for name in sorted(names)}
        return {name: Amounts(requests=1, input=part // 2, tokens=part) for name, part in parts.items()} | {
            name: self.ended[name] for name in again
        }

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def charge(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        _, amount = self.open.pop(name)
        part = data.draw(st.integers(0, amount))
        assert self.book.charge(name, Amounts(requests=1, input=part // 2, tokens=part))

    @rule(gateway=st.sampled_from("ab"))
    def renew(self, gateway: str) -> None:
        self.beats[gateway] += 1
        saved = {name: Amounts(tokens=amount // 3) for name, (holder, amount) in self.open.items() if holder == gateway}
        self.book.renew(gateway, self.beats[gateway], saved, self.now)

    @rule(gateway=st.sampled_from("ab"), is_dead=st.booleans())
    def expire(self, gateway: str, is_dead: bool) -> None:
        num_open = sum(holder == gateway for holder, _ in self.open.values())
        num_expired = self.book.expire(gateway, self.rows.gateways.get(gateway, -1), self.now)
        assert num_expired <= num_open
        assert self.book.expire(gateway, self.rows.gateways.get(gateway, -1), self.now) == 0
        if is_dead:
            self.open = {name: of for name, of in self.open.items() if of[0] != gateway}

    @rule(days=st.sampled_from([-365, -1, 0, 1, 365]), ms=st.integers(0, 120_000))
    def wait(self, days: int, ms: int) -> None:
        self.now = Moment(self.now.steady_ms + ms, NOON + days * DAY_MS)

    @invariant()
    def checked(self) -> None:
        self.rows.check()
        for bucket, amount in self.rows.counters.get("daily_tokens", {}).items():
            assert 0 <= amount <= LIMITS["daily_tokens"], bucket
        assert self.book.read(self.claims(0)[1], self.now).current <= LIMITS["max_concurrent_requests"]
        assert bucket_of(Window.OPEN, self.now) == 0


TestBookMachine = BookMachine.TestCase
TestBookMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
