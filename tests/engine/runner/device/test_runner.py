"""Tests a device's runner at its edges: what is enqueued, what waits, and steps that fail while others are in flight."""

from __future__ import annotations

import random
from array import array
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from device_kit import HostLaunches, make_device_runner
from failpoint_kit import Injected, armed, sites
from plain_masks import PlainMasks
from random_lives import Life, LifeEngine, draw_lives
from runner_kit import GREEDY, VOCAB, DenseLlama, Planner, make_runner, row_tokens
from torch import Tensor

from headrace.core.errors import EngineFatal
from headrace.core.grammar import Grammar
from headrace.core.plan import Plan
from headrace.core.sampling import SamplingParams
from headrace.engine.runner.batch import UnknownToken
from headrace.engine.runner.device.graphs import PromptSize, sizes_up_to
from headrace.tensor.batch import ForwardBatch, KvCache
from headrace.tensor.kernels.choice import CHOICE_KINDS, MAX_TABLE_CHANGES
from headrace.tensor.launches import CudaLaunches, upload_together
from headrace.tensor.models.decoder import DecoderModel

pytestmark = pytest.mark.pure

DEVICE_SITES = [name for name in sites() if name.startswith(("device.", "runner.apply"))]
PARAMS = SamplingParams(seed=3, temperature=0.8, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
PROMPT, STEPS = [5, 6, 7, 8, 9], 6


class Watched:
    """The model, with the batches that it was given. most_tokens: a larger batch than this does not fit the memory."""

    def __init__(self, decoder: DecoderModel, most_tokens: int = 10_000) -> None:
        self.decoder, self.vocab_size, self.hidden_size = decoder, decoder.vocab_size, decoder.hidden_size
        self.activations = decoder.activations
        self.most_tokens, self.batches = most_tokens, list[ForwardBatch]()

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        self.batches.append(batch)
        if batch.num_tokens > self.most_tokens:
            raise torch.OutOfMemoryError("no room for activations")
        return self.decoder.forward(ids, batch, kv)

    def head(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


def language(outputs: list[int]) -> range:
    return range(max(0, outputs[-1] - 20), min(VOCAB, outputs[-1] + 20)) if outputs else range(VOCAB)


def sequence_of_plans(grammar: Grammar | None = None) -> list[Plan]:
    """Prefill in two chunks, then decode."""
    planner = Planner()
    planner.start(0, PROMPT, PARAMS, grammar=grammar)
    return [planner.plan((0, 0, 3, 0)), planner.plan((0, 3, 2, 1)), *(planner.plan((0, 5 + i, 1, 1)) for i in range(STEPS))]


def tokens_of(runner: Any, plans: list[Plan]) -> list[list[list[int]]]:
    return [row_tokens(runner.submit(plan).result()) for plan in plans]


def changes_of(plan: Plan) -> Plan:
    """The plan without its rows: what the loop sends again after a failure."""
    none = array("i")
    return replace(plan, slots=none, starts=none, counts=none, samples=none, adapter_slots=none, mask_slots=none)


def test_what_is_replayed_is_captured_per_padded_size_and_kind_of_choice(decoder: DecoderModel) -> None:
    runner = make_device_runner(decoder, slots=6, most_tokens=100)
    launches = runner._launches
    assert isinstance(launches, HostLaunches)
    assert launches.captured == len((16, 32, 64, 100)) + len((1, 2, 4, 6)) * (1 + len(CHOICE_KINDS))


def test_prompt_sizes_follow_what_a_step_may_hold() -> None:
    assert sizes_up_to(8, 64) == [(8, 1)]
    assert sizes_up_to(100, 3) == [(16, 1), (32, 2), (64, 3), (100, 3)]
    assert sizes_up_to(8192, 256)[-1] == (1024, 64)
    small, large = PromptSize(128, 8), PromptSize(1024, 64)
    assert (small.takes(3, 2), small.takes(129, 2), small.takes(128, 9)) == (True, False, False)
    assert (large.takes(256, 64), large.takes(255, 20)) == (True, False)  # most of it would be padding


def test_prompts_with_log_probabilities_leave_the_others_captured(decoder: DecoderModel, dense: DenseLlama) -> None:
    watched = Watched(decoder)
    runner, planner = make_device_runner(decoder, model=watched), Planner()
    planner.start(0, [20, 7, 9], SamplingParams(temperature=0.0, seed=0, prompt_logprobs=1))
    planner.start(1, [21, 7])
    planner.start(2, [22, 7, 8])
    watched.batches.clear()
    result = runner.submit(planner.plan((0, 0, 3, 1), (1, 0, 2, 1), (2, 0, 3, 1))).result()
    assert [batch.num_tokens for batch in watched.batches] == [32, 3]
    assert row_tokens(result) == [dense.greedy(ids, 1) for ids in ([20, 7, 9], [21, 7], [22, 7, 8])]
    assert (list(result.prompt_rows), list(result.prompt_counts)) == ([0], [2])


@pytest.mark.parametrize(("most_tokens", "prompts"), [(64, (0, 64, 64)), (32, (0, 33, 11))])
def test_prompts_are_padded_to_a_captured_size_with_room_for_their_rows(
    decoder: DecoderModel, dense: DenseLlama, most_tokens: int, prompts: tuple[int, int, int]
) -> None:
    """Prompts that have no room in the largest one are enqueued as they are; either way the last chunk alone gives a token."""
    watched = Watched(decoder)
    runner, planner = make_device_runner(decoder, model=watched, most_tokens=most_tokens), Planner()
    ids = [list(range(first, first + 14)) for first in (10, 30, 50)]
    for slot in range(3):
        planner.start(slot, ids[slot])
    watched.batches.clear()
    first = row_tokens(runner.submit(planner.plan((0, 0, 11, 0), (1, 0, 11, 0), (2, 0, 11, 0))).result())
    assert [(batch.num_decodes, batch.num_tokens, batch.max_count) for batch in watched.batches] == [prompts]
    second = row_tokens(runner.submit(planner.plan((0, 11, 3, 1), (1, 11, 2, 0), (2, 11, 3, 1))).result())
    assert (first, second) == ([[], [], []], [dense.greedy(ids[0], 1), [], dense.greedy(ids[2], 1)])


def test_a_step_with_prompts_replays_its_rows_of_one_token(decoder: DecoderModel, dense: DenseLlama) -> None:
    watched = Watched(decoder)
    runner, planner = make_device_runner(decoder, model=watched), Planner()
    for slot in range(3):
        planner.start(slot, [20 + slot, 7])
    first = row_tokens(runner.submit(planner.plan(*((slot, 0, 2, 1) for slot in range(3)))).result())
    planner.start(3, list(range(40, 51)))
    watched.batches.clear()
    tokens = row_tokens(runner.submit(planner.plan((0, 2, 1, 1), (3, 0, 11, 1), (1, 2, 1, 1), (2, 2, 1, 1))).result())
    assert [(batch.num_decodes, batch.num_tokens, batch.max_count) for batch in watched.batches] == [(4, 4, 1), (0, 16, 16)]
    assert tokens == [dense.greedy([20, 7], 2)[1:], dense.greedy(list(range(40, 51)), 1), *(dense.greedy([n, 7], 2)[1:] for n in (21, 22))]
    assert first == [dense.greedy([20 + slot, 7], 1) for slot in range(3)]


@pytest.mark.parametrize("grammar", [None, Grammar.json_object()])
def test_only_a_grammar_waits_for_the_step_in_flight(decoder: DecoderModel, grammar: Grammar | None) -> None:
    masks = PlainMasks(language, VOCAB)
    runner, plans = make_device_runner(decoder, masks=masks), sequence_of_plans(grammar)
    tickets = [runner.submit(plan) for plan in plans]
    assert len(runner._flight) == (len(plans) if grammar is None else 1)
    unbroken = tokens_of(make_runner(decoder, masks=PlainMasks(language, VOCAB)), plans)
    assert [row_tokens(ticket.result()) for ticket in tickets] == unbroken


@pytest.mark.parametrize("grammar", [None, Grammar.json_object()])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("site", DEVICE_SITES)
def test_a_step_that_raised_anywhere_can_be_repeated(decoder: DecoderModel, site: str, depth: int, grammar: Grammar | None) -> None:
    """Every place fails once in every step that passes it; at depth 2 the plan after it was submitted on its promise."""
    runner, plans = make_device_runner(decoder, masks=PlainMasks(language, VOCAB)), sequence_of_plans(grammar)
    tokens, hits = [], 0
    for number, plan in enumerate(plans):
        submitted = plans[number : number + depth]
        with armed(site) as fault:
            tickets = [runner.submit(each) for each in submitted]
            try:
                result = tickets.pop(0).result()
            except Injected:
                result = None
            for ticket in tickets:
                with suppress(Injected, UnknownToken):
                    ticket.result()
        for each in submitted:
            runner.submit(changes_of(each)).result()
        hits += fault.hits
        tokens.append(row_tokens(runner.submit(plan).result() if result is None else result))
    assert hits > 0 or (site == "device.masks" and grammar is None)
    assert tokens == tokens_of(make_runner(decoder, masks=PlainMasks(language, VOCAB)), plans)
    assert not runner._num_in_flight.any()


def test_a_later_plan_that_succeeded_is_rewound_when_planned_again(decoder: DecoderModel) -> None:
    """The loop takes every plan after a failed one back: the device must not count its tokens twice."""
    runner, plans = make_device_runner(decoder), sequence_of_plans()
    tokens_of(runner, plans[:5])
    assert tokens_of(runner, plans[3:]) == tokens_of(make_runner(decoder), plans)[3:]


def test_block_tables_of_an_earlier_plan_are_not_lost_with_a_launch_that_raises(decoder: DecoderModel, dense: DenseLlama) -> None:
    """The first plan has no rows, so its entries travel with the second one's step; the loop repeats the second plan's changes alone."""
    runner, planner, prompt = make_device_runner(decoder), Planner(), list(range(20, 30))
    planner.start(0, prompt)
    prefill = planner.plan((0, 0, 10, 1))
    runner.submit(prefill).result()
    grown = planner.plan((0, 10, 10, 0))
    runner.submit(changes_of(grown)).result()
    plan = planner.plan((0, 10, 1, 1))
    with armed("device.forward"), pytest.raises(Injected):
        runner.submit(plan).result()
    runner.submit(changes_of(plan)).result()
    tokens = row_tokens(runner.submit(plan).result())[0]
    for step in range(1, 9):
        tokens += row_tokens(runner.submit(planner.plan((0, 10 + step, 1, 1))).result())[0]
    assert tokens == dense.greedy(prompt, 10)[1:]


def test_more_block_table_entries_than_a_step_holds_are_all_written(decoder: DecoderModel) -> None:
    runner = make_device_runner(decoder, slots=128)
    planner = Planner()
    planner.start(0, [5, 6])
    plan = planner.plan((0, 0, 2, 1))
    entries = [(slot, index) for slot in range(1, 128) for index in range(20)]
    blocks = array("i", [*plan.table_blocks, *range(1, len(entries) + 1)])
    columns = (plan.table_slots, plan.table_indices)
    slots, indices = (array("i", [*column, *(entry[i] for entry in entries)]) for i, column in enumerate(columns))
    assert len(entries) > 2 * MAX_TABLE_CHANGES
    groups = array("i", bytes(4 * len(blocks)))
    runner.submit(replace(plan, table_groups=groups, table_slots=slots, table_indices=indices, table_blocks=blocks)).result()
    assert torch.equal(runner._steps.slots.tables[0, :128], torch.from_numpy(runner._slots.tables[0]))


def test_a_late_token_stays_out_of_the_slots_next_sequence(decoder: DecoderModel, dense: DenseLlama) -> None:
    """The slot's sequence is preempted while its step is in flight, and another begins there in the next plan, then it comes back."""
    runner, planner = make_device_runner(decoder), Planner()
    planner.start(0, [5, 6, 7], SamplingParams(temperature=0.0, seed=0, presence_penalty=2.0))
    flying = runner.submit(planner.plan((0, 0, 3, 1)))
    planner.end(0)
    planner.start(0, [9, 9], SamplingParams(temperature=0.0, seed=0, logit_bias={77: 100.0}))
    tickets = [runner.submit(planner.plan((0, 0, 2, 1))), runner.submit(planner.plan((0, 2, 1, 1)))]
    late = row_tokens(flying.result())
    assert late == [dense.greedy([5, 6, 7], 1)]
    assert [row_tokens(ticket.result()) for ticket in tickets] == [[[77]], [[77]]]
    assert runner._slots.token_ids[0, :4].tolist() == [9, 9, 77, 77]
    planner.end(0)
    planner.start(0, [5, 6, 7], GREEDY, outputs=late[0])
    assert row_tokens(runner.submit(planner.plan((0, 0, 4, 1))).result()) == [dense.greedy([5, 6, 7], 2)[1:]]


def test_a_sequence_that_ended_in_flight_leaves_its_slot_clean(decoder: DecoderModel) -> None:
    runner, planner = make_device_runner(decoder), Planner()
    planner.start(0, [5, 6, 7], PARAMS)
    flying = runner.submit(planner.plan((0, 0, 3, 1)))
    planner.end(0)
    runner.submit(planner.plan()).result()
    flying.result()
    assert (runner._slots.known[0], runner._num_in_flight[0], runner._choice._edits) == (0, 0, {})


def test_a_step_that_raises_leaves_the_one_in_flight_alone(decoder: DecoderModel, dense: DenseLlama) -> None:
    runner, planner = make_device_runner(decoder), Planner()
    planner.start(0, PROMPT)
    first = runner.submit(planner.plan((0, 0, 5, 1)))
    plan = planner.plan((0, 5, 1, 1))
    with armed("device.forward"):
        failed = runner.submit(plan)
    with pytest.raises(UnknownToken):
        runner.submit(planner.plan((0, 6, 1, 1))).result()
    assert row_tokens(first.result()) == [dense.greedy(PROMPT, 1)]
    with pytest.raises(Injected):
        failed.result()
    runner.submit(changes_of(plan)).result()
    assert row_tokens(runner.submit(plan).result()) == [dense.greedy(PROMPT, 2)[1:]]


@pytest.mark.parametrize("site", ["device.forward", "device.finish"])
def test_a_device_that_failed_ends_the_engine_with_its_reason(decoder: DecoderModel, site: str) -> None:
    runner = make_device_runner(decoder)
    with armed(site, lambda: torch.AcceleratorError("illegal memory access")), pytest.raises(EngineFatal, match="illegal memory access"):
        runner.submit(sequence_of_plans()[0]).result()


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (torch.AcceleratorError("illegal memory access"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("mask_slots"), False),
    ],
)
def test_only_errors_of_the_device_itself_are_fatal(error: Exception, is_lost: bool) -> None:
    assert CudaLaunches().is_lost(error) is is_lost


def test_steps_that_do_not_fit_the_memory_are_repeated_in_parts(decoder: DecoderModel) -> None:
    """No sequence is lost where each fits alone: the loop repeats the rows of such a step in halves."""
    drawn = [Life(life.request, None, None) for life in draw_lives(60, 5)]
    lives = [life for life in drawn if life.request.grammar is None and len(life.request.prompt_ids) <= 18]
    whole = LifeEngine(decoder, make_runner(decoder), num_blocks=64)
    small = LifeEngine(decoder, make_device_runner(decoder, model=Watched(decoder, most_tokens=18), most_tokens=16), num_blocks=64, depth=2)
    for engine in (whole, small):
        engine.run(lives, random.Random(1), preempts=False)
    assert not small.differences(lives, whole)
    assert small.engine.snapshot().counters.failures["step"] >= 3


def test_a_failed_step_holds_no_tensors(decoder: DecoderModel) -> None:
    """Its rows are computed again while its error is at hand: activations that the error's frames hold would take the memory twice."""
    runner, plan = make_device_runner(decoder, model=Watched(decoder, most_tokens=2), slots=2, most_tokens=2), sequence_of_plans()[0]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        runner.submit(plan).result()
    frames = [frame.frame for frame in caught.traceback if frame.name in ("_compute_prompts", "forward")]
    assert len(frames) >= 2
    assert not any(isinstance(value, Tensor | ForwardBatch) for frame in frames for value in _locals(frame))


def _locals(frame: Any) -> list[object]:
    raw: FrameType = frame.raw
    return list(raw.f_locals.values())


def test_arrays_are_uploaded_in_one_copy() -> None:
    arrays = [torch.arange(5).numpy(), torch.zeros(0, dtype=torch.int32).numpy(), torch.arange(6, dtype=torch.int32).view(2, 3).numpy().T]
    tensors = upload_together(arrays, "cpu", HostLaunches())
    assert [tensor.dtype for tensor in tensors] == [torch.int64, torch.int32, torch.int32]
    assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in arrays]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_every_site_of_the_runner_is_listed() -> None:
    assert DEVICE_SITES == ["device.choice", "device.finish", "device.forward", "device.inputs", "device.masks", "runner.apply"]
