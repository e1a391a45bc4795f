"""What a step's parts are said to take: arithmetic over known times, and a model whose steps are recorded."""

from __future__ import annotations

import pytest

from bench.step_shares import Watched, measure, shares
from headrace import LLM, SamplingParams
from headrace.core.errors import ConfigError
from headrace.fleet.weights import resolve_model


def test_products_of_the_list_are_scaled_to_the_steps_as_they_are() -> None:
    whole = Watched(ends=[1.0, 1.1, 1.2, 1.3], lists=[0.08] * 4, heads=[0.01] * 4)
    parts = [
        {"linear._multiply_f32": 0.10, "quantized._multiply_bytes": 0.05, "elementwise._norm": 0.5},
        {"linear._multiply_f32": 0.12, "quantized._multiply_bytes": 0.06, "elementwise._norm": 0.5},
    ]
    found = shares(whole, Watched(lists=[0.2, 0.24], parts=parts))
    assert found.period_s == pytest.approx(0.1)
    assert found.products_of_list == pytest.approx(0.75)
    assert found.share == pytest.approx((0.75 * 0.08 + 0.01) / 0.1)
    assert found.parts_s["elementwise._norm"] == 0.5


def test_steps_that_were_not_recorded_are_refused() -> None:
    with pytest.raises(ConfigError, match="not recorded"):
        shares(Watched(ends=[1.0]), Watched())


def test_a_models_kernels_are_told_apart_and_it_answers_as_before_afterwards() -> None:
    llm = LLM(str(resolve_model("headrace-tiny")), kv_cache_dtype="bfloat16", enable_prefix_caching=False)

    def answer() -> list[int]:
        greedy = SamplingParams(temperature=0.0, max_tokens=8)
        return list(llm.generate([{"prompt_token_ids": [300, 301]}], greedy, use_tqdm=False)[0].outputs[0].token_ids)

    before = answer()
    found = measure(llm, 1, 6)["found"]
    assert isinstance(found, list)
    for each in found:
        names = {name.partition(".")[0] for name in each["parts_s"]}
        assert {"linear", "attention", "elementwise"} <= names
        assert each["share"] > 0
        assert each["products_of_list"] > 0
    assert answer() == before
