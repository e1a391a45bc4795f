"""Tests contexts that rotary scaling adds to a model, against transformers, up to their last position and in both spellings of
config.json.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.tensor.backends import load_backend
from headrace.tensor.device import CPU
from headrace.tensor.models import load_model

pytestmark = pytest.mark.pure

TINY = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
TRAINED, CONTEXT = 32, 128
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.5, 3.0, 7.5]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
TOKENS = random.Random(5).choices(range(97), k=CONTEXT)

SCALED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen2-yarn": ("Qwen2", TRAINED, YARN),
    "qwen3-yarn": ("Qwen3", 40, YARN),
    "mistral-yarn-that-is-counted": ("Mistral", CONTEXT, YARN),
    "llama-linear": ("Llama", TRAINED, {"rope_type": "linear", "factor": 4.0}),
    "llama-longrope": ("Llama", CONTEXT, {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": TRAINED}),
    "phi3-longrope": ("Phi3", CONTEXT, {"rope_type": "longrope", **FACTORS}),
    "phi3-longrope-attention-factor": ("Phi3", CONTEXT, {"rope_type": "longrope", **FACTORS, "attention_factor": 1.3}),
    "phi4-mini": (
        "Phi3",
        CONTEXT,
        {"rope_type": "longrope", **{name: each[:3] for name, each in FACTORS.items()}, "partial_rotary_factor": 0.75},
    ),
}
"""Family, max_position_embeddings, scaling."""


@pytest.fixture(scope="module", params=SCALED)
def scaled(request: pytest.FixtureRequest, make_oracle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    family, max_positions, scaling = SCALED[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    fields = {**TINY, "max_position_embeddings": max_positions, "rope_parameters": {**scaling, "rope_theta": 500.0}}
    fields |= {"Phi3": {"original_max_position_embeddings": TRAINED}, "Qwen3": {"head_dim": 8}}.get(family, {})
    fields |= {"tie_word_embeddings": request.param == "phi4-mini"}
    return make_oracle(family, folder, **fields), folder


def ours(folder: Path, paged_run: Callable[..., Any], tokens: list[int], max_model_len: int | None = None) -> torch.Tensor:
    loaded = load_model(
        folder, backend=load_backend("reference"), dtype=None, device=CPU, load_format="auto", seed=0, max_model_len=max_model_len
    )
    assert loaded.max_model_len == (max_model_len or (TRAINED if has_longrope(folder) else CONTEXT))
    run = paged_run(loaded.model)
    run.add(tokens)
    run.finish(chunk=64)
    logits: torch.Tensor = run.logits(0)
    return logits


def has_longrope(folder: Path) -> bool:
    return '"long_factor"' in (folder / "config.json").read_text()


def with_older_spelling(folder: Path) -> None:
    """As model cards write it."""
    config = json.loads((folder / "config.json").read_text())
    params = config.pop("rope_parameters")
    config |= {"rope_theta": params.pop("rope_theta"), "rope_scaling": {"type": params.pop("rope_type"), **params}}
    (folder / "config.json").write_text(json.dumps(config))


def test_every_position_of_the_scaled_context(
    scaled: tuple[Any, Path], paged_run: Callable[..., Any], assert_close: Callable[..., None]
) -> None:
    oracle, folder = scaled
    length = CONTEXT if has_longrope(folder) else None
    logits = ours(folder, paged_run, TOKENS, length)
    assert_close(logits, oracle.logits(TOKENS))
    with_older_spelling(folder)
    assert torch.equal(ours(folder, paged_run, TOKENS, length), logits)


@pytest.mark.parametrize("name", [name for name, (_, _, scaling) in SCALED.items() if "long_factor" in scaling])
def test_longrope_within_the_first_training_s_context_is_what_it_was_trained_as(
    name: str, make_oracle: Callable[..., Any], paged_run: Callable[..., Any], assert_close: Callable[..., None], tmp_path: Path
) -> None:
    """transformers, as the authors' code, takes the short factors for a short sequence: so does an engine, unless it is asked for more."""
    family, max_positions, scaling = SCALED[name]
    own = {"original_max_position_embeddings": TRAINED} if family == "Phi3" else {}
    oracle = make_oracle(family, tmp_path, **TINY, max_position_embeddings=max_positions, rope_parameters={**scaling, "rope_theta": 500.0},
                         **own)  # fmt: skip
    short = TOKENS[:TRAINED]
    reference = oracle.logits(short)
    assert_close(ours(tmp_path, paged_run, short), reference)
    assert not torch.allclose(ours(tmp_path, paged_run, short, max_model_len=TRAINED + 1), reference, rtol=1e-2)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_phi_3_s_older_names_of_longrope(name: str, make_oracle: Callable[..., Any], paged_run: Callable[..., Any], tmp_path: Path) -> None:
    _, max_positions, scaling = SCALED["phi3-longrope"]
    make_oracle("Phi3", tmp_path, **TINY, max_position_embeddings=max_positions, original_max_position_embeddings=TRAINED,
                rope_parameters={**scaling, "rope_theta": 500.0})  # fmt: skip
    logits = ours(tmp_path, paged_run, TOKENS, CONTEXT)
    with_older_spelling(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"longrope"', json.dumps(name)))
    assert torch.equal(ours(tmp_path, paged_run, TOKENS, CONTEXT), logits)
