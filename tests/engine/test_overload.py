"""Tests one engine behind the gateway's admission on virtual time: goodput at loads up to ten times what it can do."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
from virtual_engine import VirtualEngine, asked, quantile

from headrace.core.errors import Overloaded
from headrace.core.request import EngineRequest, PriorityClass, TierTerms, submitted_bytes
from headrace.engine import build
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions
from headrace.policy.admission import AdmissionOutcome, OverloadWatch, decide, queue_state
from headrace.policy.config import AdmissionRules
from headrace.policy.routing.predicted_time import NOTHING_SENT, RequestSize, mean_output_tokens

pytestmark = pytest.mark.pure


class AdmittingEngine(VirtualEngine):
    """Requests join the queue only where the gateway would let them. predicted_s: by request that joined, the wait it was promised"""

    predicted_s: dict[str, float]
    watch: OverloadWatch

    def submit(self, request: EngineRequest) -> None:
        load, rules = self.engine.snapshot(), AdmissionRules()
        size = RequestSize(
            len(request.prompt_ids), mean_output_tokens(sum(load.counters.finished.values()), load.counters.generation_tokens)
        )
        queue = queue_state(load, NOTHING_SENT, size, lowest=request.priority, block_size=16)
        queue = self.watch.arrive(queue, rules, num_open=load.num_running + load.num_waiting + 1, now=self.now)
        goal_s = None if request.tier.ttft_ms is None else request.tier.ttft_ms / 1000
        verdict = decide(queue, rules=rules, ttft_goal_s=goal_s)
        if verdict.outcome is AdmissionOutcome.REFUSED:
            self.watch.refuse(queue, rules, now=self.now)
            self.refused[request.request_id] = Overloaded("busy", retry_after_s=verdict.retry_after_s)
            return
        self.predicted_s[request.request_id] = queue.wait_s
        super().submit(request)

    def num_good(self, prefix: str) -> int:
        """Requests that were answered within both goals of their tier."""
        return sum(self._is_good(name) for name in self.ended if name.startswith(prefix))

    def _is_good(self, name: str) -> bool:
        tier = self.requests[name].tier
        assert tier.ttft_ms is not None
        assert tier.tpot_ms is not None
        return self.is_within(name, tier.ttft_ms / 1000, tier.tpot_ms / 1000)

    def is_within(self, name: str, ttft_s: float, tpot_s: float) -> bool:
        times = self.token_times[name]
        return times[0] - self.arrived[name] <= ttft_s and (times[-1] - times[0]) / max(1, len(times) - 1) <= tpot_s + 1e-9


class Site(NamedTuple):
    """An engine and its load. prompt_tokens, output_tokens: means; sizes vary by half of them"""

    step_s: float
    token_s: float
    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    output_tokens: int
    rate: float
    config: dict[str, Any]

    @property
    def tier(self) -> TierTerms:
        return TierTerms(name="goals", ttft_ms=1000 * self.ttft_s, tpot_ms=1000 * self.tpot_s)

    def engine(self, **slow: Any) -> AdmittingEngine:
        options = FakeOptions(step_seconds=self.step_s, token_seconds=self.token_s, num_blocks=20_000, verify=False, **slow)
        made = AdmittingEngine(EngineConfig(model="fake", max_waiting=20_000, **self.config), options)
        made.predicted_s, made.watch = {}, OverloadWatch()
        return made

    def load(self, times: float, seconds: float, name: str = "r", **terms: Any) -> list[tuple[float, EngineRequest]]:
        """Requests at random moments, at `times` the rate that the engine can do."""
        draw, at, found = random.Random(7), 0.0, list[tuple[float, EngineRequest]]()
        while (at := at + draw.expovariate(times * self.rate)) < seconds:
            prompt = draw.randint(self.prompt_tokens // 2, 3 * self.prompt_tokens // 2)
            output = draw.randint(self.output_tokens // 2, 3 * self.output_tokens // 2)
            asking = asked(f"{name}-{len(found)}", prompt_tokens=prompt, output_tokens=output, **{"tier": self.tier, **terms})
            found.append((at, asking))
        return found


def test_a_slow_first_step_sends_no_premium_request_away() -> None:
    """It compiles for 1.5 s, in which ten of seventeen requests come. The others found a wait of a minute by its speed, and waited one
    second.
    """
    site = Site(0.003, 0.00005, 5.0, 0.5, 40, 32, 10.0, {"max_num_seqs": 4})
    engine = site.engine(stall_after_steps=1, stall_seconds=1.5)
    engine.run(
        [
            (0.1 * number, asked(f"r-{number:02}", prompt_tokens=40, output_tokens=32, priority=PriorityClass.PREMIUM))
            for number in range(17)
        ]
    )
    assert not engine.refused
    assert max(engine.ttft_s("r-")) < 2.0
    assert max(engine.predicted_s.values()) < 4.0


SITES = {
    "prompts are spread over many steps": Site(
        0.03, 0.00008, 1.0, 0.1, 1000, 20, 4.9, {"max_num_batched_tokens": 256, "max_num_seqs": 256}
    ),
    "every step is full from the first one on": Site(0.01, 0.00008, 1.0, 0.05, 1000, 20, 9.6, {"max_num_seqs": 256}),
    "goals leave slots empty": Site(0.01, 0.0002, 2.0, 0.028, 64, 128, 20.0, {"max_num_seqs": 128}),
    "all slots are taken": Site(0.02, 0.00002, 1.0, 0.05, 300, 50, 38.1, {}),
}


Loaded = Callable[[str, float], AdmittingEngine]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """The engine of a site after 12 seconds of so many times its load; each is run once."""

    @cache
    def run(name: str, times: float) -> AdmittingEngine:
        engine = SITES[name].engine()
        engine.run(SITES[name].load(times, 12.0))
        return engine

    return run


@pytest.mark.parametrize("name", SITES)
def test_at_ten_times_the_load_as_many_requests_keep_their_goals_as_at_once(name: str, loaded: Loaded) -> None:
    good = {}
    for times in (1.0, 10.0):
        engine = loaded(name, times)
        good[times] = engine.num_good("r")
        assert good[times] >= 0.9 * len(engine.ended), "what is let in is in time"
    assert good[10.0] >= 0.9 * good[1.0]


def test_without_goals_most_answers_of_an_overload_are_in_time() -> None:
    """What is good is what begins within two seconds. Those that joined at the overload's beginning, as if it were a peak, are late."""
    site, seconds, good = SITES["every step is full from the first one on"], 25.0, {}
    for times in (1.0, 2.0, 10.0):
        engine = site.engine()
        engine.run(site.load(times, seconds, tier=TierTerms(name="none")))
        good[times] = sum(engine.is_within(name, 2.0, 0.1) for name in engine.ended)
        assert len(engine.ended) >= 0.9 * seconds * site.rate
    assert min(good.values()) >= 0.7 * good[1.0]


