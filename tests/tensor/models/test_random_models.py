"""Tests configurations that are drawn at random against transformers, on the same random weights in float32: forty fixed ones, and 500 by
`make test-slow`. What every path of a sequence computes is tested in test_oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from random_models import FAMILIES, ROPES, VOCAB, draw, quantize_folder, spell_as_model_cards_do
from safetensors.torch import load_file, save_file

from headrace.tensor.backends import load_backend
from headrace.tensor.device import CPU
from headrace.tensor.models import load_model

pytestmark = pytest.mark.pure

FIXED, PARTS, PART = 40, 10, 50


class Compared:
    """Draws a model, saves it by transformers, loads it, and compares the logits of one sequence."""

    def __init__(self, make_oracle: Callable[..., Any], paged_run: Callable[..., Any], assert_close: Callable[..., None]) -> None:
        self.make_oracle, self.paged_run, self.assert_close = make_oracle, paged_run, assert_close

    def check(self, seed: int, folder: Path) -> None:
        drawn = draw(seed)
        oracle = self.make_oracle(drawn.family, folder, seed=seed, **drawn.fields)
        if drawn.stored is not None:
            plain = load_file(folder / "model.safetensors")
            twin = folder / "twin"
            oracle.model.save_pretrained(twin)
            save_file(plain | quantize_folder(folder, drawn.stored), twin / "model.safetensors", {"format": "pt"})
            oracle.model = transformers.AutoModelForCausalLM.from_pretrained(twin, attn_implementation="eager").float().eval()
        if drawn.is_older:
            spell_as_model_cards_do(folder)
        options: dict[str, Any] = {"dtype": None, "device": CPU, "load_format": "auto", "seed": 0, "max_model_len": drawn.max_model_len}
        loaded = load_model(folder, backend=load_backend("reference"), **options)
        run = self.paged_run(loaded.model, seed=seed)
        run.add(drawn.tokens)
        run.finish(drawn.chunk)
        self.assert_close(run.logits(0), oracle.logits(drawn.tokens))


@pytest.fixture
def compared(make_oracle: Callable[..., Any], paged_run: Callable[..., Any], assert_close: Callable[..., None]) -> Compared:
    return Compared(make_oracle, paged_run, assert_close)


@pytest.mark.parametrize("seed", range(FIXED))
def test_a_drawn_model_is_what_transformers_computes(seed: int, compared: Compared, tmp_path: Path) -> None:
    compared.check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_five_hundred_drawn_models(part: int, compared: Compared, tmp_path: Path) -> None:
    failed: dict[str, str] = {}
    for seed in range(FIXED + part * PART, FIXED + (part + 1) * PART):
        try:
            compared.check(seed, tmp_path / str(seed))
        except Exception as error:
            failed[f"{seed}: {draw(seed)}"] = f"{type(error).__name__}: {error}"
    assert not failed, "\n".join(f"{name}\n    {error}" for name, error in failed.items())


def test_forty_draws_reach_every_family_rope_and_form() -> None:
    draws = [draw(seed) for seed in range(FIXED)]
    assert Counter(drawn.family for drawn in draws) == dict.fromkeys(FAMILIES, FIXED // len(FAMILIES))
    assert {drawn.rope for drawn in draws} == set(ROPES)
    assert len({str(drawn.stored) for drawn in draws}) > 8
    for field in ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "sliding_window", "layer_types"):
        assert any(drawn.fields.get(field) for drawn in draws), field
    assert {drawn.is_older for drawn in draws} == {False, True}
    assert all(max(drawn.tokens) < VOCAB for drawn in draws)
