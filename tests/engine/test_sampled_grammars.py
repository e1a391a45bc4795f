"""Tests outputs drawn from random weights, so that nothing is valid by luck: they come to their end, and then they match.

The samples (`tests/support/grammar_samples.py`) are bounded, and each brings a check of its own. The slow test writes
sampled-grammars.json (`save_result`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from grammar_kit import vetting_here
from grammar_samples import Sample, larks, regexes, schemas
from real_engine import RealEngine
from results import save_result

from headrace.bundled import bundled_path
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason
from headrace.text.tokenizer import Tokenizer

pytestmark = pytest.mark.socket

MAX_TOKENS = 800
AT_ONCE = 64
"""Samples whose grammars are in use together: an engine holds about 120 different ones (docs/structured.md)."""
RANDOM: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": MAX_TOKENS + 8,
    "block_size": 16,
    "num_kv_blocks": 2400,
    "max_num_seqs": 32,
}


@pytest.fixture(scope="module", autouse=True)
def vetted_here() -> Iterator[None]:
    with vetting_here():
        yield


def outcome(samples: Iterable[Sample]) -> Counter[str]:
    """How many outputs ended in which way; "invalid": ended by themselves, and fail their sample's check."""
    folder = bundled_path("headrace-tiny")
    assert folder is not None
    tokenizer, by_name, counted = Tokenizer.load(folder), {f"s{number}": sample for number, sample in enumerate(samples)}, Counter[str]()
    with RealEngine(folder, **RANDOM) as engine:
        for number, (name, sample) in enumerate(by_name.items()):
            params = SamplingParams(seed=number, max_tokens=MAX_TOKENS)
            engine.submit(EngineRequest(request_id=RequestId(name), prompt_ids=(5,), params=params, grammar=sample.grammar))
            if number % AT_ONCE == AT_ONCE - 1:
                engine.run()
        engine.run()
        for name, sample in by_name.items():
            if name in engine.refused:
                counted["refused"] += 1
                continue
            finish = engine.finish[name, 0]
            counted[finish.value] += 1
            if finish is FinishReason.STOP:
                text = tokenizer.join(engine.answer(name)[:-1]).decode()
                counted["invalid"] += not sample.is_valid(text)
    return counted


@pytest.mark.parametrize(("kind", "count"), [(schemas, 24), (regexes, 16), (larks, 12)])
def test_a_few_samples_come_to_their_end_and_match(kind: Any, count: int) -> None:
    counted = outcome(kind(count, seed=11))
    assert not counted["invalid"]
    assert counted["stop"] >= 0.9 * count


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nearly_all_samples_come_to_their_end_and_all_of_these_match() -> None:
    counts = {"schemas": 500, "regexes": 200, "larks": 50}
    found = {name: outcome(make(counts[name], seed=1)) for name, make in (("schemas", schemas), ("regexes", regexes), ("larks", larks))}
    save_result("sampled-grammars", {"max_tokens": MAX_TOKENS, **{name: dict(counted) for name, counted in found.items()}})
    for name, counted in found.items():
        assert not counted["invalid"], name
        assert counted["stop"] >= 0.95 * counts[name], (name, counted)
