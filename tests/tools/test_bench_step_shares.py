"""Tests what a step's parts are said to take: arithmetic over known times, and a model whose steps are taken apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.step_shares import Watched, shares, watch
from headrace import LLM, SamplingParams
from headrace.core.errors import ConfigError
from headrace.fleet.weights import resolve_model
from headrace.tensor.kernels.cpu.jit.launch import kernel_names

pytestmark = pytest.mark.pure

NAMES = {1: "linear._multiply_f32", 2: "quantized._multiply_bytes", 3: "elementwise._norm_f32"}


def test_products_of_a_step_come_from_steps_taken_apart_and_its_time_from_those_between() -> None:
    """Parts that sum to more than their list give no larger share; gaps after a step that was taken apart hold no parts."""
    apart = [{1: 0.06, 2: 0.03, 3: 0.01}, {1: 0.6, 2: 0.3, 3: 0.1}, {1: 0.08, 2: 0.01, 3: 0.03}]
    seen = Watched(
        lists=[0.08, 0.07, 0.9, 0.09, 0.1],
        left=[1.0, 1.1, 5.0, 5.12, 9.0],
        parts=[apart[0], {}, apart[1], {}, apart[2]],
        heads=[0.01, 0.02, 0.01, 0.01],
    )
    found = shares(seen, NAMES)
    assert found.period_s == pytest.approx(0.11)
    assert found.list_s == pytest.approx(0.08)
    assert found.head_s == 0.01
    assert found.products_of_parts == pytest.approx(0.9)
    assert found.parts_of_list == pytest.approx(1.2)
    assert found.parts_s == {NAMES[1]: 0.08, NAMES[2]: 0.03, NAMES[3]: 0.03}
    assert found.share == pytest.approx((0.9 * 0.08 + 0.01) / 0.11)


def test_too_few_recorded_steps_are_refused() -> None:
    for parts in ([], [{1: 0.1}]):
        with pytest.raises(ConfigError, match="not recorded"):
            shares(Watched(lists=[0.1] * len(parts), left=[1.0] * len(parts), parts=parts), NAMES)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Of integers, whose steps are recorded on every CPU; where oneDNN multiplies, they are not."""
    folder = str(resolve_model("headrace-tiny"))
    with LLM(folder, quantization="int8", kv_cache_dtype="bfloat16", enable_prefix_caching=False) as made:
        yield made


def test_every_other_step_of_a_model_is_taken_apart_and_it_answers_as_before_afterwards(llm: LLM) -> None:
    def answer() -> list[int]:
        greedy = SamplingParams(temperature=0.0, max_tokens=8)
        return list(llm.generate([{"prompt_token_ids": [300, 301]}], greedy, use_tqdm=False)[0].outputs[0].token_ids)

    before = answer()
    watch(llm, 2, 5, seed=0)  # the first step of a shape is being recorded, and so not seen
    seen = watch(llm, 2, 5, seed=1)
    assert len(seen.lists) == len(seen.left) == len(seen.parts) == len(seen.heads) == 5
    assert [bool(parts) for parts in seen.parts] == [True, False, True, False, True]
    assert seen.left == sorted(seen.left)
    assert {"quantized", "paged", "elementwise", "cache_write"} <= {kernel_names()[kernel].partition(".")[0] for kernel in seen.parts[0]}
    assert answer() == before
