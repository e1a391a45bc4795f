"""Tests the runner against one plain greedy loop that shares no code with it, over plans written by hand."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from runner_kit import CONTEXT, GREEDY, VOCAB, DenseLlama, MakeRunner, Planner, Row, row_tokens
from torch import Tensor

from headrace.core.plan import MoveKind, Plan, Result, TokenLogprobs
from headrace.core.sampling import SamplingParams
from headrace.engine.runner.model_runner import ModelRunner
from headrace.engine.steps import Runner
from headrace.tensor.batch import ForwardBatch, KvCache, allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.kernels.filters import draw
from headrace.tensor.models.decoder import DecoderModel

pytestmark = pytest.mark.pure


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, int(rng.integers(1, 30))).tolist() for _ in range(count)]


def run(runner: Runner, plan: Plan) -> Result:
    return runner.submit(plan).result()


def test_batched_prefill_and_decode_equal_the_plain_loop(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama) -> None:
    runner, planner, given = make_runner(decoder, num_blocks=128), Planner(), prompts(6)
    for slot, prompt in enumerate(given):
        planner.start(slot, prompt)
    lengths = [len(prompt) for prompt in given]
    outputs = row_tokens(run(runner, planner.plan(*((slot, 0, length, 1) for slot, length in enumerate(lengths)))))
    for step in range(9):
        tokens = row_tokens(run(runner, planner.plan(*((slot, length + step, 1, 1) for slot, length in enumerate(lengths)))))
        outputs = [[*seen, *new] for seen, new in zip(outputs, tokens, strict=True)]
    assert outputs == [dense.greedy(prompt, 10) for prompt in given]


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunked_prefill_beside_a_decoding_row(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama, chunk: int) -> None:
    runner, planner = make_runner(decoder), Planner()
    short, long = prompts(1, seed=4)[0][:5], list(range(40, 61))
    planner.start(3, short)
    first = row_tokens(run(runner, planner.plan((3, 0, len(short), 1))))[0]
    planner.start(1, long)
    decoded, sampled = list(first), []
    for begin in range(0, len(long), chunk):
        end = min(begin + chunk, len(long))
        rows = (1, begin, end - begin, int(end == len(long))), (3, len(short) + len(decoded) - 1, 1, 1)
        result = run(runner, planner.plan(*rows))
        sampled, new = row_tokens(result)
        decoded += new
    assert sampled == dense.greedy(long, 1)
    assert decoded == dense.greedy(short, len(decoded))


def test_two_plans_may_be_submitted_before_a_result_is_read(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama) -> None:
    runner, planner, prompt = make_runner(decoder), Planner(), [5, 6, 7, 8, 9]
    planner.start(0, prompt)
    plans = [planner.plan((0, 0, 5, 1)), *(planner.plan((0, 5 + i, 1, 1)) for i in range(6))]
    tickets = [runner.submit(plan) for plan in plans]
    assert [row_tokens(ticket.result())[0][0] for ticket in tickets] == dense.greedy(prompt, 7)


def test_a_resumed_sequence_goes_on_from_its_outputs(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama) -> None:
    runner, planner, prompt = make_runner(decoder), Planner(), [9, 8, 7]
    outputs = dense.greedy(prompt, 6)
    planner.start(0, prompt, outputs=outputs[:4])
    assert row_tokens(run(runner, planner.plan((0, 0, 7, 1)))) == [outputs[4:5]]
    assert row_tokens(run(runner, planner.plan((0, 7, 1, 1)))) == [outputs[5:]]


def test_a_fork_shares_full_blocks_and_copies_the_last(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama) -> None:
    """Two sequences of one prompt: two shared blocks, the third copied, then different tokens; neither disturbs the other."""
    runner, planner, prompt = make_runner(decoder), Planner(), list(range(20, 30))
    planner.start(0, prompt)
    first = row_tokens(run(runner, planner.plan((0, 0, 10, 1))))[0]
    sibling = SamplingParams(temperature=0.0, seed=0, logit_bias={77: 100.0})
    planner.start(1, prompt, sibling, index=1)
    planner.share(0, 1, 2)
    planner.copy_from(0, 1, 2)
    parent, child = list(first), []
    for step in range(4):
        result = row_tokens(run(runner, planner.plan((1, 9 + step, 1, 1), (0, 10 + step, 1, 1))))
        child += result[0]
        parent += result[1]
    assert child == [77] * 4
    assert parent == dense.greedy(prompt, 5)


def test_a_prefix_held_by_somebody_else_is_read_and_not_computed(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama) -> None:
    runner, planner, prompt = make_runner(decoder), Planner(), list(range(50, 61))
    planner.start(0, prompt)
    run(runner, planner.plan((0, 0, 11, 1)))
    longer = [*prompt[:8], 3, 4, 5]
    planner.start(2, longer)
    planner.share(0, 2, 2)
    assert row_tokens(run(runner, planner.plan((2, 8, 3, 1)))) == [dense.greedy(longer, 1)]


def test_a_slot_changes_hands_within_one_plan(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama) -> None:
    """The new sequence is shorter: nothing of the former one, tokens or blocks, may be read."""
    runner, planner = make_runner(decoder), Planner()
    planner.start(0, list(range(3, 33)), SamplingParams(temperature=0.0, seed=0, repetition_penalty=3.0, logit_bias={5: 50.0}))
    run(runner, planner.plan((0, 0, 30, 1)))
    planner.end(0)
    planner.start(0, [9, 9])
    assert row_tokens(run(runner, planner.plan((0, 0, 2, 1)))) == [dense.greedy([9, 9], 1)]


def test_a_sequence_may_fill_the_whole_context(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama) -> None:
    runner, planner, prompt = make_runner(decoder), Planner(), list(range(3, 3 + CONTEXT - 2))
    planner.start(0, prompt)
    tokens = row_tokens(run(runner, planner.plan((0, 0, len(prompt), 1))))[0]
    tokens += row_tokens(run(runner, planner.plan((0, len(prompt), 1, 1))))[0]
    tokens += row_tokens(run(runner, planner.plan((0, len(prompt) + 1, 1, 1))))[0]
    assert tokens[:2] == dense.greedy(prompt, 2)


def test_a_plan_of_changes_alone_computes_nothing(make_runner: MakeRunner, decoder: DecoderModel) -> None:
    runner, planner = make_runner(decoder), Planner()
    planner.start(0, [4, 5])
    result = run(runner, planner.plan())
    assert (list(result.token_counts), list(result.token_ids), result.step_id) == ([], [], 1)
    assert len(row_tokens(run(runner, planner.plan((0, 0, 2, 1))))[0]) == 1


def test_seeded_sampling_is_the_same_alone_and_among_neighbours(make_runner: MakeRunner, decoder: DecoderModel) -> None:
    """Reference kernels multiply row by row alike here; the sampler adds nothing of the batch."""
    params = SamplingParams(seed=1234, temperature=0.9, top_p=0.95, presence_penalty=0.5)

    def generate(neighbours: int) -> list[int]:
        runner, planner = make_runner(decoder, num_blocks=200), Planner()
        planner.start(0, [5, 6, 7], params)
        others = prompts(neighbours, seed=9)
        for slot, prompt in enumerate(others, start=1):
            planner.start(slot, prompt, SamplingParams(seed=slot, temperature=1.3))
        run(runner, planner.plan(*((slot, 0, len(prompt), 1) for slot, prompt in enumerate([[5, 6, 7], *others]))))
        tokens = []
        for step in range(12):
            rows = ((slot, len(prompt) + step, 1, 1) for slot, prompt in enumerate([[5, 6, 7], *others]))
            tokens += row_tokens(run(runner, planner.plan(*rows)))[0]
        return tokens

    assert generate(0) == generate(7)


def test_logprobs_stand_beside_the_tokens_of_their_rows(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama) -> None:
    runner, planner = make_runner(decoder), Planner()
    planner.start(0, [5, 6, 7])
    planner.start(1, [8, 9], SamplingParams(temperature=0.0, seed=0, logprobs=3))
    planner.start(2, [10, 11, 12])
    result = run(runner, planner.plan((2, 0, 2, 0), (0, 0, 3, 1), (1, 0, 2, 1)))
    assert list(result.token_counts) == [0, 1, 1]
    quiet, entry = result.logprobs.entries()
    assert quiet is None
    wanted = torch.log_softmax(dense.logits([8, 9])[-1], dim=-1)
    assert entry is not None
    assert (entry.token_id, entry.rank) == (result.token_ids[1], 1)
    assert entry.top_ids == tuple(wanted.topk(3).indices.tolist())
    assert entry.top_logprobs == pytest.approx(wanted.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunks", [[(0, 12)], [(0, 5), (5, 1), (6, 6)], [(0, 11), (11, 1)]])
@pytest.mark.parametrize("piece", [2, 10_000])
@pytest.mark.parametrize("beside", [3, 24])
def test_prompt_logprobs_cover_every_prompt_position_once(
    make_runner: MakeRunner,
    decoder: DecoderModel,
    dense: DenseLlama,
    monkeypatch: pytest.MonkeyPatch,
    chunks: list[tuple[int, int]],
    piece: int,
    beside: int,
) -> None:
    """Also beside a prompt so long that only some of the step's tokens are looked at."""
    monkeypatch.setattr("headrace.engine.runner.results._PROMPT_LOGITS", piece * VOCAB)
    runner, planner, prompt = make_runner(decoder), Planner(), list(range(30, 42))
    planner.start(0, list(range(4, 4 + beside)))
    planner.start(1, prompt, SamplingParams(temperature=0.0, seed=0, prompt_logprobs=2))
    entries: list[TokenLogprobs] = []
    for begin, count in chunks:
        result = run(runner, planner.plan((0, 0, beside, 1), (1, begin, count, int(begin + count == 12))))
        for row, found in result.prompt_entries().items():
            assert row == 1
            entries += found
    assert not run(runner, planner.plan((1, 12, 1, 1))).prompt_logprobs
    wanted = torch.log_softmax(dense.logits(prompt), dim=-1)
    assert [entry.token_id for entry in entries] == prompt[1:]
    assert [entry.logprob for entry in entries] == pytest.approx([float(wanted[i, t]) for i, t in enumerate(prompt[1:])], abs=1e-4)
    assert [entry.top_ids for entry in entries] == [tuple(wanted[i].topk(2).indices.tolist()) for i in range(11)]


