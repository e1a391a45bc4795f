"""Tests times of steps: fitted to measurements, kept in a file, and taken from any latency."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.core.plan import Plan, int_column
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions, fake_engine
from headrace.lab.plan.catalogue import read_catalogue
from headrace.lab.plan.shapes import find_entry
from headrace.lab.simulate.step_times import (
    FittedLatency,
    MeasuredStep,
    StepFile,
    fit,
    mean_error,
    measure_steps,
    read_steps,
    step_s,
    write_steps,
)
from headrace.policy.placement.roofline import Layout, Roofline

pytestmark = pytest.mark.pure

TINY = EngineConfig(model="tiny", num_threads=2).checked()
LATENCY = FittedLatency(step_s=0.003, row_s=2e-4, context_s=1e-7, prompt_s=5e-5, attention_s=1e-9)


def plan(*rows: tuple[int, int]) -> Plan:
    """rows: start and count of each"""
    return Plan(
        step_id=1,
        slots=int_column(range(len(rows))),
        starts=int_column([start for start, _ in rows]),
        counts=int_column([count for _, count in rows]),
        samples=int_column([1] * len(rows)),
    )


def test_a_step_is_what_its_rows_cost() -> None:
    assert step_s(LATENCY, plan()) == 0
    assert step_s(LATENCY, plan((100, 1), (300, 1))) == pytest.approx(LATENCY.decode_s(2, 200))
    assert step_s(LATENCY, plan((50, 200))) == pytest.approx(LATENCY.prefill_s(200, 50))
    mixed = step_s(LATENCY, plan((100, 1), (0, 200)))
    assert LATENCY.decode_s(1, 100) < mixed < LATENCY.decode_s(1, 100) + LATENCY.prefill_s(200), "weights are read once"


def test_prompts_beside_decoding_sequences_read_the_weights_once() -> None:
    """The larger of all that is computed and of what is read: of sequences that compute longer than weights are read, none is lost."""
    known = read_catalogue()
    shape, dtype = find_entry("llama-3-8b", known.models)
    latency = Roofline(shape, known.device("h100"), Layout(), dtype, "bf16")
    for num_decoding in (8, 1000):
        decoding = [(100, 1)] * num_decoding
        mixed = step_s(latency, plan(*decoding, (0, 1000)))
        whole = latency.prefill_s(num_decoding + 1000) + latency.read_kv_s(num_decoding, 100)
        assert mixed == pytest.approx(whole, rel=0.02)
        assert mixed < latency.decode_s(num_decoding, 100) + latency.prefill_s(1000)


def test_the_fit_finds_the_numbers_that_made_the_steps() -> None:
    steps = [
        MeasuredStep(rows, rows * context, prompt, prompt * prompt / 2, 0.0)
        for rows in (0, 1, 4, 16, 64)
        for context in (10, 500, 2000)
        for prompt in (0, 64, 512)
        if rows or prompt
    ]
    made = [
        MeasuredStep(
            each.num_decoding,
            each.context,
            each.prompt_tokens,
            each.attention,
            LATENCY.step_s
            + each.num_decoding * LATENCY.row_s
            + each.context * LATENCY.context_s
            + each.prompt_tokens * LATENCY.prompt_s
            + each.attention * LATENCY.attention_s,
        )
        for each in steps
    ]
    found = fit(made)
    assert asdict(found) == {name: pytest.approx(value, rel=0.02) for name, value in asdict(LATENCY).items()}
    assert mean_error(found, made) < 0.01


def test_too_few_steps_are_not_fitted() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit([MeasuredStep(1, 1, 0, 0.0, 0.1)])


def test_steps_of_an_engine_are_measured_and_fitted() -> None:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    options = FakeOptions(step_seconds=0.01, token_seconds=0.0001, num_blocks=4000, max_model_len=1024, verify=False)
    engine = fake_engine(lambda updates: None, options, EngineConfig(model="fake", max_num_seqs=16), clock=lambda: now[0], wait=wait)
    steps = measure_steps(engine, limit_s=1e9, clock=lambda: now[0])
    assert {step.num_decoding for step in steps} >= {1, 2, 4, 8, 16}
    assert {step.num_decoding for step in steps if step.prompt_tokens} >= {1, 3, 7}, "prompts beside sequences that decode"
    found = fit(steps)
    assert mean_error(found, steps) < 0.02
    assert found.decode_s(8, 100) == pytest.approx(0.0108, rel=0.02)
    assert found.prefill_s(512) == pytest.approx(0.01 + 0.0512, rel=0.02)


def test_a_fit_that_is_far_off_is_warned_of() -> None:
    near, far = (StepFile(engine=TINY, latency=LATENCY, num_blocks=100, num_steps=50, error=error) for error in (0.2, 0.449))
    assert near.warning == ""
    assert "off by 45%" in far.warning


def test_a_file_of_steps_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    kept = StepFile(engine=TINY, latency=LATENCY, num_blocks=100, num_steps=50, error=0.01)
    write_steps(file, kept)
    assert read_steps(file) == kept


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"latency": {**asdict(LATENCY), "row_s": -1.0}}, "latency.row_s: must be a number of seconds"),
        ({"latency": {**asdict(LATENCY), "rows": 1.0}}, "latency.rows: is not a known key"),
        ({"latency": dict.fromkeys(asdict(LATENCY), 0.0)}, "says that a step takes no time"),
        ({"num_blocks": 0}, "num_blocks: must be 2 or more"),
        ({"error": -1.0}, "error: must be a share"),
        ({"engine": {"model": "tiny", "dtype": "fp2"}}, "dtype: 'fp2' is not one of"),
    ],
)
def test_what_is_wrong_in_a_file_of_steps_is_named(tmp_path: Path, change: dict[str, object], named: str) -> None:
    file = tmp_path / "steps.json"
    kept = asdict(StepFile(engine=TINY, latency=LATENCY, num_blocks=100, num_steps=50, error=0.01))
    file.write_text(json.dumps(kept | change))
    with pytest.raises(ConfigError) as refused:
        read_steps(file)
    assert named in str(refused.value)
