"""Tests the benchmark tables of `make bench`, each run once on a fake model, and the page made from made-up rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import harness, report, static_batching
from bench.harness import Machine, run_table
from bench.report import newest_results, write_page
from bench.run import TABLES
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions, fake_engine
from headrace.lab.offline import Collector
from tests.lab.test_fake_clock import VirtualClock

pytestmark = pytest.mark.pure

BASE = EngineConfig(model="/models/fake", max_num_batched_tokens=512)


def fake_machine(config: EngineConfig) -> Machine:
    options = FakeOptions(
        vocab_size=3000,
        max_model_len=1024,
        block_size=config.block_size,
        num_blocks=config.num_kv_blocks or 4097,
        verify=False,
        step_seconds=1e-4,
        token_seconds=1e-6,
    )
    clock = VirtualClock()
    collector = Collector(clock, clock.wait)
    return Machine(fake_engine(collector, options, config.checked(), clock=clock, wait=clock.wait), collector)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_measures_what_it_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "build", fake_machine)
    table = TABLES[name](BASE)
    assert len(table.variants) == 2
    results = {variant: dict(table.run(machine, 0)) for variant, machine in harness.machines_of(table).items()}
    for values in results.values():
        assert list(values) == [measure.name for measure in table.measures]
    base, other = results.values()
    match name:
        case "continuous-batching" | "continuous-batching-skewed":
            assert other["steps"] < base["steps"]
        case "continuous-batching-equal-latency":
            assert other["highest rate"] > 2 * base["highest rate"] > 0, "a step costs nearly the same for any number of sequences"
            assert all(0.8 * values["goal"] < values["E2EL p50 at that rate"] <= values["goal"] for values in results.values())
        case "continuous-batching-alone":
            assert other == pytest.approx(base)
        case "one-at-a-time-32" | "one-at-a-time-64":
            assert other["output"] > 2 * base["output"]
            assert other["E2EL p50"] < base["E2EL p50"]
        case "paged-memory":
            assert base["most at once"] == 4
            assert other["most at once"] > 12
        case "chunked-prefill":
            assert other["worst gap of a stream"] > 0
        case "prefix-cache":
            assert base["prompt tokens found"] == 0
            assert other["prompt tokens found"] > 0.8


@pytest.mark.parametrize("name", TABLES)
def test_variants_differ_by_one_switch(name: str) -> None:
    table = TABLES[name](BASE)
    first, second = table.variants.values()
    differing = {field for field in EngineConfig.__dataclass_fields__ if getattr(first, field) != getattr(second, field)}
    differing |= {"static"} if table.static in table.variants else set()
    assert differing in (
        {"static"},
        {"max_num_seqs"},
        {"block_size", "num_kv_blocks"},  # the same pool in other pieces
        {"enable_chunked_prefill"},
        {"enable_prefix_caching"},
    )
    if "block_size" in differing:
        assert first.num_kv_blocks is not None
        assert second.num_kv_blocks is not None
        assert (first.num_kv_blocks - 1) * first.block_size == (second.num_kv_blocks - 1) * second.block_size


def test_rounds_are_interleaved_and_kept_and_become_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.lab.environment.commit_of", lambda folder: "abc")  # git is another process
    monkeypatch.setattr(harness, "build", fake_machine)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "bandwidth_script", lambda: None)
    said: list[str] = []
    file = run_table(TABLES["continuous-batching"](BASE), rounds=3, say=said.append)
    data = json.loads(file.read_text())
    assert [next(iter(entry["values"])) for entry in data["rounds"]] == ["static", "continuous", "static"]
    assert len(said) == 3
    assert data["rounds"][0]["environment"]["load_average"]

    old = tmp_path / "continuous-batching-20200101T000000Z.json"
    old.write_text("{}")
    assert newest_results(tmp_path) == [file]
    page = tmp_path / "page.md"
    write_page([file], page)
    text = page.read_text()
    assert "## Continuous batching" in text
    assert "| static |" in text
    assert "| continuous / static |" in text
    assert "3 rounds" in text
    assert file.name in text
    assert text.isascii()


def test_the_page_has_the_answers_of_each_precision_once_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, record = tmp_path / "page.md", tmp_path / "quality.json"
    monkeypatch.setattr(report, "QUALITY", record)
    write_page([], page)
    assert "What a precision costs" not in page.read_text()
    shares = {"float32": {"facts": 0.75, "copies": 0.5}, "int4": {"facts": 0.5, "copies": 0.5}}
    environment = {"time": "now", "commit": "abc", "cpu": "a CPU"}
    record.write_text(json.dumps({"environment": environment, "n": {"facts": 400, "copies": 100}, "exact_match": shares}))
    write_page([], page)
    text = page.read_text()
    assert "two standard errors are 10.0% at most" in text
    assert "| task | prompts | float32 | int4 |\n|---|---|---|---|\n| facts | 400 | 75.0% | 50.0% |" in text
    assert "| mean | 500 | 62.5% | 50.0% |" in text


def test_continuous_batching_gains_by_the_spread_of_lengths_where_a_step_costs_the_same_for_any_number_of_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(static_batching, "NUM_REQUESTS", 64)
    gains = {}
    for fixed in (1.0, 0.0):
        for spread, requests in static_batching.spreads().items():
            cell = static_batching.Cell(static_batching.made_up(fixed), requests)
            gains[fixed, spread] = cell.at_once("continuous").output_throughput / cell.at_once("static").output_throughput
    assert gains[1.0, "exponential"] > gains[1.0, "even, 6 to 121"] > 1.3 > gains[1.0, "equal"] >= 1.0
    assert all(gains[0.0, spread] == pytest.approx(1.0, abs=0.02) for spread in static_batching.spreads())
