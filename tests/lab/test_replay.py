"""Tests that a dumped ring runs again to the same tokens, and that a ring that begins in mid-life says what it leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kit import FULL, VOCAB, DrivenEngine, request
from kv_oracle import OracleRunner

from headrace.core.plan import Plan, Result
from headrace.core.plan_codec import load_plans
from headrace.engine.steps import Ticket
from headrace.lab.replay import count_rows, describe_rows, known_rows, replay, summarize_plan

pytestmark = pytest.mark.pure


class Recorder:
    """A runner that keeps what passes through it."""

    def __init__(self, runner: OracleRunner) -> None:
        self.runner = runner
        self.results: dict[int, Result] = {}

    def submit(self, plan: Plan) -> Ticket:
        ticket = self.runner.submit(plan)
        self.results[plan.step_id] = ticket.result()
        return ticket

    def close(self) -> None:
        self.runner.close()


@pytest.fixture
def dumped(tmp_path: Path) -> tuple[list[Plan], dict[int, Result]]:
    """Plans of a small run with chunked prefill, several sequences and n = 2; and what each step gave."""
    driven = DrivenEngine(num_blocks=64)
    recorder = Recorder(driven.runner)
    driven.engine._steps.runner = recorder
    driven.submit(request("a", list(range(30))), request("b", [1, 2, 3], n=2), request("c", [5] * 9, max_tokens=3))
    driven.run()
    (tmp_path / "ring").write_bytes(driven.engine.recent_plans())
    plans = load_plans((tmp_path / "ring").read_bytes())
    assert len(plans) == len(recorder.results) > 5
    return plans, recorder.results


def fresh_runner() -> OracleRunner:
    return OracleRunner((FULL,), (64,), 4, vocab_size=VOCAB)


def test_whole_ring_gives_the_same_tokens_again(dumped: tuple[list[Plan], dict[int, Result]]) -> None:
    plans, results = dumped
    again = list(replay(plans, fresh_runner()))
    assert [done.result.token_ids for done in again] == [results[done.plan.step_id].token_ids for done in again]
    assert sum(done.skipped_rows for done in again) == 0
    assert [done.plan.step_id for done in again] == [plan.step_id for plan in plans if plan.num_rows]


def test_ring_that_begins_in_mid_life_leaves_unknown_sequences_out() -> None:
    driven = DrivenEngine(num_blocks=64)
    driven.submit(request("old", list(range(16))), request("new", list(range(50, 70)), max_tokens=4))
    driven.run()
    late = list(driven.engine._steps.recent)[1:]
    kept = list(known_rows(late))
    assert sum(skipped for _, skipped in kept) == 7  # "old" is in its prompt before the ring and in seven decode rows of it
    assert {slot for plan, _ in kept for slot in (*plan.slots, *plan.table_slots, *plan.ended)} == {1}
    assert count_rows(late) == (sum(plan.num_rows for plan in late) - 7, 7)
    again = list(replay(late, fresh_runner()))  # the oracle runner raises for a slot or block it does not know
    assert sum(len(done.result.token_ids) for done in again) == 4


def test_summary_counts_rows_by_what_they_do(dumped: tuple[list[Plan], dict[int, Result]]) -> None:
    plans, _ = dumped
    first = summarize_plan(plans[0])
    assert first["prefill_rows"] >= 1
    assert first["decode_rows"] == 0
    assert first["tokens"] == sum(plans[0].counts) <= 16
    assert sum(summarize_plan(plan)["started"] for plan in plans) == 4
    assert sum(summarize_plan(plan)["new_blocks"] for plan in plans) > 8


def test_rows_are_described_for_people(dumped: tuple[list[Plan], dict[int, Result]]) -> None:
    plans, _ = dumped
    text = "\n".join(describe_rows(plans[0]))
    assert "slot 0: positions 0..15" in text
    assert "slot 0 started: 30 prompt + 0 output tokens known" in text
