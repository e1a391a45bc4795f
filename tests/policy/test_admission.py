"""Tests admission decisions: each outcome holds where it should, and the first that holds is taken."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.load import ClassLoad, EngineCounters, LoadSnapshot, summed
from headrace.core.request import PriorityClass
from headrace.policy.admission import (
    BUSY_DEPTH,
    CALM_WAITS,
    MAX_RETRY_S,
    MIN_RETRY_S,
    AdmissionOutcome,
    OverloadWatch,
    QueueState,
    TenantTurn,
    decide,
    full_queue_retry_s,
    queue_state,
    retry_after_s,
)
from headrace.policy.config import PEAK_WAIT_S, SHORT_WAIT_S, AdmissionRules
from headrace.policy.queues import traits_of
from headrace.policy.routing.predicted_time import RequestSize, SentSince

pytestmark = pytest.mark.pure

RULES = AdmissionRules(max_wait_s=8.0)
PREMIUM, STANDARD, BATCH = PriorityClass.PREMIUM, PriorityClass.STANDARD, PriorityClass.BATCH
IDLE, DEEP, LONG = QueueState(0, 0.0), QueueState(11, 1.0), QueueState(3, 100.0)

states = st.none() | st.builds(QueueState, st.integers(0, 50), st.floats(0, 100), st.just(0), st.floats(0, 20), st.booleans())


def bound_s(queue: QueueState, goal_s: float | None = None) -> float:
    return RULES.wait_bound_s(queue.answer_s, goal_s, is_overloaded=queue.is_overloaded)


def outcome(queue: QueueState | None) -> AdmissionOutcome:
    return decide(queue, rules=RULES).outcome


@given(own=st.integers(1, 50), others=st.lists(st.integers(1, 50), max_size=5), depth=st.integers(0, 2000), wait_s=st.floats(0, 1000))
def test_a_tenant_waits_for_its_turns_and_at_most_for_the_whole_queue(own: int, others: list[int], depth: int, wait_s: float) -> None:
    """With t tenants in turns, the last of its k requests is served after at most k * t of them."""
    turn = TenantTurn(own, own + sum(others), 1 + len(others))
    found = QueueState(depth, wait_s, num_slots=8).at_turn(turn)
    assert found.depth <= depth
    assert found.wait_s <= wait_s
    if not others or own >= max(max(others), 3):
        assert found == QueueState(depth, wait_s, num_slots=8), "the largest finds the whole queue"
    if others and own * (1 + len(others)) <= 2:
        assert (found.depth, found.wait_s) == (0, 0.0), "a sequence of another tenant makes room at once"
    assert QueueState(depth, wait_s).at_turn(turn) == QueueState(depth, wait_s), "an engine that knows no tenants"


def test_a_short_queue_is_joined_as_if_there_were_no_rules() -> None:
    assert outcome(QueueState(10, 8.0)) is AdmissionOutcome.SERVED
    assert outcome(None) is AdmissionOutcome.SERVED, "a server that does not report its load"


def test_a_wait_is_joined_up_to_its_bound() -> None:
    assert outcome(QueueState(0, 8.0)) is AdmissionOutcome.SERVED
    assert outcome(QueueState(0, 8.01)) is AdmissionOutcome.REFUSED


def test_a_goal_for_the_first_token_shortens_the_wait_and_never_lengthens_it() -> None:
    def with_goal(goal_s: float) -> AdmissionOutcome:
        return decide(QueueState(0, 3.0), rules=RULES, ttft_goal_s=goal_s).outcome

    assert with_goal(2.0) is AdmissionOutcome.REFUSED
    assert with_goal(4.0) is AdmissionOutcome.REFUSED, "its own prompt would take the rest of the goal"
    assert with_goal(6.0) is AdmissionOutcome.SERVED
    assert RULES.wait_bound_s(100.0, 100.0, is_overloaded=True) == RULES.max_wait_s


def test_while_a_replica_starts_an_overload_allows_every_wait_but_the_longest() -> None:
    long = QueueState(40, RULES.max_wait_s, is_overloaded=True)
    assert outcome(long) is AdmissionOutcome.REFUSED
    assert outcome(replace(long, is_growing=True)) is AdmissionOutcome.QUEUED
    assert outcome(replace(long, wait_s=RULES.max_wait_s + 0.1, is_growing=True)) is AdmissionOutcome.REFUSED
    assert decide(replace(long, is_growing=True), rules=RULES, ttft_goal_s=2.0).outcome is AdmissionOutcome.REFUSED, "a goal is a goal"


def test_an_overload_of_the_replicas_before_is_none_of_those_that_serve_now() -> None:
    watch, rules = OverloadWatch(), AdmissionRules()
    long = QueueState(40, 30.0, answer_s=1.0)
    watch.refuse(long, rules, now=0.0)
    assert watch.arrive(long, rules, num_open=50, now=1.0).is_overloaded
    assert not watch.arrive(replace(long, is_growing=True), rules, num_open=60, now=2.0).is_overloaded
    assert not watch.arrive(long, rules, num_open=60, now=3.0).is_overloaded


def test_a_lasting_overload_allows_a_short_wait_and_a_peak_a_longer_one() -> None:
    """The times of quick answers, of slow ones, and of answers that take longer than anybody may wait."""
    for answer_s, short_s, peak_s in ((0.3, 0.5, 8.0), (0.7, 0.7, 8.0), (6.0, 6.0, 8.0), (50.0, 8.0, 8.0)):
        for is_overloaded, expected in ((True, short_s), (False, peak_s)):
            assert bound_s(QueueState(0, 0.0, answer_s=answer_s, is_overloaded=is_overloaded)) == expected
    assert AdmissionRules().wait_bound_s(0.3, None, is_overloaded=False) == 10.0


@given(states, st.none() | st.floats(0.1, 100))
def test_a_refusal_is_the_last_resort_and_says_when_to_come_back(queue: QueueState | None, goal_s: float | None) -> None:
    verdict = decide(queue, rules=RULES, ttft_goal_s=goal_s)
    if verdict.outcome is AdmissionOutcome.REFUSED:
        assert queue is not None
        assert queue.wait_s > bound_s(queue, goal_s)
        assert MIN_RETRY_S <= verdict.retry_after_s <= MAX_RETRY_S
        back = replace(queue, wait_s=max(0.0, queue.wait_s - verdict.retry_after_s - 1e-6), depth=0, is_overloaded=True)
        assert verdict.retry_after_s == MAX_RETRY_S or outcome(back) is AdmissionOutcome.SERVED or goal_s, "it comes back in time"
    if verdict.outcome is AdmissionOutcome.QUEUED:
        assert queue is not None
        assert queue.wait_s <= bound_s(queue, goal_s)
        assert queue.depth > BUSY_DEPTH


def load(**changes: float) -> LoadSnapshot:
    plain = {"num_running": 0, "num_waiting": 0, "kv_blocks_free": 900, "kv_blocks_cached": 0, "kv_blocks_used": 0, "kv_blocks_total": 900}
    given = {**plain, "max_num_seqs": 8, "step_fixed_s": 0.01, "step_token_s": 0.001, **changes}
    return LoadSnapshot(counters=EngineCounters(), **given)  # type: ignore[arg-type]


def test_a_queue_counts_what_was_sent_since_the_report_only_beyond_the_free_slots() -> None:
    size = RequestSize(0, 64)
    assert queue_state(load(), SentSince(8, 80), size, lowest=BATCH, block_size=16).depth == 0
    assert queue_state(load(), SentSince(20, 200), size, lowest=BATCH, block_size=16).depth == 12
    assert queue_state(load(num_running=8, num_waiting=5), SentSince(2, 20), size, lowest=BATCH, block_size=16).depth == 7


def test_the_wait_is_what_was_there_before_and_not_the_requests_own_prompt() -> None:
    size = RequestSize(0, 64)
    assert queue_state(load(), SentSince(), size, lowest=BATCH, block_size=16).wait_s == 0.0
    assert queue_state(load(num_queued_tokens=3000), SentSince(1, 1000), size, lowest=BATCH, block_size=16).wait_s == 4.0
    assert (
        queue_state(load(step_fixed_s=0.0, step_token_s=0.0, num_queued_tokens=3000), SentSince(), size, lowest=BATCH, block_size=16).wait_s
        == 0.0
    )
    full = queue_state(load(num_running=8, num_waiting=8), SentSince(), size, lowest=BATCH, block_size=16)
    assert full.wait_s > 64 * 0.018, "each slot becomes free once in the time of an output"


class_loads = st.lists(st.builds(ClassLoad, st.integers(0, 8), st.integers(0, 500), st.integers(0, 10**6)), min_size=3, max_size=3)


def wait_of(priority: PriorityClass, classes: list[ClassLoad], **changes: float) -> QueueState:
    whole = summed(tuple(classes))
    seen = load(num_running=whole.num_running, num_waiting=whole.num_waiting, num_queued_tokens=whole.num_queued_tokens, **changes)
    size = RequestSize(0, 64)
    return queue_state(replace(seen, classes=tuple(classes)), SentSince(), size, lowest=priority, block_size=16)


def test_a_premium_request_waits_for_no_batch_request() -> None:
    idle, flood = ClassLoad(), ClassLoad(8, 500, 200_000)
    for priority in (PREMIUM, STANDARD):
        found = wait_of(priority, [idle, idle, flood])
        assert (found.depth, found.wait_s) == (0, 0.0)
    assert wait_of(BATCH, [idle, idle, flood]).wait_s > 200.0
    assert wait_of(PREMIUM, [flood, idle, idle]).wait_s == wait_of(BATCH, [flood, idle, idle]).wait_s > 200.0


@given(class_loads, st.none() | st.floats(0.1, 100))
def test_a_higher_class_is_never_refused_where_a_lower_one_is_not(classes: list[ClassLoad], goal_s: float | None) -> None:
    verdicts = [decide(wait_of(priority, classes), rules=RULES, ttft_goal_s=goal_s) for priority in PriorityClass]
    refused = [verdict.outcome is AdmissionOutcome.REFUSED for verdict in verdicts]
    assert refused == sorted(refused)
    retries = [verdict.retry_after_s for verdict in verdicts if verdict.outcome is AdmissionOutcome.REFUSED]
    assert retries == sorted(retries), "a lower class is asked to stay away for longer"


def test_a_load_without_classes_is_taken_whole() -> None:
    seen = load(num_waiting=7, num_queued_tokens=9000)
    of_all = queue_state(seen, SentSince(), RequestSize(0, 64), lowest=BATCH, block_size=16)
    assert queue_state(seen, SentSince(), RequestSize(0, 64), lowest=PREMIUM, block_size=16) == of_all
    assert (of_all.depth, of_all.wait_s) == (7, 9.0)


def test_a_full_queue_and_the_ladder_make_one_retry_time_of_one_wait() -> None:
    seen = load(num_running=8, num_waiting=64, num_queued_tokens=1000)
    queue = queue_state(seen, SentSince(), RequestSize(0, 128), lowest=BATCH, block_size=16)
    assert full_queue_retry_s(seen, BATCH, block_size=16) == retry_after_s(queue, 0.0) == pytest.approx(queue.wait_s)
    assert MIN_RETRY_S < queue.wait_s < MAX_RETRY_S
    refused = decide(queue, rules=RULES)
    assert refused.retry_after_s == retry_after_s(queue, bound_s(replace(queue, is_overloaded=True)))


def test_the_retry_time_of_a_full_queue_is_bounded() -> None:
    def retry_s(**changes: float) -> float:
        return full_queue_retry_s(load(**changes), STANDARD, block_size=16)

    assert retry_s(step_fixed_s=0.0, step_token_s=0.0, num_waiting=1000) == MIN_RETRY_S, "of an engine that has computed nothing yet"
    assert retry_s(num_queued_tokens=10) == MIN_RETRY_S
    assert retry_s(num_queued_tokens=10**9) == MAX_RETRY_S


def test_the_answers_that_ended_say_how_long_a_slot_is_taken() -> None:
    full = load(num_running=8, num_waiting=64)
    short, long = (
        replace(full, counters=EngineCounters(generation_tokens=10 * mean, finished={"stop": 6, "length": 4})) for mean in (50, 150)
    )
    first, second = (full_queue_retry_s(each, STANDARD, block_size=16) for each in (short, long))
    assert second == pytest.approx(3 * first, rel=0.01)


def test_a_full_queue_asks_a_premium_request_to_stay_away_for_no_batch_request() -> None:
    classes = (ClassLoad(), ClassLoad(), ClassLoad(8, 64, 30_000))
    seen = replace(load(num_running=8, num_waiting=64, num_queued_tokens=30_000), classes=classes)
    assert full_queue_retry_s(seen, PREMIUM, block_size=16) == MIN_RETRY_S
    assert full_queue_retry_s(seen, BATCH, block_size=16) > 30.0
    assert full_queue_retry_s(seen, traits_of("fair").lowest_before(PREMIUM), block_size=16) > 30.0, "a policy that knows no classes"


DEFAULT_RULES = AdmissionRules()


class Server:
    """Answers one request after another, `rate` in a second. waits: of the requests that were let in; overloaded: times at which it was"""

    def __init__(self, rate: float, answer_s: float = 0.5) -> None:
        self.rate, self.answer_s = rate, answer_s
        self.watch = OverloadWatch()
        self.ends: list[float] = []
        self.waits: list[tuple[float, float]] = []
        self.refused: list[float] = []
        self.overloaded: list[float] = []

    def ask(self, now: float, goal_s: float | None = None) -> float | None:
        """The end of the answer; None: the request is refused."""
        self.ends = [end for end in self.ends if end > now]
        wait_s = self.ends[-1] - now if self.ends else 0.0
        queue = QueueState(len(self.ends), wait_s, answer_s=self.answer_s)
        queue = self.watch.arrive(queue, DEFAULT_RULES, num_open=len(self.ends) + 1, now=now)
        if queue.is_overloaded:
            self.overloaded.append(now)
        verdict = decide(queue, rules=DEFAULT_RULES, ttft_goal_s=goal_s)
        if verdict.outcome is AdmissionOutcome.REFUSED:
            self.watch.refuse(queue, DEFAULT_RULES, now=now)
            self.refused.append(now)
            return None
        self.waits.append((now, wait_s))
        self.ends.append(now + wait_s + 1 / self.rate)
        return self.ends[-1]


def arrivals(rate_at: Callable[[float], float], seconds: float) -> Iterator[float]:
    """Moments of requests that come at random, at a rate that may change."""
    draw, now = random.Random(3), 0.0
    while (now := now + draw.expovariate(rate_at(now))) < seconds:
        yield now


def closed(server: Server, num_clients: int, seconds: float) -> int:
    """Clients that each send their next request when the last one is answered. Returns the number of answers."""
    moments, num_answers = [0.001 * number for number in range(num_clients)], 0
    while (now := heapq.heappop(moments)) < seconds:
        if (end := server.ask(now)) is None:
            end = now + 1.0
        else:
            num_answers += 1
        heapq.heappush(moments, end)
    return num_answers


@pytest.mark.parametrize("num_clients", [20, 100, 390])
def test_a_fixed_number_of_clients_is_never_refused(num_clients: int) -> None:
    """390 clients of 40 answers a second wait almost ten seconds, and none of their requests is refused."""
    server = Server(40.0)
    assert closed(server, num_clients, 60.0) > 59 * min(40, 2 * num_clients)
    assert not server.refused
    assert not server.overloaded


def test_a_peak_waits_and_is_served_whole() -> None:
    server = Server(40.0)
    answered = [server.ask(0.001 * number) for number in range(380)]
    assert None not in answered
    assert not server.overloaded


@pytest.mark.parametrize("times", [1.3, 2.0, 10.0, 50.0])
def test_what_is_let_in_during_an_overload_waits_a_short_time(times: float) -> None:
    server = Server(40.0)
    for now in arrivals(lambda _: 40.0 * times, 60.0):
        server.ask(now)
    assert max(wait_s for _, wait_s in server.waits) <= PEAK_WAIT_S
    in_time = [now for now, wait_s in server.waits if wait_s <= SHORT_WAIT_S]
    assert len(in_time) >= 0.8 * 40.0 * 60.0, "nothing of what the server can do is lost but the peak at the beginning"
    assert all(wait_s <= SHORT_WAIT_S for now, wait_s in server.waits if now > 30.0)


def test_a_load_just_below_what_the_server_can_do_is_no_overload() -> None:
    server = Server(40.0)
    for now in arrivals(lambda _: 36.0, 300.0):
        server.ask(now)
    assert not server.refused


def test_an_overload_ends_soon_after_the_load_has_fallen() -> None:
    server = Server(40.0)
    for now in arrivals(lambda at: 400.0 if at < 20.0 else 20.0, 60.0):
        server.ask(now)
    assert max(server.refused) < 23.0
    assert max(server.overloaded) < max(server.refused) + CALM_WAITS * SHORT_WAIT_S


def test_slow_answers_lengthen_every_time_of_the_watch() -> None:
    """Three prompts of half a minute each: the second and the third wait, as they would anywhere."""
    server = Server(1 / 27.0, answer_s=27.0)
    assert [server.ask(now) is None for now in (0.0, 1.0, 2.0)] == [False, False, False]
    assert server.ask(3.0) is None, "the wait of 78 s is beyond max_wait_s"


def test_a_refusal_for_a_tiers_goal_is_no_overload() -> None:
    server = Server(40.0)
    for number in range(60):
        server.ask(0.001 * number)
    assert server.ask(0.1, goal_s=1.0) is None
    assert server.ask(0.2) is not None
    assert not server.overloaded


class FairServer:
    """A server that answers tenants in turns, one request after another. let_in: tenant, arrival and begin of each, as they begin"""

    def __init__(self, rate: float) -> None:
        self.rate, self.free_at = rate, 0.0
        self.watch = OverloadWatch()
        self.waiting: dict[str, list[float]] = {"flood": [], "small": []}
        self.refused = dict.fromkeys(self.waiting, 0)
        self.let_in: list[tuple[str, float, float]] = []
        self.last = "flood"

    def serve(self, until: float) -> None:
        while self.free_at <= until and any(self.waiting.values()):
            self.last = min((name for name in self.waiting if self.waiting[name]), key=lambda name: name == self.last)
            arrived = self.waiting[self.last].pop(0)
            begin = max(self.free_at, arrived)
            self.let_in.append((self.last, arrived, begin))
            self.free_at = begin + 1 / self.rate

    def ask(self, tenant: str, now: float) -> None:
        self.serve(now)
        counts = {name: len(waiting) + (name == tenant) for name, waiting in self.waiting.items()}
        num_open = sum(counts.values())
        whole = QueueState(num_open - 1, max(0.0, self.free_at - now) + (num_open - 1) / self.rate, num_slots=1, answer_s=0.5)
        turn = TenantTurn(counts[tenant], num_open, sum(map(bool, counts.values())))
        queue = self.watch.arrive(whole, DEFAULT_RULES, num_open=num_open, now=now).at_turn(turn)
        if decide(queue, rules=DEFAULT_RULES).outcome is AdmissionOutcome.REFUSED:
            self.watch.refuse(queue, DEFAULT_RULES, now=now)
            self.refused[tenant] += 1
        else:
            self.waiting[tenant].append(now)


def test_a_flood_of_twenty_times_the_load_refuses_nothing_of_a_tenant_with_a_tenth() -> None:
    server = FairServer(40.0)
    flood = [("flood", now) for now in arrivals(lambda _: 800.0, 20.0)]
    small = [("small", now) for now in arrivals(lambda _: 4.0, 20.0)]
    for tenant, now in sorted([*flood, *small], key=lambda pair: pair[1]):
        server.ask(tenant, now)
    assert not server.refused["small"]
    assert server.refused["flood"] > 10_000
    assert max(begin - arrived for tenant, arrived, begin in server.let_in if tenant == "small") <= 8 / server.rate, "its turns"


def test_a_small_tenants_burst_is_not_refused_for_the_queue_that_a_flood_has_filled() -> None:
    """The flood fills a peak's bound in half a second, and is an overload from then on. 30 turns of two tenants take 1.5 s."""
    server = FairServer(40.0)
    for now in arrivals(lambda _: 800.0, 2.0):
        server.ask("flood", now)
    assert server.refused["flood"]
    for _ in range(30):
        server.ask("small", 2.0)
    assert not server.refused["small"]
    server.serve(60.0)
    assert max(begin - arrived for tenant, arrived, begin in server.let_in if tenant == "small") == pytest.approx(1.5, abs=0.1)