class Poisoned:
    """The model, with NaN in the hidden state of every token of one position."""

    def __init__(self, decoder: DecoderModel, token_id: int) -> None:
        self.decoder, self.token_id, self.vocab_size = decoder, token_id, decoder.vocab_size
        self.hidden_size, self.activations = decoder.hidden_size, decoder.activations

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        hidden = self.decoder.forward(ids, batch, kv)
        hidden[(ids if batch.selected is None else ids[batch.selected]) == self.token_id] = float("nan")
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)

    head = logits


def test_a_row_that_turns_to_nan_fails_alone(make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama) -> None:
    """Its next row was planned already (depth 2): that one fails too, and the neighbour never notices."""
    runner, planner = make_runner(decoder, model=Poisoned(decoder, 13)), Planner()
    planner.start(0, [5, 6, 13])
    planner.start(1, [5, 6, 14])
    tickets = [runner.submit(planner.plan((0, 0, 3, 1), (1, 0, 3, 1)))]
    tickets.append(runner.submit(planner.plan((0, 3, 1, 1), (1, 3, 1, 1))))
    results = [ticket.result() for ticket in tickets]
    assert [row for result in results for row, _ in result.errors] == [0, 0]
    assert [list(result.token_counts) for result in results] == [[0, 1], [0, 1]]
    assert [result.token_ids[0] for result in results] == dense.greedy([5, 6, 14], 2)
    planner.end(0)
    planner.start(0, [5, 6])
    assert row_tokens(run(runner, planner.plan((0, 0, 2, 1)))) == [dense.greedy([5, 6], 1)]


