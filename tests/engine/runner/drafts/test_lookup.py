"""Tests drafts from the sequence's own tokens against a search of all of them, through any life of slots."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.ids import SlotId
from headrace.core.plan import Started
from headrace.core.sampling import SamplingParams
from headrace.core.speculation import SpeculativeConfig
from headrace.engine.runner.drafts import Drafter
from headrace.engine.runner.drafts import lookup as module
from headrace.engine.runner.drafts.lookup import LookupDrafter, make_lookup

pytestmark = pytest.mark.pure

SLOTS = st.integers(0, 2)
TOKENS = st.integers(0, 3)


def plain_draft(tokens: list[int], most: int, *, shortest: int, longest: int, max_matches: int) -> list[int]:
    matches: list[int] = []
    for length in range(shortest, longest + 1):
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        matches = ends or matches
    matches = matches[::-1][:max_matches]
    agreeing = matches
    drafted: list[int] = []
    while len(drafted) < most and agreeing:
        written = tokens + drafted
        counts: dict[int, list[int]] = {}
        for end in agreeing:
            counts.setdefault(written[end + len(drafted)], []).append(end)
        token, agreeing = max(counts.items(), key=lambda entry: (len(entry[1]), max(entry[1])))
        if len(agreeing) / len(matches) < 0.5:
            break
        drafted.append(token)
    return drafted


def started(slot: int, tokens: list[int]) -> Started:
    return Started(SlotId(slot), array("i", tokens), len(tokens), SamplingParams(), 0)


def draft(drafter: Drafter, slot: int, most: int) -> list[int]:
    (drafted,) = drafter.draft(np.array([slot]), np.array([most]))
    found: list[int] = drafted.tolist()
    return found


class Lives(RuleBasedStateMachine):
    """Every earlier place is compared here: the bound has a test of its own."""

    @initialize(shortest=st.integers(1, 4), more=st.integers(0, 5), max_matches=st.integers(1, 4))
    def begin(self, shortest: int, more: int, max_matches: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "MAX_PLACES", 10**6)
        self.shape = {"shortest": shortest, "longest": shortest + more, "max_matches": max_matches}
        self.drafter = LookupDrafter(**self.shape)
        self.tokens: dict[int, list[int]] = {}
        self.drafted: list[int] = []

    @rule(slot=SLOTS, tokens=st.lists(TOKENS, min_size=1, max_size=40))
    def start(self, slot: int, tokens: list[int]) -> None:
        self.tokens[slot] = list(tokens)
        self.drafter.start(started(slot, tokens))

    @rule(slots=st.lists(SLOTS))
    def end(self, slots: list[int]) -> None:
        for slot in slots:
            self.tokens.pop(slot, None)
        self.drafter.end(np.array(slots, dtype=np.int64))

    @rule(rows=st.lists(st.tuples(SLOTS, TOKENS), max_size=12))
    def commit(self, rows: list[tuple[int, int]]) -> None:
        known = [(slot, token) for slot, token in rows if slot in self.tokens]
        for slot, token in known:
            self.tokens[slot].append(token)
        columns = np.array(known, dtype=np.int64).reshape(-1, 2)
        self.drafter.commit(columns[:, 0], columns[:, 1])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        left = data.draw(st.integers(0, len(self.tokens[slot])))
        taken, self.tokens[slot] = self.tokens[slot][left:], self.tokens[slot][:left]
        self.drafter.retract(slot, np.array(taken, dtype=np.int64))

    @rule(most=st.lists(st.integers(0, 6), min_size=3, max_size=3))
    def ask(self, most: list[int]) -> None:
        slots = sorted(self.tokens, reverse=True)
        got = self.drafter.draft(np.array(slots, dtype=np.int64), np.array([most[slot] for slot in slots], dtype=np.int64))
        assert [each.tolist() for each in got] == [plain_draft(self.tokens[slot], most[slot], **self.shape) for slot in slots]

    @invariant()
    def holds(self) -> None:
        self.drafter.check()
        assert {slot: each.tokens.tolist() for slot, each in self.drafter._slots.items()} == self.tokens

    def teardown(self) -> None:
        self.drafter.close()
        assert not self.drafter._slots
        self.patch.undo()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=100, stateful_step_count=30)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_draft_copies_what_followed_and_goes_on_with_itself(method: str) -> None:
    drafter = make_lookup(SpeculativeConfig(method=method))
    drafter.start(started(0, [9, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3]))
    assert draft(drafter, 0, 5) == [4, 5, 6, 7, 1]
    drafter.start(started(0, [1, 2, 3, 1, 2, 3]))
    assert draft(drafter, 0, 5) == [1, 2, 3, 1, 2]
    drafter.start(started(0, [5, 1, 2]))
    assert draft(drafter, 0, 5) == []


def test_ngram_prefers_the_longest_match_and_then_the_latest() -> None:
    drafter = make_lookup(SpeculativeConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=3))
    drafter.start(started(0, [1, 2, 3, 50, 1, 2, 3, 60, 8, 2, 3, 70, 1, 2, 3]))
    assert draft(drafter, 0, 1) == [60]
    drafter.retract(0, np.array([1, 2, 3]))
    drafter.commit(np.array([0, 0]), np.array([2, 3]))
    assert draft(drafter, 0, 1) == [70]


def test_suffix_prefers_what_followed_most_often_and_ends_where_matches_part() -> None:
    drafter = make_lookup(SpeculativeConfig(method="suffix"))
    drafter.start(started(0, [1, 2, 30, 40, 50, 11, 1, 2, 30, 40, 60, 12, 1, 2, 30, 41, 13, 1, 2, 31, 14, 1, 2]))
    assert draft(drafter, 0, 5) == [30, 40]


def test_so_many_places_are_compared_the_latest_first() -> None:
    """The longest match is the one before, so it is not found; a search of all places finds it."""
    near = [token for number in range(module.MAX_PLACES) for token in (100 + number, 1, 2, 50)]
    tokens = [7, 1, 2, 60, *near, 7, 1, 2]
    shape = {"shortest": 2, "longest": 8, "max_matches": 1}
    drafter = LookupDrafter(**shape)
    drafter.start(started(0, tokens))
    assert draft(drafter, 0, 1) == [50]
    assert plain_draft(tokens, 1, **shape) == [60]
    drafter.start(started(0, tokens[:-7] + tokens[-3:]))
    assert draft(drafter, 0, 1) == [60]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_of_long_sequences_are_those_of_a_search_of_all_tokens(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of a large vocabulary, and an index that is made at once and then token by token, and grows."""
    monkeypatch.setattr(module, "MAX_PLACES", 10**6)
    random_numbers = np.random.default_rng(0)
    words = random_numbers.integers(0, 250_000, 60)
    tokens: list[int] = words[random_numbers.integers(0, 60, 1500)].tolist()
    shape = {"ngram": {"shortest": 3, "longest": 5, "max_matches": 1}, "suffix": {"shortest": 2, "longest": 16, "max_matches": 4}}[method]
    drafter, known = make_lookup(SpeculativeConfig(method=method)), 900
    drafter.start(started(3, tokens[:known]))
    for _ in range(60):
        assert draft(drafter, 3, 5) == plain_draft(tokens[:known], 5, **shape)
        count = int(random_numbers.integers(1, 20))
        drafter.commit(np.full(count, 3), np.array(tokens[known : known + count]))
        known += count
    assert known > 1024
    drafter.check()
