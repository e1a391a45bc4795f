"""Tests a draft model over plans written by hand: what it drafts equals what that model says by itself, and it computes little twice."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_kit import GREEDY, ChainModel, DraftWorld, chain_continuation
from runner_kit import CONTEXT, KV_HEADS, LAYERS, VOCAB, DenseLlama, Planner, load_decoder, make_runner, row_tokens, save_tiny_llama

from headrace.core.sampling import SamplingParams
from headrace.engine.runner.drafts.model import MAX_CATCH_UP_TOKENS, ModelDrafter
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.runner.slots import SlotState
from headrace.tensor.batch import allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.kernels.filters import draw
from headrace.tensor.models.decoder import DecoderModel
from headrace.tensor.sampling import Sampler

pytestmark = pytest.mark.pure

HEAD_DIM = 8


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-draft"), seed=1)


def world_of(folder: Path) -> DraftWorld:
    shapes = [(KV_HEADS, HEAD_DIM)] * LAYERS
    return DraftWorld(load_decoder(folder), DenseLlama(folder).greedy, shapes=shapes, num_blocks=64, max_model_len=CONTEXT)


def test_drafts_are_the_models_own_greedy_continuation(draft_folder: Path) -> None:
    """`DraftWorld` compares every draft. Sequences: one alone, one that shares its prefix, a fork of it, one that is preempted."""
    world, rng = world_of(draft_folder), np.random.default_rng(0)
    prompt = rng.integers(3, VOCAB, 19).tolist()
    world.start(0, prompt, len(prompt))
    world.grow_or_end(0)
    world.start(1, [*prompt[:13], 5, 6], 15)
    world.grow_or_end(1)
    world.fork(0, 2)
    num_drafts = 0
    for turn in range(12):
        for slot in [*world.live]:
            num_drafts += len(world.step(slot, most=int(rng.integers(0, 5)), accepted=turn % 4, last=int(rng.integers(3, VOCAB))))
        if turn == 6:
            world.preempt(1)
            world.grow_or_end(1)
    assert sorted(world.live) == [0, 1, 2]
    assert num_drafts > 40
    assert any(world.live[0].tokens[19:][at] != world.live[2].tokens[19:][at] for at in range(10)), "the fork went its own way"


def test_slots_are_drafted_in_one_batch(draft_folder: Path) -> None:
    world = world_of(draft_folder)
    for slot, prompt in enumerate(([5, 6, 7], [9] * 11, [8])):
        world.start(slot, prompt, len(prompt))
        world.grow(slot, len(prompt) + 4)
    world.apply()
    drafts = world.draft({2: 4, 0: 1, 1: 3})
    assert [len(drafts[slot]) for slot in range(3)] == [1, 3, 4]


def test_no_log_probabilities_are_computed_for_drafts(decoder: DecoderModel, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, drafter = with_drafter(decoder, load_decoder(tiny_folder))
    planner = Planner()
    planner.start(0, [5, 6, 7], replace(GREEDY, logprobs=2))
    result = runner.submit(planner.plan((0, 0, 3, 1))).result()
    assert result.logprobs
    monkeypatch.delattr("headrace.tensor.sampling.sampler.token_logprobs")
    [drafts] = drafter.draft(np.array([0]), np.array([1]))
    assert len(drafts) == 1


def with_drafter(target: DecoderModel, draft: DecoderModel) -> tuple[ModelRunner, ModelDrafter]:
    made: list[ModelDrafter] = []

    def make(slots: SlotState, sampler: Sampler) -> ModelDrafter:
        kv = allocate_kv(draft.kv_shapes, draft.group_of, (64,), 4, torch.float32, CPU)
        made.append(ModelDrafter(slots, sampler, model=draft, kv=kv, group=0, max_model_len=CONTEXT))
        return made[0]

    kv = allocate_kv(target.kv_shapes, target.group_of, (64,), 4, torch.float32, CPU)
    runner = ModelRunner(target, kv, max_num_seqs=4, max_model_len=CONTEXT, draw=draw, eos_token_ids=(2,), drafter=make)
    return runner, made[0]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=7, top_p=0.95, max_tokens=None)])
def test_a_draft_model_that_is_the_target_is_always_right(decoder: DecoderModel, tiny_folder: Path, params: SamplingParams) -> None:
    """Sampled as the target samples: with the random number of the sequence and of the position."""
    runner, drafter = with_drafter(decoder, load_decoder(tiny_folder))
    plain, prompts = make_runner(decoder), ([5, 6, 7], [9] * 11)
    planner, plain_planner = Planner(), Planner()
    for slot, prompt in enumerate(prompts):
        planner.start(slot, prompt, params, index=slot)
        plain_planner.start(slot, prompt, params, index=slot)
    rows = [(slot, 0, len(prompt), 1) for slot, prompt in enumerate(prompts)]
    row_tokens(runner.submit(planner.plan(*rows)).result())
    later = [[] for _ in prompts]  # type: list[list[int]]
    for step in range(6):
        rows = [(slot, 0 if not step else len(p) + step - 1, 1 if step else len(p), 1) for slot, p in enumerate(prompts)]
        for slot, tokens in enumerate(row_tokens(plain.submit(plain_planner.plan(*rows)).result())):
            later[slot] += tokens
    for slot, prompt in enumerate(prompts):
        while len(planner.blocks[slot]) * 4 < len(prompt) + 5:
            planner._take(slot)
    runner.submit(planner.plan()).result()
    drafts = drafter.draft(np.array([0, 1]), np.array([4, 4]))
    assert [tokens.tolist() for tokens in drafts] == [tokens[1:5] for tokens in later]


@pytest.mark.parametrize("is_target", [True, False], ids=["right", "wrong"])
def test_the_text_is_the_targets_whatever_is_drafted(
    decoder: DecoderModel, dense: DenseLlama, tiny_folder: Path, draft_folder: Path, is_target: bool
) -> None:
    """Steps as a scheduler plans them, of two sequences: what was drafted is computed in the next step."""
    runner, _ = with_drafter(decoder, load_decoder(tiny_folder if is_target else draft_folder))
    planner, tokens, num_prompts, num_accepted = Planner(), [[5, 6, 7], [9] * 11], (3, 11), 0
    for slot, prompt in enumerate(tokens):
        planner.start(slot, prompt)
        for _ in range(12):
            planner._take(slot)
    drafts: list[list[int]] = [[], []]
    for step in range(5):
        starts = [len(ids) - 1 if step else 0 for ids in tokens]
        rows = [(slot, start, len(tokens[slot]) - start + len(drafts[slot]), 1 + len(drafts[slot])) for slot, start in enumerate(starts)]
        plan = replace(planner.plan(*rows), drafts=array("i", drafts[0] + drafts[1]), num_drafts=array("i", [3, 4]))
        result = runner.submit(plan).result()
        for slot, new in enumerate(row_tokens(result)):
            tokens[slot] += new
            num_accepted += len(new) - 1
        first, second = result.draft_counts
        assert (first, second) == (3, 4)
        drafts = [list(result.drafts[:first]), list(result.drafts[first:])]
    for ids, count in zip(tokens, num_prompts, strict=True):
        assert ids[count:] == dense.greedy(ids[:count], len(ids) - count)
    assert num_accepted == 4 * 7 if is_target else num_accepted < 7


def test_a_sequence_computes_only_what_it_has_not(draft_folder: Path) -> None:
    """Per turn the tokens that were rejected or come after the drafts, and a pass for each draft but the last; a copied block is
    computed again from its beginning."""
    model = ChainModel()
    world = DraftWorld(model, chain_continuation)
    world.start(0, [1] * 9, 9)
    world.grow_or_end(0)

    def tokens(most: int, accepted: int) -> list[int]:
        del model.num_tokens[:]
        world.step(0, most, accepted, last=10)
        return model.num_tokens[:]

    assert tokens(4, 0) == [10, 1, 1, 1]
    assert tokens(4, 0) == [1, 1, 1, 1]
    assert tokens(4, 2) == [1, 1, 1, 1]
    assert tokens(4, 4) == [2, 1, 1, 1]
    assert tokens(0, 4) == []
    assert tokens(2, 0) == [3, 1]
    world.fork(0, 1)
    assert tokens(1, 0) == [1], "the fork shares a block of the prompt, which the parent writes no more"
    source = world.live[0].blocks[-1]
    world.held[source] += 1  # shared by another: copied before it is written
    length = len(world.live[0].tokens)
    assert tokens(1, 0) == [length + 1 - (length - 1) // 4 * 4]


def test_a_long_prompt_is_caught_up_with_over_several_steps() -> None:
    model = ChainModel()
    world = DraftWorld(model, chain_continuation, num_blocks=400, max_model_len=1000)
    for slot, count in ((0, 2 * MAX_CATCH_UP_TOKENS), (1, 5)):
        world.start(slot, [3] * count, count)
        world.grow(slot, count + 8)
    world.apply()
    lengths = [{slot: len(tokens) for slot, tokens in world.draft({0: 2, 1: 2}).items()} for _ in range(4)]
    assert lengths == [{0: 0, 1: 2}, {0: 0, 1: 2}, {0: 2, 1: 2}, {0: 2, 1: 2}]
    assert max(model.num_tokens) == MAX_CATCH_UP_TOKENS


class Broken(ChainModel):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.full((len(hidden), self.vocab_size), float("nan"))


def test_logits_that_are_no_numbers_draft_nothing() -> None:
    world = DraftWorld(Broken(), lambda ids, count: [])
    world.start(0, [1, 2, 3], 3)
    world.grow(0, 6)
    world.apply()
    found = world.drafter.draft(np.array([0]), np.array([3]))
    assert [tokens.tolist() for tokens in found] == [[]]


def test_a_slot_with_penalties_bias_and_logprobs_is_drafted_too(draft_folder: Path) -> None:
    world = world_of(draft_folder)
    params = SamplingParams(
        temperature=0.0, seed=0, max_tokens=None, logprobs=3, min_tokens=9, repetition_penalty=1.1, logit_bias={77: 100.0}
    )
    world.continuation = lambda ids, count: [77] * count
    world.start(0, [4, 5, 6], 3, params)
    world.grow(0, 8)
    world.apply()
    assert world.draft({0: 4}) == {0: [77] * 4}


def test_warm_up_leaves_nothing_behind(draft_folder: Path) -> None:
    world = world_of(draft_folder)
    world.drafter.warm_up()
    assert not any(layer.values.any() for layer in world.drafter._kv.layers)
    assert not world.drafter.num_filled.any()
