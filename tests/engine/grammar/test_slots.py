"""Tests that the masks of a slot follow from its output ids alone, whatever was started, committed, rolled back and ended before."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from failpoint_kit import Injected, armed
from grammar_kit import EOS, PERSON, CompilingSource, encode, lark, mask_of, regex, schema, trie
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.errors import SequenceFailed
from headrace.core.grammar import CANNOT_CONTINUE, Grammar
from headrace.core.ids import SlotId
from headrace.core.plan import Started
from headrace.core.sampling import SamplingParams
from headrace.engine.grammar.compiling import compile_grammar
from headrace.engine.grammar.slots import SlotGrammars
from headrace.engine.runner.masks import NO_MASKS, StepMasks

pytestmark = pytest.mark.pure

PROMPT = [7, 8, 9]
DIGITS, PEOPLE = regex("[0-9]{1,4}"), schema(PERSON)


def started(slot: int, grammar: Grammar | None, outputs: list[int]) -> Started:
    return Started(SlotId(slot), array("i", PROMPT + outputs), len(PROMPT), SamplingParams(seed=0), 0, grammar)


def allowed(masks: StepMasks, place: int) -> set[int]:
    bits = np.unpackbits(masks.masks.words[place].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def expected(grammar: Grammar, outputs: list[int]) -> set[int]:
    """The mask after these outputs, of a matcher of its own."""
    matcher = compile_grammar(trie(), grammar)
    assert matcher.consume_tokens(outputs)
    return set(np.flatnonzero(mask_of(matcher)).tolist())


class SlotMachine(RuleBasedStateMachine):
    """Slots are driven as a runner drives them; the model is a list of output ids per slot."""

    NUM_SLOTS = 4

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotGrammars(CompilingSource())
        self.model: dict[int, tuple[Grammar, list[int]]] = {}

    @rule(slot=st.integers(0, NUM_SLOTS - 1), grammar=st.sampled_from([None, DIGITS, PEOPLE]), num_known=st.integers(0, 2))
    def start(self, slot: int, grammar: Grammar | None, num_known: int) -> None:
        outputs: list[int] = []
        for _ in range(num_known if grammar else 0):
            outputs.append(min(expected(grammar, outputs) - set(EOS)))  # type: ignore[arg-type]
        self.slots.start(started(slot, grammar, outputs))
        self.model.pop(slot, None)
        if grammar is not None:
            self.model[slot] = (grammar, outputs)

    @rule(slots=st.sets(st.integers(0, NUM_SLOTS - 1)))
    def end(self, slots: set[int]) -> None:
        self.slots.end(sorted(slots))
        for slot in slots:
            self.model.pop(slot, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One step: masks of some slots, and a token of each mask committed, or the step is given up after it began."""
        slots = data.draw(st.lists(st.sampled_from([-1, *self.model]), unique=True, min_size=1))
        self.slots.begin(slots)
        if data.draw(st.booleans(), label="the step raises"):
            return
        masks = self.slots.wait()
        masked = [slot for slot in slots if slot >= 0]
        assert masks.masks.rows.tolist() == [row for row, slot in enumerate(slots) if slot >= 0]
        tokens = []
        for place, slot in enumerate(masked):
            grammar, outputs = self.model[slot]
            found = allowed(masks, place)
            assert found == expected(grammar, outputs)
            tokens.append(data.draw(st.sampled_from(sorted(found))))
        self.slots.commit([*masked, 99], [*tokens, 5])
        for slot, token in zip(masked, tokens, strict=True):
            if token in EOS:
                self.slots.end([slot])
                del self.model[slot]
            else:
                self.model[slot][1].append(token)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def step_with_drafts(self, data: st.DataObject) -> None:
        """The masks behind drafts are those of a matcher that has consumed them, up to the first that is forbidden."""
        slots, given = [], []
        for slot in data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, min_size=1)):
            drafts = self._draft(data, *self.model[slot])
            slots += [slot] * (1 + len(drafts))
            given += [-1, *drafts]
        self.slots.begin(slots, given)
        masks, accepted = self.slots.wait(), list[int]()
        assert not masks.failures
        for place, (slot, draft) in enumerate(zip(slots, given, strict=True)):
            accepted = [] if draft < 0 else [*accepted, draft]
            grammar, outputs = self.model[slot]
            if place in masks.unknown:
                assert not allowed(masks, place)
                assert place - 1 in masks.unknown or draft not in expected(grammar, [*outputs, *accepted[:-1]])
            elif not set(accepted) & set(EOS):  # what follows an end token is not used
                assert allowed(masks, place) == expected(grammar, [*outputs, *accepted])
        kept = data.draw(st.sampled_from([place for place in range(len(slots)) if place not in masks.unknown]))
        tokens = given[kept - given[kept::-1].index(-1) + 1 : kept + 1]
        if set(tokens) & set(EOS):
            self._commit_behind_an_end(data, slots[kept], [*tokens, *sorted(allowed(masks, kept))[:1]])
            return
        self.slots.commit([slots[kept]] * len(tokens), tokens)
        self.model[slots[kept]][1].extend(tokens)

    def _commit_behind_an_end(self, data: st.DataObject, slot: int, tokens: list[int]) -> None:
        """A runner commits what it sampled behind drafts that are right, and hears in a later plan that the sequence has ended."""
        self.slots.commit([slot] * len(tokens), tokens)
        if data.draw(st.booleans(), label="one step more"):
            self.slots.begin([slot])
            self.slots.wait()
            self.slots.check()
        if data.draw(st.booleans(), label="the step is rolled back"):
            self.slots.retract(slot, tokens)
            return
        self.slots.end([slot])
        del self.model[slot]

    def _draft(self, data: st.DataObject, grammar: Grammar, outputs: list[int]) -> list[int]:
        drafts: list[int] = []
        for _ in range(data.draw(st.integers(0, 3))):
            if data.draw(st.integers(0, 4)) == 0:
                return [*drafts, data.draw(st.sampled_from([5, EOS[0]])), 6]
            drafts.append(data.draw(st.sampled_from(sorted(expected(grammar, [*outputs, *drafts]) - set(EOS)) or [5])))
            if drafts[-1] == 5:
                break
        return drafts

    @precondition(lambda self: any(outputs for _, outputs in self.model.values()))
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot, (_, outputs) in self.model.items() if outputs]))
        outputs = self.model[slot][1]
        num_tokens = data.draw(st.integers(1, len(outputs)))
        self.slots.retract(slot, outputs[-num_tokens:])
        del outputs[-num_tokens:]

    @invariant()
    def adds_up(self) -> None:
        self.slots._finish_filling()
        self.slots.check()

    def teardown(self) -> None:
        self.slots.close()


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def test_a_step_without_grammars_starts_no_thread() -> None:
    slots = SlotGrammars(CompilingSource())
    slots.start(started(0, None, []))
    slots.begin([-1, -1])
    assert slots.wait() is NO_MASKS
    slots.commit([0], [5])
    assert slots._thread is None
    with pytest.raises(ValueError, match=r"slots \[0\] hold no grammar"):
        slots.begin([0])


