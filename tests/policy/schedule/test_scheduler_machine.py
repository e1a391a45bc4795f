"""Tests random lives of an engine: submit, cancel, finish, wait, steps and plans that fail, at any moment; invariants hold after every
turn.
"""

from __future__ import annotations

import pytest
from engine_kit import FULL, VOCAB, WINDOW, DrivenEngine, request
from failing_plans import SITES, fail_next_plan
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_oracle import expected_tokens
from random_speculation import decide_at_random

from headrace.core.errors import Overloaded
from headrace.core.ids import RequestId
from headrace.core.request import PriorityClass
from headrace.core.update import FinishReason

pytestmark = pytest.mark.pure

POISON = 96


class EngineMachine(RuleBasedStateMachine):
    """The oracle's memory finds wrong blocks at once; `scheduler.check` finds lost ones; the plain loop finds wrong tokens."""

    @initialize(
        depth=st.sampled_from([1, 2, 3]),
        is_pipeline=st.booleans(),
        caching=st.booleans(),
        groups=st.sampled_from([(FULL,), (FULL, WINDOW), (WINDOW,), ()]),
        policy=st.sampled_from(["fcfs", "priority", "sjf", "fair"]),
        num_blocks=st.integers(10, 30),
        chunked=st.booleans(),
        static=st.booleans(),
        costly=st.sampled_from([0, 1, 4, 100]),
        most_waiting=st.sampled_from([3, 8, 1024]),
        most_bytes=st.sampled_from([4_000, 12_000, 10**6]),
        drafts=st.sampled_from([0, 1, 4]),
        seed=st.integers(0, 2**16),
    )
    def build(
        self,
        depth: int,
        is_pipeline: bool,
        caching: bool,
        groups: tuple,  # type: ignore[type-arg]
        policy: str,
        num_blocks: int,
        chunked: bool,
        static: bool,
        costly: int,
        most_waiting: int,
        most_bytes: int,
        drafts: int,
        seed: int,
    ) -> None:
        self.driven = DrivenEngine(
            depth=depth,
            is_pipeline=is_pipeline,
            caching=caching,
            groups=groups,
            queue_policy=policy,
            num_blocks=num_blocks,
            max_num_seqs=5,
            max_num_batched_tokens=7,
            max_model_len=32,
            enable_chunked_prefill=chunked,
            static_batching=static,
            costly_context=costly,
            max_waiting=most_waiting,
            max_waiting_bytes=most_bytes,
            prerequisite_timeout_s=20.0,
            num_speculative_tokens=drafts,
        )
        decide_at_random(self.driven.scheduler, seed)
        self.most_bytes = most_bytes
        self.driven.runner.fail_when = [POISON]
        self.prompts: dict[tuple[str, int], list[int]] = {}

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        extra=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        poisoned=st.sampled_from([False] * 9 + [True]),
        deadline=st.sampled_from([None, None, 5.0]),
        priority=st.sampled_from(PriorityClass),
    )
    def submit(
        self,
        family: int,
        length: int,
        max_tokens: int,
        n: int,
        extra: bool,
        prompt_logprobs: int | None,
        poisoned: bool,
        deadline: float | None,
        priority: PriorityClass,
    ) -> None:
        name = f"r{len(self.prompts)}"
        prompt = [family * 20 + i for i in range(length)]
        if poisoned:
            prompt[-1] = POISON
        for index in range(n):
            self.prompts[name, index] = prompt
        needs = frozenset({"thing"}) if extra else frozenset()
        self.driven.submit(
            request(
                name,
                prompt,
                max_tokens=max_tokens,
                n=n,
                prompt_logprobs=prompt_logprobs,
                deadline_at=None if deadline is None else self.driven.clock.now + deadline,
                priority=priority,
                tenant=str(family),
                salt=b"s" * family,
            ),
            needs=needs,
        )

    @rule(count=st.integers(1, 6))
    def turn(self, count: int) -> None:
        self.driven.turn(count)

    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        self.driven.engine.cancel(RequestId(f"r{which}"))

    @rule(which=st.integers(0, 30), index=st.integers(0, 2), keep=st.integers(0, 6))
    def finish(self, which: int, index: int, keep: int) -> None:
        self.driven.engine.finish(RequestId(f"r{which}"), index, keep)

    @rule(which=st.integers(0, 30))
    def satisfy(self, which: int) -> None:
        self.driven.satisfied(f"r{which}", "thing")

    @rule(which=st.integers(0, 30))
    def fail_to_prepare(self, which: int) -> None:
        self.driven.failed(f"r{which}", "thing", RuntimeError("no thing"))

    @rule(which=st.integers(0, 4))
    def preempt(self, which: int) -> None:
        running = self.driven.scheduler.sequences.slots.running
        if running:
            self.driven.scheduler.sequences.preempt(running[which % len(running)], self.driven.clock.now)

    @rule(seconds=st.sampled_from([0.5, 3.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.driven.clock.now += seconds

    @rule(site=st.sampled_from(SITES), after=st.integers(0, 4))
    def fail_a_plan(self, site: str, after: int) -> None:
        fail_next_plan(self.driven.scheduler, site, after)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "driven"):
            self.driven.scheduler.check()
            waiting = [seq for seq in self.driven.scheduler.sequences.alive() if seq.num_queued]
            for priority in PriorityClass:
                new = sum(seq.num_waiting_bytes for seq in waiting if seq.request.priority == priority and not seq.plan_epoch)
                assert new <= self.most_bytes, "requests were let in beyond the bound; only preempted sequences may exceed it"

    def teardown(self) -> None:
        if not hasattr(self, "driven"):
            return
        self.driven.turn()
        self.driven.clock.now += 100
        self.driven.run()
        for key, prompt in self.prompts.items():
            tokens = self.driven.tokens[key]
            assert tokens == expected_tokens(prompt, len(tokens), VOCAB, key[1])
            assert key in self.driven.finish or key[0] in self.driven.errors
            if isinstance(self.driven.errors.get(key[0]), Overloaded):
                assert not tokens, "a request that has begun is never refused"
            if POISON in prompt:
                assert not tokens
            if self.driven.finish.get(key) is FinishReason.ERROR:
                assert POISON in prompt or POISON in tokens or "prerequisite" in str(self.driven.errors[key[0]])


EngineMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
test_engine_state_machine = EngineMachine.TestCase
