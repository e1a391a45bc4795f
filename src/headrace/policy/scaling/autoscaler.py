"""Decides how many replicas of a model to have. Pure: facts and a time in, a number and its reason out (docs/autoscaling.md).

More replicas are wanted for the largest of

    rate    requests that come, and those that the growth of the last minutes or earlier days lead to expect once a replica has loaded,
            by the rate at which one replica ends them; and what waits already, to be served within the time that a replica takes to load
    fill    sequences and KV blocks in use, of TARGET_FILL of what the replicas hold
    wait    a predicted wait beyond the goal of the first token

The rate of a replica is learned in output tokens where requests wait at all replicas: then it is what a replica can do. A replica goes only
once fewer have been wanted for the time that a wrong decision costs (`settle_s`). While a replica that serves has not reported of late,
nothing changes; where none serves there is nothing to report, and what waits decides.

A budget (`policy.scaling.budget`) bounds the number: another replica is wanted only where the day's hours leave it `settle_s`. Where they
leave no more than those above the fewest take to leave, they all leave, and none comes back until midnight.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from headrace.core.errors import counted
from headrace.policy.scaling.budget import DayBudget, DayUse
from headrace.policy.scaling.history import ArrivalHistory

TARGET_FILL = 0.7
TARGET_RATE = 0.8
"""A share of what replicas can do. What is left over serves what comes while another one loads."""
MIN_DRAIN_S = 60.0
STALE_S = 30.0
"""Facts that are older decide nothing, where replicas serve."""
FAST_S, SLOW_S = 10.0, 120.0
"""Time constants of the two means of the rate of arrivals, whose difference is its growth."""
LEARN_S, OUTPUT_LEARN_S = 120.0, 1800.0
"""Time constants of what a replica can do, and of the tokens of an answer, whose ends come late after a change of the load."""
MIN_SETTLE_S = 300.0
SHRINK_RATE, SHRINK_FILL = 0.8, 0.5
"""Shares of the targets: a replica goes only where those that stay would be used to less, so that it does not come back at once. Sequences
grow faster than the load, since steps with more of them take longer.
"""
IDLE_S = 900.0
"""Without any request for so long the last replica of a model goes that may have none; `settle_s` and MIN_DRAIN_S where that is longer."""
CHANCE = 3.0
"""Standard deviations."""
FULL_S = 15.0
"""Replicas fill for so long after their number has changed."""
MAX_GROWTH = 1.25
"""The growth of the last minutes is believed up to this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """
    min_replicas  0: the last one goes while nothing comes, and the next request waits for a start
    max_replicas  the least of what operator and machine allow
    ttft_s        goal of the first token
    load_s        from the start of a replica until it serves
    budget        None: the hours of a day have no bound
    """

    min_replicas: int = 1
    max_replicas: int = 1
    ttft_s: float = 1.0
    load_s: float = 60.0
    budget: DayBudget | None = None

    @property
    def settle_s(self) -> float:
        return max(MIN_SETTLE_S, 2 * self.load_s)

    def within(self, num_replicas: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, num_replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingFacts:
    """
    num_serving   replicas; those that are about to leave are not counted
    num_existing  replicas that load, serve, stand by or leave
    num_arrived   requests since an earlier moment; never decreases. Those at gateways of another machine may be missing: they are seen as
                  they end
    num_finished  the same, of requests that ended
    num_tokens    the same, of output tokens
    num_running   requests
    num_waiting   requests that no replica has begun, those held at gateways included
    num_full      replicas at which requests wait
    wait_s        predicted until a new request is begun
    fill          sequences (or KV blocks, where these are scarcer) in use: 1.5 is as much as one and a half replicas hold
    age_s         of the oldest report of a replica in these facts; infinite: there is none, as where none serves
    """

    num_serving: int
    num_arrived: int
    num_finished: int
    num_tokens: int
    num_existing: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_full: int = 0
    wait_s: float = 0.0
    fill: float = 0.0
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """
    reason        a line for people, which says what the number follows from
    closed_until  seconds since 1970: before then the budget leaves no replica at all
    """

    num_replicas: int
    reason: str
    closed_until: float | None = None


class Autoscaler:
    """Scales one model. `decide` is called every few seconds, in the order of time."""

    def __init__(self, rules: ScalingRules, num_replicas: int, history: ArrivalHistory | None = None, use: DayUse | None = None) -> None:
        """use: None: nothing is counted before the first decision"""
        self.rules = rules
        self.history = history or ArrivalHistory()
        self.use = use
        self._num_existing = num_replicas
        self._current = rules.within(num_replicas)
        self._wishes: deque[tuple[float, int]] = deque()
        self._last: tuple[float, ScalingFacts] | None = None
        self._fast = self._slow = self._token_rate = 0.0
        self._tokens = self._answers = 0.0
        self._same_since = -math.inf
        self._last_request_at = -math.inf
        self._is_blind = True

    def decide(self, facts: ScalingFacts, now: float) -> ScalingDecision:
        """now: seconds since 1970."""
        before, self._num_existing = self._num_existing, facts.num_existing
        self.use = (self.use or DayUse(now)).later(max(before, self._num_existing), now)
        decision = self._by_load(facts, now)
        if self.rules.budget is not None:
            decision = self._affordable(decision, self.rules.budget, self.use)
        self._current = decision.num_replicas
        return decision

    def _by_load(self, facts: ScalingFacts, now: float) -> ScalingDecision:
        if facts.num_serving and facts.age_s > STALE_S:
            self._is_blind = True
            return self._decided(self._current, f"the last load report is {facts.age_s:.0f} s old: nothing changes")
        self._observe(facts, now, now - facts.age_s if facts.num_serving else now)
        wish = max(self._wished(facts, now), key=lambda each: each.num_replicas)
        wanted = self.rules.within(wish.num_replicas)
        kept = max(self._wished(facts, now, SHRINK_RATE, SHRINK_FILL), key=lambda each: each.num_replicas)
        calm = self._calm(max(wanted, self.rules.within(kept.num_replicas)), now)
        if wanted > self._current:
            return self._decided(wanted, wish.reason)
        if calm < self._current:
            return self._decided(calm, f"for {self.rules.settle_s:.0f} s no more were needed; {wish.reason}")
        return self._decided(self._current, wish.reason)

    def _decided(self, num_replicas: int, reason: str) -> ScalingDecision:
        return ScalingDecision(self.rules.within(num_replicas), reason)

    def _affordable(self, decision: ScalingDecision, budget: DayBudget, use: DayUse) -> ScalingDecision:
        """Nothing is added while replicas leave that may need what is left. Once it is too little, it stays so until midnight: what those
        that left did not need would bring one back, and take it away again.
        """
        fewest = self.rules.min_replicas
        num_above = max(0, self._current - fewest)
        num_leaving = max(0, self._num_existing - num_above - budget.num_fixed)
        num_more = budget.num_more(use, stay_s=self.rules.settle_s)
        is_spent = budget.is_spent(use)
        if not is_spent and (budget.num_more(use) < num_above + num_leaving or not (num_above or num_more)):
            is_spent, self.use = True, replace(use, spent_s=max(0.0, budget.left_s(use)))
        most = fewest + (0 if is_spent else max(num_above, num_more - num_leaving))
        closed_until = use.next_midnight if is_spent and not most else None
        if decision.num_replicas <= most:
            return replace(decision, closed_until=closed_until)
        leaves = f"the day's {budget.hours:g} replica-hours leave {counted(most, 'replica')}{' until midnight UTC' if is_spent else ''}"
        return ScalingDecision(most, f"{leaves}; {decision.reason}", closed_until)

    # what was seen

    def _observe(self, facts: ScalingFacts, now: float, reported_at: float) -> None:
        """What was reported before is not counted again: while no report comes, requests do."""
        last = self._last
        if self._last_request_at == -math.inf:
            self._last_request_at = now
        if last is not None and reported_at <= last[0]:
            return
        self._last = reported_at, facts
        if last is None:
            return
        seconds = reported_at - last[0]
        arrived, finished = facts.num_arrived - last[1].num_arrived, facts.num_finished - last[1].num_finished
        tokens = facts.num_tokens - last[1].num_tokens
        if min(arrived, finished, tokens) < 0:
            return  # counters began anew
        if arrived or finished or facts.num_waiting:
            self._last_request_at = now
        self.history.add(arrived, now)
        self._fast = _mean(self._fast, arrived / seconds, seconds / FAST_S)
        self._slow = _mean(self._slow, arrived / seconds, seconds / SLOW_S)
        if facts.num_serving != last[1].num_serving:
            self._same_since = now
        elif facts.num_serving and now - self._same_since >= FULL_S:
            is_full = facts.num_full == last[1].num_full == facts.num_serving
            self._learn(tokens / seconds / facts.num_serving, seconds, is_full=is_full)
        kept = math.exp(-seconds / OUTPUT_LEARN_S)
        self._tokens, self._answers = kept * self._tokens + tokens, kept * self._answers + finished

    def _learn(self, rate: float, seconds: float, *, is_full: bool) -> None:
        if is_full and not self._token_rate:
            self._token_rate = rate
        elif is_full or rate > self._token_rate > 0.0:
            self._token_rate = _mean(self._token_rate, rate, seconds / LEARN_S)

    def _replica_rate(self, facts: ScalingFacts) -> float:
        """Requests per second that one replica ends; 0: not known yet. Running requests have half of their tokens."""
        answers = self._answers + facts.num_running / 2
        return self._token_rate * answers / self._tokens if self._tokens else 0.0

    @property
    def _arrival_rate(self) -> float:
        """The faster mean where it differs by more than chance does."""
        return self._fast if abs(self._fast - self._slow) > CHANCE * math.sqrt(max(self._fast, self._slow) / FAST_S) else self._slow

    # what is wished

    def _wished(self, facts: ScalingFacts, now: float, of_rate: float = 1.0, of_fill: float = 1.0) -> list[ScalingDecision]:
        """of_rate, of_fill: shares of the targets up to which replicas are used"""
        wishes = [self._at_least(facts, now)]
        if (replica_rate := self._replica_rate(facts)) > 0.0:
            wishes.append(self._by_rate(facts, of_rate * replica_rate, now))
        if facts.fill > 0.0:
            wishes.append(
                ScalingDecision(math.ceil(facts.fill / (of_fill * TARGET_FILL)), f"sequences and KV fill {facts.fill:.1f} replicas")
            )
        if facts.num_serving and facts.wait_s > self.rules.ttft_s / 2:
            more = math.ceil(facts.num_serving * (1.0 + min(1.0, facts.wait_s / self.rules.ttft_s)))
            wishes.append(ScalingDecision(more, f"a request waits {facts.wait_s:.1f} s, the goal is {self.rules.ttft_s:g} s"))
        return wishes

    def _at_least(self, facts: ScalingFacts, now: float) -> ScalingDecision:
        if not self._is_idle(facts, now):
            waiting = f"{counted(facts.num_waiting, 'request')} {'waits' if facts.num_waiting == 1 else 'wait'}"
            return ScalingDecision(1, waiting if facts.num_waiting else "requests came in the last minutes")
        return ScalingDecision(0, f"no request came for {(now - self._last_request_at) / 60:.0f} minutes")

    def _is_idle(self, facts: ScalingFacts, now: float) -> bool:
        return not facts.num_waiting and now - self._last_request_at >= max(MIN_DRAIN_S, IDLE_S - self.rules.settle_s)

    def _by_rate(self, facts: ScalingFacts, replica_rate: float, now: float) -> ScalingDecision:
        """A mean never falls to nothing: where no request comes any more, or too few are expected to keep a replica, none is wished."""
        ahead_s, come = self.rules.load_s, 0.0 if self._is_idle(facts, now) else self._arrival_rate
        growth = max(0.0, come - self._slow) / (SLOW_S - FAST_S) * ahead_s
        grown = min(come + growth, MAX_GROWTH * come)
        usual = self.history.expected(now, now + ahead_s)
        usual = usual if usual >= 1.0 / IDLE_S else 0.0
        rate = max(grown, usual)
        backlog = max(0, facts.num_waiting - facts.num_serving) / max(MIN_DRAIN_S, ahead_s)
        num = math.ceil((rate / TARGET_RATE + backlog) / replica_rate - 1e-9)
        cause = f"{come:.2g} requests/s come" if rate == come else f"{rate:.2g} requests/s are expected"
        if usual > grown:
            cause = f"{usual:.2g} requests/s came at this time on earlier days"
        waiting = f", {facts.num_waiting} wait" if backlog else ""
        return ScalingDecision(num, f"{cause}{waiting}, a replica ends {replica_rate:.2g}/s")

    def _calm(self, wanted: int, now: float) -> int:
        """The most that was wanted within the last `settle_s`; the number itself where that is not known."""
        wishes = self._wishes
        for count in (self._current, wanted) if self._is_blind else (wanted,):
            while wishes and wishes[-1][1] <= count:
                wishes.pop()
            wishes.append((now, count))
        self._is_blind = False
        while wishes[0][0] < now - self.rules.settle_s:
            wishes.popleft()
        return wishes[0][1]


def _mean(mean: float, value: float, share: float) -> float:
    return mean + (1.0 - math.exp(-share)) * (value - mean)