def test_a_resumed_output_counts_and_an_end_token_may_be_followed_by_another_mask() -> None:
    """An overlapped runner computes one more step after an end token that is not committed yet."""
    slots = SlotGrammars(CompilingSource())
    slots.start(started(3, DIGITS, encode("1234")))
    for _ in range(2):
        slots.begin([3])
        assert allowed(slots.wait(), 0) == set(EOS)
        slots.commit([3], [EOS[0]])
    slots.close()


def test_a_token_outside_the_grammar_fails_its_row_alone() -> None:
    slots = SlotGrammars(CompilingSource())
    slots.start(started(0, DIGITS, encode("x")))
    slots.start(started(1, DIGITS, []))
    slots.begin([1, -1, 0])
    masks = slots.wait()
    assert allowed(masks, 0) == expected(DIGITS, [])
    assert list(masks.failures) == [2]
    assert masks.failures[2].startswith(CANNOT_CONTINUE)
    assert not masks.masks.words[1].any()
    slots.close()


class FailingSource(CompilingSource):
    def template(self, grammar: Grammar):  # type: ignore[no-untyped-def]
        raise SequenceFailed("it was never compiled")


def test_a_grammar_that_is_not_there_fails_its_rows() -> None:
    slots = SlotGrammars(FailingSource())
    slots.start(started(0, DIGITS, []))
    slots.begin([0])
    assert "it was never compiled" in slots.wait().failures[0]
    slots.close()


