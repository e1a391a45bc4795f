"""Tests that the fake runner keeps the contract of plans: its answers are the oracle's under preemption, chunks, forks and overlap."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.errors import CheckpointError, EngineFatal
from headrace.core.ids import RequestId, SlotId
from headrace.core.plan import Plan, Started, int_column
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason, Rejected, SequenceUpdate
from headrace.engine.config import EngineConfig
from headrace.lab.fake_adapters import FakeAdapter, FakeAdapterLoader, save_fake_adapter
from headrace.lab.fake_runner import FakeOptions, FakeRunner, fake_answer, fake_engine, fake_token
from tests.lab.test_fake_clock import VirtualClock

pytestmark = pytest.mark.pure

SMALL = FakeOptions(block_size=4, num_blocks=24, max_model_len=64, vocab_size=50)


def request(name: str, prompt: tuple[int, ...], **params: object) -> EngineRequest:
    return EngineRequest(request_id=RequestId(name), prompt_ids=prompt, params=SamplingParams(**{"seed": 1, "max_tokens": 20, **params}))  # type: ignore[arg-type]


def run_all(options: FakeOptions, config: EngineConfig, requests: list[EngineRequest]) -> dict[tuple[str, int], list[SequenceUpdate]]:
    """Every sequence's updates, from an engine turned by hand until nothing is left."""
    heard: dict[tuple[str, int], list[SequenceUpdate]] = {}

    def outbox(updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            assert isinstance(update, SequenceUpdate), update
            heard.setdefault((update.request_id, update.index), []).append(update)

    engine = fake_engine(outbox, options, config)
    for one in requests:
        engine.submit(one)
    for _ in range(2000):
        if not engine.turn() and not engine.scheduler.sequences.has_work:
            break
    engine.scheduler.check()
    return heard


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_are_the_oracles_when_memory_is_short_and_prompts_are_chunked(depth: int) -> None:
    config = EngineConfig(model="fake", max_num_seqs=6, max_num_batched_tokens=7, block_size=4, depth=depth)
    requests = [request(f"r{i}", tuple(range(3 + 4 * (i % 4))), seed=i, n=1 + i % 3) for i in range(10)]
    heard = run_all(SMALL, config, requests)
    for one in requests:
        for index in range(one.params.n):
            tokens = [token for update in heard[one.request_id, index] for token in update.token_ids]
            assert tokens == fake_answer(one, index, 20, SMALL), (one.request_id, index)


def test_a_resumed_request_goes_on_where_it_stopped() -> None:
    one = request("r", (1, 2, 3))
    whole = fake_answer(one, 0, 20, SMALL)
    resumed = replace(one, output_ids=tuple(whole[:7]))
    heard = run_all(SMALL, EngineConfig(model="fake"), [resumed])
    assert [token for update in heard["r", 0] for token in update.token_ids] == whole[7:]


def test_the_end_token_comes_where_it_was_ordered() -> None:
    options = replace(SMALL, eos_after=5)
    one = request("r", (1, 2, 3))
    updates = run_all(options, EngineConfig(model="fake"), [one])["r", 0]
    assert [token for update in updates for token in update.token_ids] == fake_answer(one, 0, 20, options)
    assert updates[-1].finish is FinishReason.STOP


def test_only_the_ids_that_were_ordered_are_produced() -> None:
    options = FakeOptions(vocab_size=50, produced=(7, 9))
    assert {options.token(seed, 0, 3, 2) for seed in range(200)} == {7, 8, 9}
    assert {FakeOptions(vocab_size=4).token(seed, 0, 3, 2) for seed in range(200)} == {0, 1, 2}


def test_tokens_depend_on_everything_they_should_and_are_never_the_end_token() -> None:
    base = fake_token(1, 0, 5, 7, 50)
    assert len({base, *(fake_token(*change, 50) for change in ((2, 0, 5, 7), (1, 1, 5, 7), (1, 0, 6, 7), (1, 0, 5, 8)))}) > 3
    assert max(fake_token(seed, 0, 0, 0, 10) for seed in range(1000)) == 8


def plan_for(prompt: tuple[int, ...], blocks: list[int], *, start: int = 0) -> Plan:
    started = Started(SlotId(0), int_column(prompt), len(prompt), SamplingParams(seed=0), 0)
    return Plan(
        step_id=1,
        slots=int_column([0]),
        starts=int_column([start]),
        counts=int_column([len(prompt) - start]),
        samples=int_column([1]),
        adapter_slots=int_column([0]),
        mask_slots=int_column([-1]),
        table_groups=int_column([0] * len(blocks)),
        table_slots=int_column([0] * len(blocks)),
        table_indices=int_column(range(len(blocks))),
        table_blocks=int_column(blocks),
        started=(started,),
    )


def test_a_wrong_block_table_is_caught() -> None:
    runner = FakeRunner(SMALL)
    runner.submit(plan_for((1, 2, 3, 4, 5, 6), [1, 2]))
    with pytest.raises(AssertionError, match="block 1"):
        runner.submit(plan_for((1, 2, 9, 4, 5, 6), [1, 2], start=4))
    with pytest.raises(AssertionError, match="block 1"):
        FakeRunner(SMALL).submit(plan_for((1, 2, 3, 4, 5, 6), [1, 1]))


def test_an_adapter_changes_tokens_and_kv() -> None:
    adapter = FakeAdapter("ab" * 32, 1)
    adapted = replace(plan_for((1, 2, 3, 4, 5), [1, 2]), adapter_slots=int_column([1]))
    runner = FakeRunner(SMALL, resident=lambda: (None, adapter))
    answer = runner.submit(adapted).result().token_ids.tolist()
    of_adapter = replace(request("r", (1, 2, 3, 4, 5), seed=0), adapter="a", adapter_digest=adapter.digest)
    assert answer == fake_answer(of_adapter, 0, 1, SMALL)
    assert answer != fake_answer(replace(of_adapter, adapter=None, adapter_digest=""), 0, 1, SMALL)
    with pytest.raises(AssertionError, match="block 1"):
        runner.submit(plan_for((1, 2, 3, 4, 5), [1, 2], start=4))


def test_the_files_of_a_fake_adapter_decide_its_digest(tmp_path: Path) -> None:
    loader = FakeAdapterLoader()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        loader.inspect(tmp_path)
    save_fake_adapter(tmp_path, b"one")
    digest = loader.inspect(tmp_path)
    assert loader.load(tmp_path, digest) == FakeAdapter(digest, 3)
    save_fake_adapter(tmp_path, b"two")
    with pytest.raises(CheckpointError, match="have changed"):
        loader.load(tmp_path, digest)


def test_a_row_with_a_grammar_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="mask_slots"):
        FakeRunner(SMALL).submit(replace(plan_for((1, 2, 3), [1]), mask_slots=int_column([0])))


