"""Tests what transformers and the hub's older exporters write: shards, half precision, older spellings of config.json."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.tensor.backends import load_backend
from headrace.tensor.device import CPU
from headrace.tensor.models import load_model

pytestmark = pytest.mark.pure

TINY = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
TOKENS = random.Random(3).choices(range(97), k=40)

OLDER: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama-linear": ("Llama", {}, {"rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama-llama3": ("Llama", {}, {"rope_theta": 900.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
    "qwen2-yarn": ("Qwen2", {}, {"rope_theta": 900.0, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    "qwen2-upper-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, {"layer_types": None}),
    "llama-no-theta": ("Llama", {"num_key_value_heads": 6}, {"num_key_value_heads": None, "head_dim": None}),
    "mixtral-no-theta": ("Mixtral", {"num_local_experts": 2}, {}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 6}, {
        "rope_theta": 5e5, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2, "layer_types": None}),
    "phi3": ("Phi3", {"hidden_size": 96}, {"rope_theta": 500.0, "partial_rotary_factor": 0.75, "rope_scaling": None}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, {
        "num_local_experts": None, "num_experts": 3, "rope_theta": 800.0, "max_window_layers": 3}),
}  # fmt: skip


def ours(folder: Path, paged_run: Callable[..., Any], **options: Any) -> torch.Tensor:
    given: dict[str, Any] = {"dtype": None, "device": CPU, "load_format": "auto", "seed": 0, "max_model_len": None, **options}
    loaded = load_model(folder, backend=load_backend("reference"), **given)
    run = paged_run(loaded.model, dtype=loaded.dtype)
    run.add(TOKENS)
    run.finish(chunk=16)
    logits: torch.Tensor = run.logits(0)
    return logits


@pytest.mark.socket
@pytest.mark.parametrize("name", OLDER)
def test_older_spellings_mean_what_transformers_reads_into_them(
    name: str, make_oracle: Callable[..., Any], paged_run: Callable[..., Any], assert_close: Callable[..., None], tmp_path: Path
) -> None:
    family, fields, older = OLDER[name]
    make_oracle(family, tmp_path, **{**TINY, **fields})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    config = {field: value for field, value in {**config, **older}.items() if value is not None}
    file.write_text(json.dumps(config))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        reference = oracle(torch.tensor([TOKENS])).logits[0]
    assert_close(ours(tmp_path, paged_run), reference)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 300.0}, "full_attention": {"rope_type": "default", "rope_theta": 5e5}}


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_scaling_added_to_a_saved_folder_is_what_it_is_when_saved_with_it(
    family: str, make_oracle: Callable[..., Any], paged_run: Callable[..., Any], assert_close: Callable[..., None], tmp_path: Path
) -> None:
    """transformers itself takes its class's theta for the folder's here, so that the reference is the folder that it saves with YaRN."""
    oracle = make_oracle(family, tmp_path, **TINY, rope_parameters={**YARN, "rope_theta": 900.0})
    file = tmp_path / "config.json"
    added = {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0}, "rope_scaling": YARN}
    file.write_text(json.dumps(json.loads(file.read_text()) | added))
    assert_close(ours(tmp_path, paged_run), oracle.logits(TOKENS))


@pytest.mark.parametrize("mscales", [{}, {"mscale": 1.0, "mscale_all_dim": 0.5}], ids=["plain", "mscales"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_yarns_attn_factor_multiplies_its_magnitude(
    family: str,
    mscales: dict[str, float],
    make_oracle: Callable[..., Any],
    paged_run: Callable[..., Any],
    assert_close: Callable[..., None],
    tmp_path: Path,
) -> None:
    """As vLLM and llama.cpp read it; transformers has the product as `attention_factor`."""
    scale = 0.1 * math.log(4) + 1
    magnitude = 0.878 * (scale / (0.05 * math.log(4) + 1) if mscales else scale)
    stated = {**YARN, "rope_theta": 900.0, "attention_factor": magnitude}
    oracle = make_oracle(family, tmp_path, **{**TINY, "max_position_embeddings": 16}, rope_parameters=stated)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    for params in ({**YARN, **mscales}, {**stated, **mscales}):
        file.write_text(json.dumps({**saved, "rope_parameters": {**params, "rope_theta": 900.0, "attn_factor": 0.878}}))
        assert_close(ours(tmp_path, paged_run), oracle.logits(TOKENS))


@pytest.mark.socket
@pytest.mark.parametrize("names", ["without the head", "the head alone", "both"])
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Mixtral"])
def test_a_tied_model_may_be_saved_by_fewer_names(
    family: str,
    names: str,
    make_oracle: Callable[..., Any],
    paged_run: Callable[..., Any],
    assert_close: Callable[..., None],
    tmp_path: Path,
) -> None:
    fields = {"Mixtral": {"num_local_experts": 2}, "Gemma3": {"head_dim": 16}}.get(family, {})
    make_oracle(family, tmp_path, **{**TINY, **fields, "tie_word_embeddings": True})
    tensors = load_file(tmp_path / "model.safetensors")
    if names != "without the head":
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    if names != "the head alone":
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        reference = oracle(torch.tensor([TOKENS])).logits[0]
    assert_close(ours(tmp_path, paged_run), reference)


@pytest.mark.socket
def test_gemma_3_takes_a_scaling_into_its_global_layers_as_transformers_does(
    make_oracle: Callable[..., Any], paged_run: Callable[..., Any], assert_close: Callable[..., None], tmp_path: Path
) -> None:
    make_oracle("Gemma3", tmp_path, **{**TINY, "max_position_embeddings": 16}, head_dim=16, sliding_window=6, rope_parameters=ROPES,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"])  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_scaling": YARN}))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        reference = oracle(torch.tensor([TOKENS])).logits[0]
    assert_close(ours(tmp_path, paged_run), reference)


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_shards_transformers_writes(
    family: str, make_oracle: Callable[..., Any], paged_run: Callable[..., Any], assert_close: Callable[..., None], tmp_path: Path
) -> None:
    fields = {"num_local_experts": 3} if family == "Mixtral" else {}
    oracle = make_oracle(family, tmp_path, save={"max_shard_size": "20KB"}, **TINY, **fields)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_close(ours(tmp_path, paged_run), oracle.logits(TOKENS))


@pytest.mark.parametrize(("family", "fields"), [("Llama", {}), ("Gemma3", {"head_dim": 16}), ("Mixtral", {"num_local_experts": 3})])
def test_bfloat16_stays_close_to_float32(
    family: str, fields: dict[str, Any], make_oracle: Callable[..., Any], paged_run: Callable[..., Any], tmp_path: Path
) -> None:
    """The same weights rounded to bfloat16 (8 bits of mantissa): logits within a few percent, the probable tokens the same."""
    oracle = make_oracle(family, tmp_path, **{**TINY, **fields})
    reference, rounded = oracle.logits(TOKENS), ours(tmp_path, paged_run, dtype=torch.bfloat16)
    assert rounded.dtype == torch.float32
    error = (rounded - reference).norm(dim=-1) / reference.norm(dim=-1)
    assert error.median() < 0.05