def test_a_fault_while_masks_are_filled_is_raised_where_they_are_awaited_and_the_next_step_is_whole() -> None:
    slots = SlotGrammars(CompilingSource())
    slots.start(started(0, DIGITS, []))
    with armed("grammar.fill"):
        slots.begin([0])
        with pytest.raises(Injected):
            slots.wait()
    slots.begin([0])
    assert allowed(slots.wait(), 0) == expected(DIGITS, [])
    slots.close()


MANY_STATES = regex("(?s:.*)a(?s:.){60}b")


def failed_rows(slots: SlotGrammars, num_slots: int) -> set[int]:
    """Slots whose rows failed while each wrote the same letters, a slot later than the one before it."""
    failed: set[int] = set()
    letters = encode("ab a bb a ab b aa")
    for slot in range(num_slots):
        slots.start(started(slot, MANY_STATES, letters[:slot]))
    for token in letters * 3:
        slots.begin(range(num_slots))
        failed |= set(slots.wait().failures)
        slots.commit(range(num_slots), [token] * num_slots)
    slots.close()
    return failed


def test_a_lexer_that_other_sequences_filled_costs_no_sequence_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a matcher share a lexer. A sequence that finds it full goes on with a new one."""
    monkeypatch.setattr("headrace.engine.grammar.limits.MAX_LEXER_STATES", 250)
    source = CompilingSource()
    assert not failed_rows(SlotGrammars(source), 6)
    assert source.num_renewed


def test_an_output_that_needs_too_many_states_alone_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.grammar.limits.MAX_LEXER_STATES", 100)
    assert failed_rows(SlotGrammars(CompilingSource()), 2) == {0, 1}


def written(slots: SlotGrammars, num_slots: int, texts: list[str]) -> None:
    """Commit the texts' tokens in every slot, asking for a mask before each; no row may fail."""
    for token in [token for text in texts for token in encode(text)]:
        slots.begin(range(num_slots))
        masks = slots.wait()
        assert not masks.failures
        assert all(token in allowed(masks, slot) for slot in range(num_slots))
        slots.commit(range(num_slots), [token] * num_slots)


def test_a_long_bounded_string_is_written_to_its_end_though_its_masks_fill_lexers() -> None:
    """A mask in a counted string builds states for the beginnings of all characters, which the output then leaves behind."""
    source = CompilingSource()
    slots = SlotGrammars(source)
    for slot in range(3):
        slots.start(started(slot, schema('{"type":"string","maxLength":3000}'), []))
    written(slots, 3, ['"', *["ab"] * 1500])
    slots.begin(range(3))
    closing = allowed(slots.wait(), 0)
    assert encode('"')[0] in closing
    assert encode("a")[0] not in closing, "the string has all the characters that it may have"
    assert 1 <= source.num_renewed <= 4, "sequences at one place share the new lexer"
    slots.close()