@pytest.mark.socket
def test_closing_the_runner_ends_the_wait_for_a_step() -> None:
    runner = FakeRunner(replace(SMALL, stall_after_steps=1, stall_seconds=3600))
    ticket = runner.submit(plan_for((1, 2, 3), [1]))
    waiter = threading.Thread(target=ticket.result)
    waiter.start()
    runner.close()
    waiter.join(60)
    assert not waiter.is_alive()


def test_a_step_takes_its_time_and_the_one_behind_it_begins_when_it_ends() -> None:
    clock = VirtualClock()
    paced = FakeRunner(replace(SMALL, step_seconds=0.5, token_seconds=0.25), clock=clock, wait=clock.wait)
    tickets = [paced.submit(plan_for((1, 2, 3), [1])) for _ in range(2)]
    began = clock.now
    tickets[0].result()
    assert clock.now - began == 0.5 + 3 * 0.25
    tickets[1].result()
    assert clock.now - began == 2 * (0.5 + 3 * 0.25)


def test_it_dies_and_refuses_as_its_options_say() -> None:
    with pytest.raises(EngineFatal):
        FakeRunner(replace(SMALL, die_after_steps=1)).submit(plan_for((1, 2, 3), [1]))
    with pytest.raises(CheckpointError, match="truncated"):
        fake_engine(lambda updates: None, FakeOptions(refuse="truncated"))