@pytest.mark.parametrize("name", SITES)
def test_a_wait_is_as_long_as_it_was_predicted(name: str, loaded: Loaded) -> None:
    """Within what its own prompt takes: that many tokens, in steps that others share."""
    site, engine = SITES[name], loaded(name, 10.0)
    late = [engine.token_times[request][0] - engine.arrived[request] - promised for request, promised in engine.predicted_s.items()]
    assert quantile(late, 0.9) <= 0.45 * site.ttft_s
    assert quantile(late, 0.1) >= -0.2 * site.ttft_s


def test_a_flood_of_batch_requests_refuses_no_premium_request() -> None:
    site = SITES["prompts are spread over many steps"]
    engine = site.engine()
    premium = site.load(0.3, 12.0, "premium", priority=PriorityClass.PREMIUM)
    engine.run([*premium, *site.load(10.0, 12.0, "batch", priority=PriorityClass.BATCH)])
    assert not [name for name in engine.refused if name.startswith("premium")]
    assert engine.num_good("premium") >= 0.9 * len(premium)
    assert len(engine.refused) > 100, "the flood is refused"


NUM_SLOTS, NUM_WAITING = 8, 64


def short(name: str, **terms: Any) -> EngineRequest:
    return asked(name, prompt_tokens=20, output_tokens=50, **terms)


HELD_BYTES = NUM_WAITING * submitted_bytes(short("w-00"))


@pytest.mark.parametrize(
    ("bounds", "most_bytes", "pause_s", "newcomer", "refused"),
    [
        ({"max_waiting": NUM_WAITING}, build.MAX_WAITING_BYTES, 0.0, "same", "late"),
        ({}, HELD_BYTES, 0.0, "same", "late"),
        ({}, HELD_BYTES, 0.05, "same", "late"),
        ({"max_waiting": NUM_WAITING}, build.MAX_WAITING_BYTES, 0.05, "other", "w-63"),
    ],
    ids=["count", "bytes handed in during a step", "bytes", "for another tenant"],
)
def test_whoever_a_full_queue_refuses_reads_how_long_the_queue_takes(
    bounds: dict[str, int], most_bytes: int, pause_s: float, newcomer: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight slots, each taken for 50 steps of 20 ms: what waits begins within eight seconds, and nobody is asked to come back sooner."""
    monkeypatch.setattr(build, "MAX_WAITING_BYTES", most_bytes)
    options = FakeOptions(step_seconds=0.02, token_seconds=0.00002, num_blocks=20_000, verify=False)
    engine = VirtualEngine(EngineConfig(model="fake", max_num_seqs=NUM_SLOTS, **bounds), options)  # type: ignore[arg-type]
    engine.run([(0.0, short(f"first-{n}", tenant="same")) for n in range(NUM_SLOTS)])
    began = engine.now
    running = [(began, short(f"r-{n}", tenant="same")) for n in range(NUM_SLOTS)]
    waiting = [(began + 0.01, short(f"w-{n:02}", tenant="same")) for n in range(NUM_WAITING)]
    engine.run([*running, *waiting, (began + 0.01 + pause_s, short("x-late" if newcomer == "same" else "x-other", tenant=newcomer))])

    (name,) = engine.refused
    assert name.endswith(refused)
    error = engine.refused[name]
    assert isinstance(error, Overloaded)
    last_began = max(engine.token_times[f"w-{n:02}"][0] for n in range(NUM_WAITING - 1))
    assert error.retry_after_s == pytest.approx(last_began - began, rel=0.15)
