"""Tests random requests under `deterministic`, mixing all that a client may ask for: each sequence is answered as its request alone is.

A crowd shares few KV blocks, so that sequences are preempted and prefixes evicted all the time; some requests are aborted, and most of
these are resumed. The slow test writes random-requests.json (`save_result`). Case by case: `test_deterministic`, `test_masked_sequences`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from grammar_kit import vetting_here
from random_requests import LONGEST_OUTPUT, LONGEST_PROMPT, Crowd, Trial, draw_trials
from random_speculation import decide_at_random
from real_engine import RealEngine
from results import save_result

pytest.importorskip("numba")

from headrace.bundled import DRAFT_MODEL as DRAFT
from headrace.bundled import bundled_path
from headrace.core.speculation import DRAFT_MODEL, SUFFIX, SpeculativeConfig

pytestmark = pytest.mark.socket

SEED = 20
SPACE: dict[str, Any] = {"deterministic": True, "max_model_len": LONGEST_PROMPT + LONGEST_OUTPUT, "block_size": 4}
ALONE: dict[str, Any] = {"max_num_seqs": 1, "num_kv_blocks": 200, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
CROWDED: dict[str, Any] = {"num_kv_blocks": 64, "max_num_seqs": 12, "max_num_batched_tokens": 48}
RANDOM_WEIGHTS: dict[str, Any] = {"load_format": "dummy", "seed": 5}
ENGINES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dtype": "float32"}, {"depth": 2}),
    ({"dtype": "bfloat16", **RANDOM_WEIGHTS}, {"num_threads": 2}),
    ({"dtype": "float32", "quantization": "int8"}, {"depth": 2, "num_threads": 2}),
    ({"dtype": "float32", "quantization": "int4", **RANDOM_WEIGHTS}, {"queue_policy": "fair"}),
    ({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, {"depth": 2, "queue_policy": "sjf"}),
    ({"dtype": "float32", **RANDOM_WEIGHTS}, {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}),
    ({"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "bfloat16"}, {"max_num_batched_tokens": 13}),
    ({"dtype": "bfloat16"}, {"depth": 2, "num_threads": 2, "queue_policy": "fcfs"}),
]
SUFFIXES, SMALLER = SpeculativeConfig(method=SUFFIX), SpeculativeConfig(method=DRAFT_MODEL, model=str(bundled_path(DRAFT)))
SPECULATING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dtype": "float32"}, {"speculative_config": SMALLER}),
    ({"dtype": "bfloat16"}, {"speculative_config": SUFFIXES, "num_threads": 2}),
    ({"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"}, {"speculative_config": SUFFIXES, "depth": 2}),
    (
        {"dtype": "bfloat16", **RANDOM_WEIGHTS},
        {"speculative_config": SMALLER, "depth": 2, "enable_chunked_prefill": False, "max_num_batched_tokens": 256},
    ),
]
RANKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dtype": "float32", "tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}),
    ({"dtype": "bfloat16"}, {"pipeline_parallel_size": 2}),
    ({"dtype": "bfloat16", "tensor_parallel_size": 2, **RANDOM_WEIGHTS}, {"depth": 2, "speculative_config": SUFFIXES}),
]
"""Stages give the same bits as one rank does, and tensor parallelism the same in any batch.

What is computed, by the solo runs and the crowd alike, and how the crowd is run beside CROWDED."""


@pytest.fixture(scope="module", autouse=True)
def vetted_here() -> Iterator[None]:
    with vetting_here():
        yield


def run_crowd(trials: Sequence[Trial], path: dict[str, Any], schedule: dict[str, Any]) -> tuple[Counter[str], list[str]]:
    """Counts of what happened, and the sequences that were answered otherwise than alone."""
    folder = bundled_path("headrace-tiny")
    assert folder is not None
    with RealEngine(folder, **{**SPACE, **path, **ALONE}) as alone:
        for trial in trials:
            alone.run(trial.request)
        solo = alone.answers()
    with RealEngine(folder, **{**SPACE, **path, **CROWDED, **schedule}) as engine:
        decide_at_random(engine.engine.scheduler, SEED)
        crowd = Crowd(engine, solo, random.Random(SEED))
        crowd.run(trials)
        differences = crowd.differences()
        assert not engine.refused
        crowd.counts["preemptions"] = engine.preemptions
        counters = engine.engine.snapshot().counters
        crowd.counts["drafted"], crowd.counts["accepted"] = counters.draft_tokens, counters.accepted_tokens
        crowd.counts["prefix hits"] = sum(cached > 0 for cached in engine.cached.values())
        return crowd.counts, differences


def test_a_few_random_requests_equal_their_solo_runs() -> None:
    trials, counts = draw_trials(44, SEED), Counter[str]()
    for number, (path, schedule) in enumerate((ENGINES[0], ENGINES[3])):
        counted, differences = run_crowd(trials[number::2], path, schedule)
        assert not differences
        counts += counted
    assert min(counts[name] for name in ("tools", "schema", "resumed", "aborted", "preemptions", "prefix hits", "n > 1")) >= 2, counts


def test_a_few_random_requests_with_drafts_equal_their_solo_runs_without() -> None:
    trials, counts = draw_trials(44, SEED + 1), Counter[str]()
    for number, (path, schedule) in enumerate(SPECULATING[:2]):
        counted, differences = run_crowd(trials[number::2], path, schedule)
        assert not differences
        counts += counted
    assert min(counts[name] for name in ("drafted", "accepted", "tools", "resumed", "aborted", "preemptions", "prefix hits")) >= 2, counts


def test_a_few_random_requests_on_several_ranks_equal_their_solo_runs() -> None:
    trials, counts = draw_trials(45, SEED + 2), Counter[str]()
    for number, (path, schedule) in enumerate(RANKS):
        counted, differences = run_crowd(trials[number::3], path, schedule)
        assert not differences
        counts += counted
    assert min(counts[name] for name in ("tools", "schema", "resumed", "aborted", "preemptions", "prefix hits", "n > 1")) >= 1, counts


@pytest.mark.slow
@pytest.mark.process
def test_a_thousand_random_requests_with_drafts_equal_their_solo_runs_without() -> None:
    _judge("random-requests-with-drafts", draw_trials(1000, SEED + 1), SPECULATING)


@pytest.mark.slow
@pytest.mark.process
def test_two_thousand_random_requests_equal_their_solo_runs() -> None:
    _judge("random-requests", draw_trials(2000, SEED), ENGINES)


def _judge(name: str, trials: Sequence[Trial], engines: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Written before it is judged: a result that fails shows what differed."""
    counts, differences = Counter[str](), list[str]()
    for number, (path, schedule) in enumerate(engines):
        counted, found = run_crowd(trials[number :: len(engines)], path, schedule)
        counts += counted
        differences += found
    values = {"seed": SEED, "counts": dict(sorted(counts.items())), "num_differences": len(differences), "differences": differences[:20]}
    shown = [{"computed": path, "crowd": {**CROWDED, **schedule, **_method(schedule)}} for path, schedule in engines]
    save_result(name, {**values, "engines": shown})
    assert not differences
    assert counts["requests"] == len(trials)


def _method(schedule: dict[str, Any]) -> dict[str, str]:
    return {"speculative_config": schedule["speculative_config"].method} if "speculative_config" in schedule else {}
