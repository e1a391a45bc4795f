"""Tests that an overload is told from a peak: by a small server of one speed, to which clients send in several ways."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator

import pytest

from headrace.core.request import PriorityClass
from headrace.policy.admission.config import PEAK_WAIT_S, SHORT_WAIT_S, AdmissionRules
from headrace.policy.admission.decision import AdmissionOutcome, QueueState, TenantTurn, decide
from headrace.policy.admission.overload import CALM_WAITS, OverloadWatch

pytestmark = pytest.mark.pure

RULES = AdmissionRules()


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
        queue = self.watch.arrive(queue, RULES, num_open=len(self.ends) + 1, now=now)
        if queue.is_overloaded:
            self.overloaded.append(now)
        verdict = decide(queue, None, has_smaller=False, priority=PriorityClass.STANDARD, rules=RULES, ttft_goal_s=goal_s)
        if verdict.outcome is AdmissionOutcome.REFUSED:
            self.watch.refuse(queue, RULES, now=now)
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
        queue = self.watch.arrive(whole, RULES, num_open=num_open, now=now).at_turn(turn)
        if decide(queue, None, has_smaller=False, priority=PriorityClass.STANDARD, rules=RULES).outcome is AdmissionOutcome.REFUSED:
            self.watch.refuse(queue, RULES, now=now)
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
