"""Tests configurations beside config.json: files of AutoGPTQ, AutoAWQ and ModelOpt give the model that config.json's section would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from float_formats_kit import ModelOpt
from quantized_kit import Awq, Gptq, Pair, Stored, load, logits, save_pair

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.folder import Checkpoint

pytestmark = pytest.mark.pure

GPTQ = {
    "bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": True, "static_groups": False, "sym": False, "true_sequential": True,
    "model_name_or_path": None, "model_file_base_name": "model",
}  # fmt: skip
AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]},
}
ORDERED = Gptq(desc_act=True)


def separate(folder: Path, stored: Stored, name: str, content: dict[str, Any]) -> Pair:
    """A pair whose config.json says nothing, with a file beside it."""
    pair = save_pair(folder, "Llama", stored)
    del pair.config["quantization_config"]
    pair.write()
    (pair.folder / name).write_text(json.dumps(content))
    return pair


@pytest.mark.parametrize(
    ("stored", "name", "content", "method"),
    [
        (ORDERED, "quantize_config.json", GPTQ, "gptq"),
        (ORDERED, "quantize_config.json", {**GPTQ, "quant_method": "gptq", "checkpoint_format": "gptq"}, "gptq"),
        (Awq(), "quant_config.json", AWQ, "awq"),
        (Awq(), "quantize_config.json", AWQ, "awq"),
        (ModelOpt(), "hf_quant_config.json", MODELOPT, "modelopt"),
    ],
)
def test_the_logits_are_those_of_the_plain_weights(stored: Stored, name: str, content: dict[str, Any], method: str, tmp_path: Path) -> None:
    pair = separate(tmp_path, stored, name, content)
    loaded = load(pair.folder, quantization=method)
    assert loaded.stored_as.startswith(method)
    assert torch.equal(logits(loaded), logits(load(pair.plain)))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("quantize_config.json", {**GPTQ, "bits": 5}, "quantize_config.json: bits = 5: only 2, 3, 4, 8 are supported"),
        ("quantize_config.json", {}, "quantize_config.json: bits: is missing"),
        ("quantize_config.json", {**GPTQ, "quant_method": "hqq"}, 'quantize_config.json: quant_method = "hqq": checkpoints of this'),
        ("quant_config.json", {**AWQ, "w_bit": 8}, "quant_config.json: w_bit = 8: only 4 is supported"),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "W4A8_AWQ"}},
            'hf_quant_config.json: quantization.quant_algo = "W4A8_AWQ"',
        ),
        ("hf_quant_config.json", {"quantization": []}, "hf_quant_config.json: quantization = []: must be an object"),
    ],
)
def test_errors_name_the_file(name: str, content: dict[str, Any], reason: str, tmp_path: Path) -> None:
    pair = separate(tmp_path, ORDERED, name, content)
    with pytest.raises(CheckpointError) as caught:
        load(pair.folder)
    assert reason in str(caught.value)


def test_what_config_json_says_counts_first(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", ORDERED)
    (pair.folder / "quant_config.json").write_text("not read")
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


def test_the_file_is_part_of_the_models_digest(tmp_path: Path) -> None:
    """It decides what the weights are: packed ones of an earlier start would otherwise be used after it has changed."""
    pair = separate(tmp_path, ORDERED, "quantize_config.json", GPTQ)
    first = Checkpoint(pair.folder).digest()
    (pair.folder / "quantize_config.json").write_text(json.dumps({**GPTQ, "checkpoint_format": "gptq_v2"}))
    assert Checkpoint(pair.folder).digest() != first