def test_a_prompt_position_that_is_nan_fails_its_row_alone(make_runner: MakeRunner, decoder: DecoderModel) -> None:
    runner, planner = make_runner(decoder, model=Poisoned(decoder, 13)), Planner()
    params = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0)
    planner.start(0, [13, 6, 7], params)
    planner.start(1, [14, 6, 7], params)
    result = run(runner, planner.plan((0, 0, 3, 1), (1, 0, 3, 1)))
    assert [row for row, _ in result.errors] == [0]
    assert list(result.token_counts) == [0, 1]
    assert list(result.prompt_rows) == [1]
    assert len(result.prompt_logprobs) == 2


@pytest.mark.parametrize("kind", [MoveKind.HOST_OUT, MoveKind.HOST_IN, 99])
def test_moves_this_runner_cannot_make_are_refused_with_nothing_applied(
    make_runner: MakeRunner, decoder: DecoderModel, dense: DenseLlama, kind: int
) -> None:
    runner, planner = make_runner(decoder), Planner()
    planner.start(0, [4, 5], GREEDY)
    plan = planner.plan((0, 0, 2, 1))
    one = array("i", [1])
    moving = replace(plan, move_kinds=array("i", [kind]), move_ids=one, move_groups=array("i", [0]), move_sources=one, move_targets=one)
    with pytest.raises(ValueError, match=f"move_kinds.*{MoveKind(kind).name if kind < 3 else kind}"):
        run(runner, moving)
    assert not runner._slots.known.any()
    assert row_tokens(run(runner, plan)) == [dense.greedy([4, 5], 1)]


