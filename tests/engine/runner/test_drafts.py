"""Tests steps with drafts: random requests are answered as without them, whatever is drafted."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from failpoint_kit import sites
from plain_masks import PlainMasks
from random_lives import Key, Life, LifeEngine, RandomFaults, draw_lives, language
from random_speculation import decide_at_random
from runner_kit import VOCAB, make_runner

from headrace.core.plan import Plan, Started
from headrace.core.speculation import NGRAM, SpeculativeConfig
from headrace.engine.runner.batch import Positions, read_rows, sampled_positions
from headrace.engine.runner.slots import Ints, SlotState
from headrace.tensor.models.decoder import DecoderModel
from headrace.tensor.sampling import Sampler

pytestmark = pytest.mark.pure

SEED, COUNT, MOST = 11, 200, 8
FEW_BLOCKS = 40
FAULTS = [name for name in sites() if name.startswith("runner.")]


class PlantedDrafts:
    """Drafts what the plain runner answered, with errors planted, and goes on behind its end, as real drafters do. It keeps each slot's
    tokens by itself, and compares them with the runner's."""

    def __init__(self, answers: dict[Key, list[int]], lives: Sequence[Life], slots: SlotState, accuracy: float) -> None:
        self._by_seed = {life.request.params.seed: life for life in lives}
        self._answers, self._slots, self._accuracy = answers, slots, accuracy
        self._rng = random.Random(SEED)
        self._held: dict[int, tuple[Key, int, list[int]]] = {}
        self.counts: Counter[str] = Counter()

    def start(self, started: Started) -> None:
        request_id = str(self._by_seed[started.params.seed].request.request_id)
        self._held[started.slot] = (request_id, started.index), started.num_prompt_tokens, started.token_ids.tolist()

    def end(self, slots: Ints) -> None:
        for slot in slots:
            self._held.pop(slot, None)

    def commit(self, slots: Ints, token_ids: Ints) -> None:
        for slot, token_id in zip(slots, token_ids, strict=True):
            self._held[slot][2].append(int(token_id))

    def retract(self, slot: int, token_ids: Ints) -> None:
        del self._held[slot][2][-len(token_ids) :]

    def draft(self, slots: Ints, most: Ints) -> list[Ints]:
        return [self._draft(int(slot), int(count)) for slot, count in zip(slots, most, strict=True)]

    def _draft(self, slot: int, most: int) -> Ints:
        key, num_prompt, tokens = self._held[slot]
        known = int(self._slots.known[slot])
        assert self._slots.token_ids[slot, :known].tolist() == tokens, "the drafter heard of other tokens than the runner has"
        answer = self._answers[key]
        behind = [answer[-1], answer[-1], self._rng.randrange(VOCAB)] if self._accuracy < 1 and answer else []
        follows = [*answer, *behind][known - num_prompt :][:most]
        self.counts["behind the end"] += known - num_prompt + len(follows) > len(answer)
        drafts = [token if self._rng.random() < self._accuracy else self._rng.randrange(VOCAB) for token in follows]
        self.counts["drafts"] += len(drafts)
        return np.array(drafts, dtype=np.int64)

    def close(self) -> None:
        self.counts["closed"] += 1


@pytest.fixture(scope="module")
def lives() -> list[Life]:
    return draw_lives(COUNT, SEED)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_random_lives_are_answered_as_without_drafts(
    decoder: DecoderModel, lives: list[Life], whole: LifeEngine, accuracy: float, depth: int
) -> None:
    made: list[PlantedDrafts] = []

    def drafter(slots: SlotState, _: Sampler) -> PlantedDrafts:
        made.append(PlantedDrafts(whole.tokens, lives, slots, accuracy))
        return made[0]

    runner = make_runner(decoder, num_blocks=FEW_BLOCKS, masks=PlainMasks(language, VOCAB), drafter=drafter)
    speculative = SpeculativeConfig(method=NGRAM, num_speculative_tokens=MOST)
    engine = LifeEngine(decoder, runner, depth=depth, num_blocks=FEW_BLOCKS, speculative=speculative)
    decide_at_random(engine.engine.scheduler, SEED)
    faults = RandomFaults(random.Random(SEED), 0.04)
    with faults.armed(FAULTS):
        engine.run(lives, random.Random(SEED + depth), faults)
    assert not engine.differences(lives, whole)
    engine.check_idle()
    counters = engine.engine.snapshot().counters
    assert counters.draft_tokens >= 150
    assert counters.accepted_tokens >= 0.9 * counters.draft_tokens or accuracy < 1
    assert made[0].counts["behind the end"] >= 10 or accuracy in (0, 1), made[0].counts
    assert counters.accepted_tokens <= accuracy * counters.draft_tokens + 60
    assert min(engine.counts[name] for name in ("cancelled", "ended early", "preempted", "prefix hits")) >= 20, engine.counts


def positions(samples: list[int], drafts: list[int]) -> Positions:
    rows = range(len(samples))
    counts = [max(each, 1) + (2 if not each else 0) for each in samples]
    plan = Plan(
        step_id=1, slots=array("i", rows), starts=array("i", [10 * row for row in rows]), counts=array("i", counts),
        samples=array("i", samples), drafts=array("i", drafts),
    )  # fmt: skip
    return sampled_positions(read_rows(plan), np.array(drafts, dtype=np.int64))


def test_positions_are_those_at_the_ends_of_rows() -> None:
    found = positions([1, 0, 3, 1], [7, 8])
    assert found.rows.tolist() == [0, 2, 2, 2, 3]
    assert found.tokens.tolist() == [0, 4, 5, 6, 7]
    assert found.places.tolist() == [1, 21, 22, 23, 31]
    assert found.drafts is not None
    assert found.given is not None
    assert found.drafts.tolist() == [-1, 7, 8, -1, -1]
    assert found.given.tolist() == [-1, -1, 7, 8, -1]


@pytest.mark.parametrize(
    ("tokens", "unknown", "kept"),
    [
        ([5, 7, 8, 9, 5], [], [1, 1, 1, 1, 1]),
        ([5, 6, 8, 9, 5], [], [1, 1, 0, 0, 1]),
        ([5, 7, 9, 9, 5], [], [1, 1, 1, 0, 1]),
        ([5, 7, 8, 9, 5], [2], [1, 1, 0, 0, 1]),
        ([-1, 7, 8, -1, -1], [3], [1, 1, 1, 0, 1]),
    ],
)
def test_the_first_draft_that_is_wrong_ends_its_row(tokens: list[int], unknown: list[int], kept: list[int]) -> None:
    found = positions([1, 0, 3, 1], [7, 8])
    assert found.accepted(np.array(tokens, dtype=np.int64), unknown).astype(int).tolist() == kept


def test_drafts_that_no_row_has_are_refused() -> None:
    with pytest.raises(ValueError, match="drafts: 0 are missing or left over: the plan has 1"):
        positions([1, 1], [7])
