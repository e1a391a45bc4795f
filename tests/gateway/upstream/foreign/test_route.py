"""Tests the attempts of one request over any servers and failures: bounded, each server once before one again, never one that
takes none.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import HeadraceError, Unavailable
from headrace.gateway.upstream.foreign.attempt import AttemptFailed, AttemptResult
from headrace.gateway.upstream.foreign.facts import ListedModel, ReportedLoad
from headrace.gateway.upstream.foreign.server import ForeignServer
from headrace.gateway.upstream.foreign.session import ForeignSession
from headrace.gateway.upstream.foreign.stream import CAN_PASS, MAX_ATTEMPTS, MAX_RETRY_WAIT_S, ForeignRoute
from headrace.gateway.upstream.model_config import ForeignConfig
from headrace.policy.routing.failures import RetryBudget

pytestmark = pytest.mark.pure

FAILURES = [result for result in AttemptResult if result not in (AttemptResult.OK, AttemptResult.ABANDONED)]


class Times:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def made(clock: Times, index: int = 0, *, order: int = 0, max_model_len: int | None = None, is_reachable: bool = True) -> ForeignServer:
    config = ForeignConfig(url="http://127.0.0.1:1/v1", order=order)
    server = ForeignServer("m", f"foreign-{index}", config, cast(ForeignSession, None), clock=clock, unix_time=clock)
    server.is_reachable = is_reachable
    server.listed = ListedModel(True, max_model_len)
    return server


def routed(
    clock: Times,
    servers: list[ForeignServer],
    max_tokens: int | None = None,
    budget: RetryBudget | None = None,
    *,
    places: dict[ForeignServer, int] | None = None,
    keeps_first: bool = False,
) -> ForeignRoute:
    return ForeignRoute(
        places or dict.fromkeys(servers, 0),
        max_tokens=max_tokens,
        keeps_first=keeps_first,
        budget=budget or RetryBudget(),
        clock=clock,
        random=random.Random(5),
    )


def attempted(route: ForeignRoute, clock: Times, outcomes: Sequence[AttemptResult]) -> list[ForeignServer]:
    """The servers of all attempts, when each ends as `outcomes` say; there are enough of these."""
    asked: list[ForeignServer] = []
    for outcome in outcomes:
        try:
            server = route.pick()
            assert server.can_take(clock.now)
            assert server not in asked or all(each in asked or not each.can_take(clock.now) for each in route._servers)
            assert server not in asked or route.tried[server] in CAN_PASS
            asked.append(server)
            clock.now += route.pause_s(server, AttemptFailed(outcome, Unavailable("x")))
        except HeadraceError:
            return asked
    raise AssertionError("the attempts did not end")


@st.composite
def sites(draw: st.DrawFn) -> list[tuple[int, int | None, bool, bool]]:
    """Servers: order, context, whether it can be reached, whether its circuit is open."""
    each = st.tuples(st.integers(0, 2), st.sampled_from([None, 8, 16]), st.booleans(), st.booleans())
    return draw(st.lists(each, min_size=1, max_size=6))


@given(site=sites(), outcomes=st.lists(st.sampled_from(FAILURES), min_size=20, max_size=20), max_tokens=st.sampled_from([None, 1, 12]))
def test_attempts_are_bounded_and_go_once_around_before_a_second_time(
    site: list[tuple[int, int | None, bool, bool]], outcomes: list[AttemptResult], max_tokens: int | None
) -> None:
    clock = Times()
    servers = []
    for index, (order, max_model_len, is_reachable, is_open) in enumerate(site):
        servers.append(made(clock, index, order=order, max_model_len=max_model_len, is_reachable=is_reachable))
        for _ in range(5 if is_open else 0):
            servers[-1].breaker.fail(servers[-1].breaker.send(clock.now), clock.now)
    asked = attempted(routed(clock, servers, max_tokens), clock, outcomes)
    assert len(asked) <= max(MAX_ATTEMPTS, len(servers))
    assert clock.now - 1000.0 <= MAX_ATTEMPTS * MAX_RETRY_WAIT_S * 1.25


def test_the_choice_prefers_what_fits_then_what_can_be_reached_then_the_lowest_order_then_the_least_load() -> None:
    clock = Times()
    small = made(clock, 0, max_model_len=8)
    away = made(clock, 1, is_reachable=False)
    later = made(clock, 2, order=1)
    busy, idle = made(clock, 3), made(clock, 4)
    busy.note_load(ReportedLoad(3, 4), num_sent=0)
    servers = [small, away, later, busy, idle]
    assert all(routed(clock, servers, max_tokens=8).pick() is idle for _ in range(5))
    assert all(routed(clock, [small, away, later], max_tokens=8).pick() is later for _ in range(5))
    assert all(routed(clock, [small, away], max_tokens=8).pick() is away for _ in range(5))
    assert routed(clock, [small], max_tokens=8).pick() is small, "the server itself says so"
    clock.now += 60
    assert busy.outstanding(clock.now) == 0, "an old report is not used"


def test_the_requests_own_order_comes_before_the_configured_one() -> None:
    clock = Times()
    low, high, other = made(clock, 0), made(clock, 1, order=1), made(clock, 2)
    asked = attempted(routed(clock, [], places={low: 1, high: 0, other: 1}), clock, [AttemptResult.LOST] * 9)
    assert (asked[0], set(asked)) == (high, {low, high, other})


@given(site=sites(), outcomes=st.lists(st.sampled_from(FAILURES), min_size=20, max_size=20))
def test_a_request_may_keep_to_the_server_that_is_asked_first(
    site: list[tuple[int, int | None, bool, bool]], outcomes: list[AttemptResult]
) -> None:
    clock = Times()
    servers = [made(clock, index, order=order, max_model_len=length) for index, (order, length, _, _) in enumerate(site)]
    asked = attempted(routed(clock, servers, keeps_first=True), clock, outcomes)
    assert len(set(asked)) == 1


def test_no_second_attempt_after_the_first_token_and_none_without_budget() -> None:
    clock = Times()
    first, second = made(clock, 0), made(clock, 1)
    with pytest.raises(Unavailable):
        routed(clock, [first, second]).pause_s(first, AttemptFailed(AttemptResult.LOST, Unavailable("x"), has_begun=True))
    empty = RetryBudget(share=0.0, burst=0.0)
    assert routed(clock, [first, second], budget=empty).pause_s(first, AttemptFailed(AttemptResult.CONNECT, Unavailable("x"))) == 0.0
    with pytest.raises(Unavailable):
        routed(clock, [first], budget=empty).pause_s(first, AttemptFailed(AttemptResult.CONNECT, Unavailable("x")))
