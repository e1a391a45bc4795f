"""Tests `headrace replay`: the table, the rows, and the same tokens again from a real model with random weights."""

from __future__ import annotations

import json
from dataclasses import replace as changed
from pathlib import Path

import pytest
import typer
from tiny_models import TINY

from headrace.cli.exits import CommandExitCode
from headrace.cli.replay import replay
from headrace.core.errors import ConfigError
from headrace.core.plan_codec import PlanCodecError, dump_plans, load_plans
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.build import build_engine
from headrace.engine.config import EngineConfig
from headrace.lab.datasets import WorkloadShape, make_requests
from headrace.lab.offline import Collector, run_offline

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="module")
def dumped(model: Path) -> tuple[Path, list[int]]:
    """The ring of an engine that answered three requests, and the tokens of its answers in the order they were sampled."""
    collector, tokens = Collector(), list[int]()

    def outbox(updates: list[SequenceUpdate | Rejected]) -> None:
        tokens.extend(token for update in updates if isinstance(update, SequenceUpdate) for token in update.token_ids)
        collector(updates)

    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        seed=3,
        kernels="reference",
        num_threads=1,
        num_kv_blocks=64,
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )
    engine = build_engine(config.checked(), outbox)
    run_offline(engine, collector, make_requests(3, WorkloadShape(input_tokens=20, output_tokens=5, low_id=5, high_id=300)))
    (model / "ring").write_bytes(engine.recent_plans())
    return model / "ring", tokens


def test_plans_are_shown_as_a_table(dumped: tuple[Path, list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    dump, _ = dumped
    replay(dump, rows=True)
    text = capsys.readouterr().out
    assert text.splitlines()[0].split()[:4] == ["step_id", "prefill_rows", "decode_rows", "tokens"]
    assert "slot 0: positions 0..19 -> samples" in text
    replay(dump, as_json=True)
    plans = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(plan["samples"] for plan in plans) == 15
    assert sum(plan["tokens"] for plan in plans) == 3 * 20 + 3 * 4


def test_plans_run_again_to_the_same_tokens(model: Path, dumped: tuple[Path, list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    dump, tokens = dumped
    replay(dump, model=str(model), load_format="dummy", seed=3, kernels="reference", as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line["skipped_rows"] == 0 and line["errors"] == [] and line["ms"] > 0 for line in lines)
    assert len(tokens) == 15
    assert [token for line in lines for token in line["sampled"]] == tokens
    replay(dump, model=str(model), load_format="dummy", seed=4, kernels="reference", as_json=True)
    others = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [token for line in others for token in line["sampled"]] != tokens  # other weights


def test_deterministic_kernels_are_asked_for_and_refused_where_there_are_none(model: Path, dumped: tuple[Path, list[int]]) -> None:
    with pytest.raises(ConfigError, match="deterministic: reference kernels"):
        replay(dumped[0], model=str(model), load_format="dummy", kernels="reference", deterministic=True)


def test_rows_of_sequences_begun_before_the_dump_are_counted_not_run(
    tmp_path: Path, model: Path, dumped: tuple[Path, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """One long stream fills the ring with rows of a sequence that began before it: replaying them used to end in silence, as a success."""
    plans = load_plans(dumped[0].read_bytes())
    late = plans[1:]
    assert not any(plan.started for plan in late)
    (tmp_path / "late").write_bytes(dump_plans(late))
    with pytest.raises(typer.Exit) as ended:
        replay(tmp_path / "late", model="/absent: not even looked at")
    assert ended.value.exit_code == CommandExitCode.FAILED
    shown = capsys.readouterr()
    num_rows = sum(plan.num_rows for plan in late)
    assert shown.err.startswith(f"{num_rows} of {num_rows} rows are left out: their sequences began before")
    assert "no row to run again" in shown.err
    (tmp_path / "some").write_bytes(dump_plans([*late, changed(plans[0], step_id=late[-1].step_id + 1)]))
    replay(tmp_path / "some", model=str(model), load_format="dummy", kernels="reference", as_json=True)
    shown = capsys.readouterr()
    assert shown.err.startswith(f"{num_rows} of {num_rows + plans[0].num_rows} rows are left out")
    assert [json.loads(line)["rows"] for line in shown.out.splitlines()] == [plans[0].num_rows]


def test_a_dump_without_plans_is_shown_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "idle").write_bytes(dump_plans([]))
    replay(tmp_path / "idle")
    assert len(capsys.readouterr().out.splitlines()) == 1
    with pytest.raises(typer.Exit):
        replay(tmp_path / "idle", model="/absent: not even looked at")
    assert capsys.readouterr().err.startswith("There is no row to run again")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"not plans")
    with pytest.raises(PlanCodecError, match="not a plan dump"):
        replay(tmp_path / "other")