def test_an_output_whose_lexers_are_renewed_for_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.grammar.slots.MAX_RENEWAL_S", -1.0)
    slots = SlotGrammars(CompilingSource())
    slots.start(started(0, schema('{"type":"string","maxLength":3000}'), []))
    with pytest.raises(AssertionError):
        written(slots, 1, ['"', *["ab"] * 1500])
    slots.begin([0])
    assert "renewing its lexer took more than" in slots.wait().failures[0]
    slots.close()


AMBIGUOUS = lark('start: /x{40}/ s\ns: s s | "a" | "b" | s s s')
"""Vetting sees little more than its harmless beginning. Later the time of a mask grows with the cube of the output's length."""


def test_an_output_whose_masks_take_ever_longer_ends_before_its_neighbours_wait_for_it() -> None:
    slots = SlotGrammars(CompilingSource())
    slots.start(started(0, AMBIGUOUS, encode("x") * 40))
    failures: list[str] = []
    while not failures and len(slots._slots[0].token_ids) < 250:
        slots.begin([0])
        failures += slots.wait().failures.values()
        slots.commit([0], encode("a"))
    assert failures, "by now a mask takes a second"
    assert failures[0].endswith("its masks take more than 2.5 ms of CPU time on average")
    slots.close()


@pytest.mark.parametrize(("num_between", "fails"), [(0, True), (20, False)])
def test_a_mask_that_takes_long_once_is_forgiven(num_between: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first ones in a new lexer do. What was overspent is earned back token by token."""
    clock = iter([0.0, 0.04, *[1.0, 1.0] * num_between, 2.0, 2.04])
    monkeypatch.setattr("headrace.engine.grammar.slots.time", SimpleNamespace(thread_time=lambda: next(clock)))
    slots = SlotGrammars(CompilingSource())
    slots.start(started(0, regex("[0-9]{40}"), []))
    for _ in range(num_between + 1):
        slots.begin([0])
        assert not slots.wait().failures
        slots.commit([0], encode("1"))
    slots.begin([0])
    assert bool(slots.wait().failures) == fails
    slots.close()


def test_masks_behind_drafts_are_filled_until_the_steps_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences have 5 ms together; each mask takes 2 ms here. What a sequence may spend itself is not touched."""
    now = [0.0]

    def thread_time() -> float:
        now[0] += 0.002
        return now[0]

    slots = SlotGrammars(CompilingSource())
    for slot in range(3):
        slots.start(started(slot, regex("[0-9]{40}"), []))
    monkeypatch.setattr("headrace.engine.grammar.slots.time", SimpleNamespace(thread_time=thread_time))
    one = encode("1")[0]
    for _ in range(2):
        slots.begin([0, 0, 0, 1, 1, 1, 2], [-1, one, one, -1, one, one, -1])
        masks = slots.wait()
        assert (masks.unknown, masks.failures) == ([5], {})
        assert [slots._slots[slot].overspent_s for slot in range(3)] == [0, 0, 0]
    slots.close()


class OneWayMatcher:
    """Cannot go back, as after an error."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> OneWayMatcher:
        return OneWayMatcher(self._matcher.deep_copy())

    def rollback(self, _: int) -> bool:
        return False


class OneWaySource(CompilingSource):
    num_asked = 0

    def template(self, grammar: Grammar) -> Any:
        self.num_asked += 1
        return OneWayMatcher(super().template(grammar))


def test_a_sequence_that_erred_behind_a_draft_is_filled_ahead_no_more() -> None:
    """Its matcher would be built anew in each step."""
    source, letter, grammar = OneWaySource(), encode("a")[0], regex("[a-z]{40}")
    slots = SlotGrammars(source)
    slots.start(started(0, grammar, []))
    for num_known in range(5):
        slots.begin([0, 0], [-1, letter])
        masks = slots.wait()
        assert (list(masks.unknown), masks.failures) == ([1] if num_known else [], {})
        assert allowed(masks, 0) == expected(grammar, [letter] * num_known)
        slots.commit([0], [letter])
        slots.check()
    assert source.num_asked == 2, "at the first mask, and after the error"
    slots.close()
