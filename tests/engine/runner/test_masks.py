"""Tests sequences with a grammar in the runner against a plain loop that takes the best token its language allows."""

from __future__ import annotations

import pytest
from patience import PATIENCE_S
from plain_masks import Language, PlainMasks
from runner_kit import GREEDY, VOCAB, DenseLlama, MakeRunner, Planner, make_runner, row_tokens

from headrace.core.grammar import Grammar
from headrace.core.plan import Plan, Result
from headrace.core.sampling import SamplingParams
from headrace.engine.runner.model_runner import OverlappedRunner
from headrace.engine.steps import Runner
from headrace.tensor.models.decoder import DecoderModel

pytestmark = pytest.mark.pure

ANY = Grammar.json_object()
"""PlainMasks have one language for all."""
PROMPTS = ([5, 6, 7, 8, 9], [40, 3], list(range(20, 31)), [77])


def near(outputs: list[int]) -> range:
    """Each output is at most 9 away from the one before, the first at most 20."""
    return range(max(0, outputs[-1] - 9), min(VOCAB, outputs[-1] + 10)) if outputs else range(20)


def alternating(outputs: list[int]) -> range:
    """Even after odd, odd after even."""
    return range(len(outputs) % 2, VOCAB, 2)


def run(runner: Runner, plan: Plan) -> Result:
    return runner.submit(plan).result()


@pytest.mark.parametrize("language", [near, alternating])
def test_masked_rows_follow_their_grammar_and_the_rest_does_not_notice(
    make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama, language: Language
) -> None:
    """Slots 0 and 2 have a grammar, 1 and 3 have none."""
    masks = PlainMasks(language, VOCAB)
    runner, planner = make_runner(decoder, num_blocks=128, masks=masks), Planner()
    for slot, prompt in enumerate(PROMPTS):
        planner.start(slot, prompt, grammar=ANY if slot % 2 == 0 else None)
    outputs = row_tokens(run(runner, planner.plan(*((slot, 0, len(prompt), 1) for slot, prompt in enumerate(PROMPTS)))))
    for step in range(9):
        tokens = row_tokens(run(runner, planner.plan(*((slot, len(prompt) + step, 1, 1) for slot, prompt in enumerate(PROMPTS)))))
        outputs = [[*seen, *new] for seen, new in zip(outputs, tokens, strict=True)]
    expected = [dense.greedy(prompt, 10, language) if slot % 2 == 0 else dense.greedy(prompt, 10) for slot, prompt in enumerate(PROMPTS)]
    assert outputs == expected
    assert masks.outputs == {0: outputs[0], 2: outputs[2]}
    assert outputs[0] != dense.greedy(PROMPTS[0], 10), "the grammar changed something"


def test_a_chunk_in_the_middle_of_a_prompt_asks_for_no_mask(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama) -> None:
    masks = PlainMasks(near, VOCAB)
    runner, planner, prompt = make_runner(decoder, masks=masks), Planner(), PROMPTS[2]
    planner.start(0, prompt, grammar=ANY)
    assert row_tokens(run(runner, planner.plan((0, 0, 6, 0)))) == [[]]
    assert row_tokens(run(runner, planner.plan((0, 6, 5, 1)))) == [dense.greedy(prompt, 1, near)]


def test_a_resumed_sequence_goes_on_in_its_grammar(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama) -> None:
    runner, planner, prompt = make_runner(decoder, masks=PlainMasks(near, VOCAB)), Planner(), [9, 8, 7]
    outputs = dense.greedy(prompt, 6, near)
    planner.start(0, prompt, outputs=outputs[:4], grammar=ANY)
    assert row_tokens(run(runner, planner.plan((0, 0, 7, 1)))) == [outputs[4:5]]
    assert row_tokens(run(runner, planner.plan((0, 7, 1, 1)))) == [outputs[5:]]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, top_p=0.9, logprobs=2), SamplingParams(seed=4, presence_penalty=1.0)])
def test_a_row_whose_mask_cannot_be_made_fails_alone(make_runner: MakeRunner, decoder: DecoderModel, params: SamplingParams) -> None:
    masks = PlainMasks(alternating, VOCAB)
    runner, planner = make_runner(decoder, num_blocks=128, masks=masks), Planner()
    for slot in range(3):
        planner.start(slot, [5, 6 + slot], params, grammar=ANY)
    run(runner, planner.plan(*((slot, 0, 2, 1) for slot in range(3))))
    masks.broken = {1}
    result = run(runner, planner.plan(*((slot, 2, 1, 1) for slot in range(3))))
    assert result.errors == ((1, "slot 1 is broken"),)
    assert result.token_counts.tolist() == [1, 0, 1]
    assert len(result.logprobs) == (2 if params.logprobs else 0)
    assert [len(masks.outputs[slot]) for slot in range(3)] == [2, 1, 2]
    later = run(runner, planner.plan(*((slot, 3, 1, 1) for slot in range(3))))
    assert later.token_counts.tolist() == [1, 0, 1], "a failed slot's later rows fail, too"


def test_a_slot_is_free_of_its_grammar_when_it_is_used_again(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama) -> None:
    masks = PlainMasks(near, VOCAB)
    runner, planner = make_runner(decoder, masks=masks), Planner()
    planner.start(0, PROMPTS[0], grammar=ANY)
    run(runner, planner.plan((0, 0, 5, 1)))
    planner.end(0)
    planner.start(0, PROMPTS[1])
    assert row_tokens(run(runner, planner.plan((0, 0, 2, 1)))) == [dense.greedy(PROMPTS[1], 1)]
    assert masks.outputs == {}


@pytest.mark.socket
def test_the_overlapped_runner_gives_the_same_tokens_and_closes_the_masks(decoder: DecoderModel, dense: DenseLlama) -> None:
    masks = PlainMasks(near, VOCAB)
    runner, planner = OverlappedRunner(make_runner(decoder, masks=masks)), Planner()
    planner.start(0, PROMPTS[0], grammar=ANY)
    plans = [planner.plan((0, 0, 5, 1)), *(planner.plan((0, 5 + i, 1, 1)) for i in range(6))]
    tickets = [runner.submit(plan) for plan in plans]
    assert [row_tokens(ticket.result(timeout=PATIENCE_S))[0][0] for ticket in tickets] == dense.greedy(PROMPTS[0], 7, near)
    runner.close()
    assert masks.is_closed


def test_a_runner_without_masks_refuses_a_sequence_with_a_grammar_by_name(make_runner: MakeRunner, decoder: DecoderModel) -> None:
    runner, planner = make_runner(decoder), Planner()
    planner.start(0, [4, 5], grammar=ANY)
    with pytest.raises(ValueError, match="mask_slots: this runner follows no grammars"):
        run(runner, planner.plan((0, 0, 2, 1)))
