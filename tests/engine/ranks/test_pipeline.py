"""Tests a pipeline's steps in flight: earlier stages have them before rank 0 computes, whatever becomes of the slots meanwhile."""

from __future__ import annotations

import socket
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_engine import RealEngine, greedy_request
from tiny_models import save_tiny_model

from headrace.core.errors import ConfigError, EngineFatal
from headrace.core.ids import RequestId, SlotId
from headrace.core.load import EngineCounters
from headrace.core.parallelism import Parallelism, RankWork
from headrace.core.plan import Plan, Result, Started
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason
from headrace.engine.config import EngineConfig
from headrace.engine.ranks import leader
from headrace.engine.ranks.frames import FrameKind, StepLimits, frame, read_ints, read_step
from headrace.engine.ranks.leader import RankGroup
from headrace.engine.ranks.link import RankLink
from headrace.engine.ranks.member import RankMember
from headrace.engine.ranks.meter import RankMeter
from headrace.engine.ranks.pipeline import EarlierStages, PipelinedRunner
from headrace.engine.runner.batch import UnknownToken
from headrace.engine.runner.slots import SlotState
from headrace.tensor.peers import NoPeers

pytestmark = pytest.mark.socket

LIMITS = StepLimits(max_tokens=16, max_rows=4, table_width=5, num_groups=1)
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
PP3: dict[str, Any] = {"pipeline_parallel_size": 3}
SPACE: dict[str, Any] = {"kernels": "reference", "device": "cpu", "max_model_len": 200, "load_format": "dummy", "seed": 3}


