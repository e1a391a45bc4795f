"""Tests what a draft model's KV cache holds: whatever is committed, retracted, shared, copied or preempted, drafts are those of a model
that reads the whole sequence anew."""

from __future__ import annotations

import pytest
from draft_kit import CHAIN_VOCAB, ChainModel, DraftWorld, chain_continuation
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.runner.drafts import model

pytestmark = pytest.mark.pure

SLOTS = 3
TOKEN = st.integers(0, CHAIN_VOCAB - 1)
PLACE = st.integers(0, SLOTS - 1)
MOST = st.lists(st.sampled_from((5, 0, 3, 1)), min_size=SLOTS, max_size=SLOTS)
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=14)
ACCEPTED = st.lists(st.sampled_from((5, 2, 1, 0)), min_size=SLOTS, max_size=SLOTS)


class DraftMachine(RuleBasedStateMachine):
    """Prompts are of two tokens, so that many share a prefix; blocks are few, so that they are used again."""

    @initialize(most=st.sampled_from((256, 7)), prompt=PROMPT)
    def begin(self, most: int, prompt: list[int]) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(model, "MAX_CATCH_UP_TOKENS", most)
        self.model = ChainModel()
        self.world = DraftWorld(self.model, chain_continuation, num_slots=SLOTS, num_blocks=20, max_model_len=30, draft_max_len=27)
        self.start(prompt=prompt)

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    @property
    def free(self) -> list[int]:
        return [slot for slot in range(SLOTS) if slot not in self.world.live]

    def picked(self, place: int) -> int:
        return list(self.world.live)[place % len(self.world.live)]

    @precondition(lambda self: self.free)
    @rule(prompt=PROMPT)
    def start(self, prompt: list[int]) -> None:
        slot = self.free[0]
        self.world.start(slot, prompt, len(prompt))
        self.world.grow_or_end(slot)

    @precondition(lambda self: self.free and self.world.live)
    @rule(place=PLACE)
    def fork(self, place: int) -> None:
        self.world.fork(self.picked(place), self.free[0])
        self.world.apply()

    @precondition(lambda self: self.world.live)
    @rule(most=MOST, accepted=ACCEPTED, last=TOKEN)
    def step(self, most: list[int], accepted: list[int], last: int) -> None:
        for slot in [*self.world.live]:
            self.world.step(slot, most[slot], accepted[slot], last)

    @precondition(lambda self: self.world.live)
    @rule(place=PLACE, most=st.sampled_from((5, 0)), accepted=st.sampled_from((2, 0)), last=TOKEN)
    def step_one(self, place: int, most: int, accepted: int, last: int) -> None:
        """So that sequences of one prompt write at other times."""
        self.world.step(self.picked(place), most, accepted, last)

    @precondition(lambda self: self.world.live)
    @rule(most=MOST)
    def draft_for_all(self, most: list[int]) -> None:
        """In one batch. No token was committed since the drafts before, as if a step had failed."""
        rows = [slot for slot, sequence in self.world.live.items() if self.world.grow(slot, len(sequence.tokens))]
        self.world.apply()
        self.world.draft({slot: most[slot] for slot in rows})
        assert max(self.model.num_tokens, default=0) <= model.MAX_CATCH_UP_TOKENS

    @precondition(lambda self: self.world.live)
    @rule(place=PLACE, count=st.integers(1, 5))
    def retract(self, place: int, count: int) -> None:
        slot = self.picked(place)
        sequence = self.world.live[slot]
        self.world.retract(slot, max(sequence.num_prompt, len(sequence.tokens) - count))

    @precondition(lambda self: self.world.live)
    @rule(place=PLACE)
    def preempt(self, place: int) -> None:
        slot = self.picked(place)
        self.world.preempt(slot)
        self.world.grow_or_end(slot)

    @precondition(lambda self: self.world.live)
    @rule(place=PLACE)
    def end(self, place: int) -> None:
        self.world.end(self.picked(place))
        self.world.apply()

    @invariant()
    def check(self) -> None:
        self.world.drafter.check()


TestDrafts = DraftMachine.TestCase
TestDrafts.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, phases=(Phase.explicit, Phase.generate))