@pytest.mark.parametrize(("column", "value"), [("adapter_slots", 1), ("mask_slots", 0), ("mask_slots", 3)])
def test_what_this_runner_does_not_have_is_refused_by_name(make_runner: MakeRunner, decoder: DecoderModel, column: str, value: int) -> None:
    runner, planner = make_runner(decoder), Planner()
    planner.start(0, [4, 5], GREEDY)
    plan = planner.plan((0, 0, 2, 1))
    getattr(plan, column)[0] = value
    with pytest.raises(ValueError, match=column):
        run(runner, plan)


class NextWord:
    """A model that keeps nothing of a sequence: what follows a token is decided by that token."""

    vocab_size = VOCAB

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        assert (batch.groups, kv.layers) == ((), [])
        hidden = torch.nn.functional.one_hot((3 * ids + 1) % VOCAB, VOCAB).float()
        return hidden if batch.selected is None else hidden[batch.selected]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.clone()


def test_a_model_without_kv_groups_is_run_like_any_other() -> None:
    """Prompts in pieces, several sequences a step, a slot that is used again."""
    kv = allocate_kv([], (), (), 4, torch.float32, CPU)
    runner = ModelRunner(NextWord(), kv, max_num_seqs=4, max_model_len=CONTEXT, draw=draw)
    planner = Planner()

    def step(*rows: Row) -> list[list[int]]:
        none = array("i")
        plan = replace(planner.plan(*rows), table_groups=none, table_slots=none, table_indices=none, table_blocks=none)
        return row_tokens(runner.submit(plan).result())

    planner.start(0, [5, 6, 7, 8, 9, 10])
    planner.start(2, [20])
    assert step((0, 0, 4, 0), (2, 0, 1, 1)) == [[], [61]]
    assert step((0, 4, 2, 1), (2, 1, 1, 1)) == [[31], [(3 * 61 + 1) % VOCAB]]
    assert step((0, 6, 1, 1)) == [[94]]
    planner.end(0)
    planner.start(0, [1, 2])
    assert step((0, 0, 2, 1)) == [[7]]