class NotingRunner:
    """Notes what it computes; a row that samples gets the token that its slot is to give."""

    def __init__(self) -> None:
        self.computed: list[int] = []
        self.tokens: dict[int, int] = {}
        self.is_closed = False

    def execute(self, plan: Plan) -> Result:
        self.computed.append(plan.step_id)
        sampled = [self.tokens[slot] for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        return Result(step_id=plan.step_id, token_counts=plan.samples, token_ids=array("i", sampled))

    def close(self) -> None:
        self.is_closed = True


class Stages:
    """Rank 0 of two stages, and the link of the earlier one."""

    def __init__(self) -> None:
        theirs, mine = socket.socketpair()
        self.member, self.runner = RankLink(mine, LIMITS.allowed), NotingRunner()
        self.group = RankGroup({1: RankLink(theirs, {})}, Parallelism(pp=2).place(0), NoPeers())
        earlier = EarlierStages(self.group, SlotState(4, 20, 1, 4))
        self.pipelined = PipelinedRunner(self.runner, earlier, self.group)  # type: ignore[arg-type]

    def frames(self) -> list[tuple[FrameKind, list[int]]]:
        """What came, and of a step the token ids, of a copy its blocks."""
        return [
            (kind, read_step(payload, LIMITS, {})[0].tolist() if kind is FrameKind.STEP else read_ints(payload, 3))
            for kind, payload in self.member.arrived()
        ]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    monkeypatch.setattr(leader, "JOIN_S", 0.0)
    made = Stages()
    yield made
    made.group.close()


def ints(*values: int) -> array[int]:
    return array("i", values)


def started(slot: int, *token_ids: int) -> Started:
    return Started(SlotId(slot), ints(*token_ids), len(token_ids), SamplingParams(), 0)


def plan_of(step_id: int, *rows: tuple[int, int, int, int], **changes: Any) -> Plan:
    slots, starts, counts, samples = (ints(*(row[i] for row in rows)) for i in range(4))
    return Plan(step_id=step_id, slots=slots, starts=starts, counts=counts, samples=samples, mask_slots=ints(*[-1] * len(rows)), **changes)


def test_an_earlier_stage_has_steps_and_copies_in_order_before_rank_0_computes(stages: Stages) -> None:
    stages.runner.tokens = {0: 7, 1: 8}
    moved = {"move_kinds": ints(0), "move_ids": ints(0), "move_groups": ints(0), "move_sources": ints(3), "move_targets": ints(4)}
    tickets = [
        stages.pipelined.submit(plan_of(1, (0, 0, 2, 1), started=(started(0, 1, 2),))),
        stages.pipelined.submit(plan_of(2, (1, 0, 1, 1), started=(started(1, 3),), **moved)),
    ]
    assert stages.frames() == [(FrameKind.STEP, [1, 2]), (FrameKind.COPY, [0, 3, 4]), (FrameKind.STEP, [3])]
    assert stages.runner.computed == []
    assert tickets[0].result().step_id == 1
    assert stages.runner.computed == [1]
    tickets.append(stages.pipelined.submit(plan_of(3, (0, 2, 1, 1))))
    assert stages.frames() == [(FrameKind.STEP, [7])], "the token that rank 0 has sampled"
    assert [ticket.result().step_id for ticket in tickets] == [1, 2, 3]


def test_a_token_of_a_sequence_that_has_left_its_slot_is_not_the_next_ones(stages: Stages) -> None:
    stages.runner.tokens = {0: 7}
    first = stages.pipelined.submit(plan_of(1, (0, 0, 2, 1), started=(started(0, 1, 2),)))
    second = stages.pipelined.submit(plan_of(2, (0, 0, 2, 0), ended=ints(0), started=(started(0, 4, 5, 6),)))
    first.result()
    second.result()
    stages.pipelined.submit(plan_of(3, (0, 2, 1, 1))).result()
    stages.pipelined.submit(plan_of(4, (0, 3, 1, 1))).result()
    assert [ids for _, ids in stages.frames()] == [[1, 2], [4, 5], [6], [7]]


def test_a_step_that_was_rolled_back_is_sent_again_with_what_it_computes_then(stages: Stages) -> None:
    stages.runner.tokens = {0: 7}
    stages.pipelined.submit(plan_of(1, (0, 0, 2, 1), started=(started(0, 1, 2),))).result()
    stages.pipelined.submit(plan_of(2, (0, 2, 1, 1))).result()
    stages.runner.tokens = {0: 9}
    stages.pipelined.submit(plan_of(3, (0, 0, 2, 1))).result()
    stages.pipelined.submit(plan_of(4, (0, 2, 1, 1))).result()
    assert [ids for _, ids in stages.frames()] == [[1, 2], [7], [1, 2], [9]]


def test_a_plan_of_a_token_that_is_in_flight_ends_the_replica(stages: Stages) -> None:
    stages.pipelined.submit(plan_of(1, (0, 0, 2, 1), started=(started(0, 1, 2),)))
    with pytest.raises(EngineFatal, match="UnknownToken") as error:
        stages.pipelined.submit(plan_of(2, (0, 2, 1, 1)))
    assert isinstance(error.value.__cause__, UnknownToken)
    assert stages.group.fault is not None


def test_what_was_sent_is_computed_before_the_end(stages: Stages) -> None:
    stages.runner.tokens = {0: 7}
    for number in (1, 2):
        stages.pipelined.submit(plan_of(number, (0, 0, 1, 0), started=(started(0, 1, 2),)))
    stages.pipelined.close()
    assert (stages.runner.computed, stages.runner.is_closed) == ([1, 2], True)


def test_a_failure_of_rank_0_behind_its_forward_ends_the_replica_too(stages: Stages) -> None:
    """Nothing is in `tokens`."""
    ticket = stages.pipelined.submit(plan_of(1, (0, 0, 2, 1), started=(started(0, 1, 2),)))
    with pytest.raises(EngineFatal, match="rank 0 failed within a step: KeyError"):
        ticket.result()
    assert stages.group.fault is not None


def test_a_link_that_is_read_ahead_takes_frames_that_nobody_asks_for() -> None:
    """Rank 0 would wait for ever: the member is in an exchange, in which it waits for rank 0."""
    theirs, mine = socket.socketpair()
    rank_0, member = RankLink(theirs, {}), RankLink(mine, {FrameKind.STEP: 1 << 20, FrameKind.END: 0})
    receive = member.read_ahead(FrameKind.END)
    for number in range(20):
        rank_0.send(frame(FrameKind.STEP) if number == 0 else large_frame(number))
    rank_0.send(frame(FrameKind.END))
    found = [receive() for _ in range(21)]
    assert [payload[:1] for _, payload in found] == [b"", *(bytes([number]) for number in range(1, 20)), b""]
    theirs.close()


def large_frame(number: int) -> bytes:
    payload = bytes([number]) * (1 << 20)
    return frame(FrameKind.STEP)[:8] + len(payload).to_bytes(8, "little") + payload


def test_a_link_that_is_read_ahead_raises_its_end_where_a_frame_is_waited_for() -> None:
    theirs, mine = socket.socketpair()
    receive = RankLink(mine, LIMITS.allowed).read_ahead(FrameKind.END)
    theirs.close()
    with pytest.raises(EngineFatal, match="its link is closed"):
        receive()


def test_as_many_steps_are_in_flight_as_there_are_stages(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path, num_hidden_layers=3)
    for layout, num_stages in ((PP2, 2), (PP3, 3)):
        with RealEngine(folder, **SPACE, **layout) as engine:
            counts: list[int] = []
            asked = [greedy_request(f"r{number}", [number, 1, 2]) for number in range(6)]
            engine.run(*asked, each_turn=lambda _, engine=engine, counts=counts: counts.append(len(engine.engine._steps)))  # type: ignore[misc]
            counters = engine.engine.snapshot().counters
        assert max(counts) == num_stages - 1, "one was just committed"
        assert list(counters.stage_idle_microseconds) == [str(stage) for stage in range(num_stages)]
        assert all(0 <= us <= 1e6 * counters.step_seconds for us in counters.stage_idle_microseconds.values())


def test_steps_that_a_links_buffer_does_not_hold_block_no_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier stage waits in an exchange until rank 0 computes, which sends the next step before."""
    accept = socket.socket.accept

    def accept_with_a_small_buffer(self: socket.socket) -> tuple[socket.socket, Any]:
        accepted, address = accept(self)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that there is
        return accepted, address

    monkeypatch.setattr(socket.socket, "accept", accept_with_a_small_buffer)
    asked = [greedy_request(f"r{number}", [number, *range(3, 180)]) for number in range(8)]
    found = []
    for layout in ({}, PP2):
        config = {**SPACE, "max_num_batched_tokens": 1024, "num_kv_blocks": 500}
        with RealEngine(save_tiny_model("llama", tmp_path / str(len(layout))), **config, **layout) as engine:
            found.append(engine.run(*asked).answers())
    assert {key: answer.token_ids for key, answer in found[1].items()} == {key: answer.token_ids for key, answer in found[0].items()}


@pytest.mark.parametrize("num_turns", range(2, 7))
def test_an_engine_that_is_stopped_with_steps_in_flight_ends_its_ranks_in_order(tmp_path: Path, num_turns: int) -> None:
    engine = RealEngine(save_tiny_model("llama", tmp_path), **SPACE, **PP2)
    engine.submit(*(greedy_request(f"r{number}", [number, 1, 2]) for number in range(4)))
    for _ in range(num_turns):
        engine.engine.turn()
    engine.engine.stop()
    engine.engine.run()
    engine.ranks.join()
    assert not engine.ranks.errors


def test_requests_that_leave_and_are_preempted_while_their_steps_are_in_flight_harm_no_other(tmp_path: Path) -> None:
    """Their slots and blocks are given to others at once."""
    folder = save_tiny_model("llama", tmp_path, num_hidden_layers=3)
    asked = [greedy_request(f"r{number}", [number, 1, 2, 3 + number], logprobs=1, temperature=0.8, seed=number) for number in range(12)]
    with RealEngine(folder, **SPACE) as alone:
        expected = alone.run(*asked).answers()

    def disturb(turn: int) -> None:
        scheduler = engine.engine.scheduler
        if turn % 5 == 2:
            engine.engine.cancel(RequestId(f"r{turn // 5 * 2 % 12}"))
        running = scheduler.sequences.slots.running
        if turn % 3 == 1 and running:
            scheduler.sequences.preempt(running[turn % len(running)], engine.engine.clock())
        scheduler.check()

    for layout in (PP2, PP3, {**PP2, "tensor_parallel_size": 2}):
        with RealEngine(folder, **{**SPACE, "max_num_seqs": 4, "max_num_batched_tokens": 8}, **layout) as engine:
            engine.run(*asked, each_turn=disturb)
            assert not engine.ranks.errors
            finished = engine.answers()
        for key, answer in finished.items():
            assert answer.token_ids == expected[key].token_ids[: len(answer.token_ids)]
            assert answer.finish is FinishReason.CANCELLED or answer.token_ids == expected[key].token_ids
        reasons = Counter(answer.finish for answer in finished.values())
        assert min(reasons[FinishReason.LENGTH], reasons[FinishReason.CANCELLED]) >= 4


def test_an_earlier_stage_that_fails_ends_the_replica_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RealEngine(save_tiny_model("llama", tmp_path), **SPACE, **PP2)
    engine.run(greedy_request("before", [1, 2, 3]))

    def fail(*_: object) -> bool:
        raise MemoryError("no more")

    monkeypatch.setattr(RankMember, "_take", fail)
    with pytest.raises(EngineFatal, match=r"rank 1 failed: MemoryError\('no more'\)"):
        engine.run(*(greedy_request(f"after {number}", [1, 2, 3]) for number in range(3)))
    engine.engine.closing.close()
    engine.ranks.join()


def test_two_rules_for_the_steps_in_flight_are_refused() -> None:
    with pytest.raises(ConfigError, match="depth: 2 is not supported beside pipeline_parallel_size = 2"):
        EngineConfig(model="m", device="cpu", depth=2, **PP2).checked()
    assert EngineConfig(model="m", device="cpu", **PP3).checked().max_steps_in_flight == 3


class NotedWork(NoPeers):
    def __init__(self) -> None:
        self.now = [RankWork(10, 1_000, 5.0, 5.0, 0.0), RankWork(10, 2_000, 5.0, 4.0, 9.0)]

    def work(self) -> list[RankWork]:
        return self.now


def test_a_stage_is_idle_while_it_computes_no_step_and_steps_are_in_flight() -> None:
    """Rank 0 is in the last stage; what was done before the meter was made is warm-up."""
    peers, counters = NotedWork(), EngineCounters()
    meter = RankMeter(peers, Parallelism(pp=2))
    counters.note_step(10.0)
    peers.now = [RankWork(14, 1_000, 7.0, 7.0, 0.0), RankWork(14, 52_000, 8.0, 5.0, 16.0)]
    meter.count(counters)
    assert counters.stage_idle_microseconds == {"0": 4_000_000, "1": 2_000_000}, "10 - (7 - 1) seconds, and 2 waited in receive"
    assert (counters.exchanges, counters.exchanged_kilobytes, counters.exchange_wait_microseconds) == (8, 50, 5_000_000)
    peers.now = [RankWork(14, 1_000, 7.0, 7.0, 0.0), RankWork(14, 52_000, 8.0, 5.0, 18.0)]
    meter.count(counters)
    assert counters.stage_idle_microseconds["0"] == 4_000_000, "a counter never falls"


def test_stages_of_one_rank_alone_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    peers, counters = NotedWork(), EngineCounters()
    meter = RankMeter(peers, Parallelism(tp=2))
    peers.now = [RankWork(14, 1_001_000, 7.0, 0.0, 0.0), RankWork(14, 2_000, 5.0, 0.0, 9.0)]
    counters.note_step(10.0)
    meter.count(counters)
    assert not counters.stage_idle_microseconds
    with caplog.at_level("INFO"):
        meter.log(counters)
    assert "8 exchanges of ranks, 1.0 MB, which waited 2.0 s in them; 1 steps" in caplog.text
