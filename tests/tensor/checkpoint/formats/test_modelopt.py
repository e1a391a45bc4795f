"""Tests ModelOpt's checkpoints: the model is that of the weights that the stored parts stand for, and what does not fit is
refused by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from float_formats_kit import ModelOpt
from quantized_kit import ARCHITECTURES, LINEAR, Pair, load, logits, save_pair

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.checkpoint.formats import table
from headrace.tensor.checkpoint.formats.modelopt import read_format
from headrace.tensor.checkpoint.formats.table import QuantizedSource

pytestmark = pytest.mark.pure

NVFP4, FP8 = ModelOpt(), ModelOpt("FP8")
STORED = [NVFP4, FP8, ModelOpt("FP8_PER_CHANNEL_PER_TOKEN", (1, 0)), ModelOpt(is_nested=True)]
ATTENTION = LINEAR.replace("mlp.down_proj", "self_attn")


def refusal(pair: Pair) -> str:
    """The error of what the pair's tensors and config.json are now."""
    pair.write()
    with pytest.raises(CheckpointError) as caught:
        load(pair.folder)
    return str(caught.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_the_logits_are_those_of_the_same_weights_stored_plainly(architecture: str, stored: ModelOpt, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, architecture, stored)
    for name in ("modelopt", "modelopt_fp4", "none"):
        loaded = load(pair.folder, quantization=name)
        assert loaded.stored_as == f"modelopt, {stored.algorithm}, its rounding of activations unused"
    assert torch.equal(logits(loaded), logits(load(pair.plain)))


@pytest.mark.parametrize("stored", [NVFP4, FP8], ids=str)
def test_any_region_is_that_of_the_weight(stored: ModelOpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks and fused parts read it; made dense a few rows at a time."""
    pair = save_pair(tmp_path, "Llama", stored)
    weight, draw = pair.dense[f"{LINEAR}.weight"], random.Random(0)
    source = QuantizedSource(Checkpoint(pair.folder), read_format(ConfigFile("config.json", pair.section)))
    monkeypatch.setattr(table, "SLAB_ELEMENTS", 11 * weight.shape[1])
    for _ in range(20):
        region = tuple(slice(*sorted(draw.sample(range(size + 1), 2))) for size in weight.shape)[: draw.randint(0, 2)]
        assert torch.equal(source.read(f"{LINEAR}.weight", tuple(weight.shape), region), weight[region])


def test_excluded_linears_and_scales_of_keys_and_values(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Qwen2", ModelOpt(is_nested=True), head=True, plain=(LINEAR, f"{ATTENTION}.k_proj"))
    for part in ("k_proj.k_scale", "v_proj.v_scale", "k_scale", "v_scale"):
        pair.tensors[f"{ATTENTION}.{part}"] = torch.tensor(0.25)
    pair.section["quant_method"] = "modelopt_fp4"
    pair.write()
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


def spoil(name: str, place: tuple[int, ...], value: float) -> Callable[[Pair], None]:
    """An element of a part of LINEAR, bytes as they are."""

    def change(pair: Pair) -> None:
        tensor = pair.tensors[f"{LINEAR}.{name}"]
        (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor)[place] = value

    return change


def drop(name: str) -> Callable[[Pair], None]:
    def change(pair: Pair) -> None:
        del pair.tensors[f"{LINEAR}.{name}"]

    return change


def cut(name: str) -> Callable[[Pair], None]:
    def change(pair: Pair) -> None:
        pair.tensors[f"{LINEAR}.{name}"] = pair.tensors[f"{LINEAR}.{name}"][:, 1:].contiguous()

    return change


def balance(pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.pre_quant_scale"] = torch.ones(160)


def widen(pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.weight_scale_2"] = torch.ones(2)


@pytest.mark.parametrize(
    ("stored", "change", "reason"),
    [
        (NVFP4, drop("weight"), f"tensor {LINEAR}.weight is missing"),
        (NVFP4, drop("weight_scale"), f"tensor {LINEAR}.weight_scale is missing"),
        (NVFP4, drop("weight_scale_2"), f"tensor {LINEAR}.weight_scale_2 is missing"),
        (NVFP4, cut("weight"), f"tensor {LINEAR}.weight has shape [128, 79], config.json makes it [128, 80]"),
        (NVFP4, cut("weight_scale"), f"tensor {LINEAR}.weight_scale has shape [128, 9], config.json makes it [128, 10]"),
        (NVFP4, widen, f"tensor {LINEAR}.weight_scale_2 has shape [2], config.json makes it [1]"),
        (NVFP4, spoil("weight_scale", (5, 1), 0x7F), f"{LINEAR}.weight_scale: 1 scales are NaN"),
        (NVFP4, spoil("weight_scale", (5, 1), 0xFF), f"{LINEAR}.weight_scale: 1 scales are NaN"),
        (NVFP4, spoil("weight_scale_2", (), float("inf")), f"tensor {LINEAR}.weight_scale_2 holds 1 values that are NaN or infinite"),
        (NVFP4, balance, f'1 tensors this architecture does not have, e.g. "{LINEAR}.pre_quant_scale"'),
        (FP8, drop("weight_scale"), f"tensor {LINEAR}.weight_scale is missing"),
        (FP8, spoil("weight", (5, 6), 0x7F), f"weight {LINEAR}.weight holds values that are NaN or infinite"),
        (FP8, spoil("weight_scale", (), float("nan")), f"tensor {LINEAR}.weight_scale holds 1 values that are NaN or infinite"),
    ],
)
def test_a_bad_file_is_refused(stored: ModelOpt, change: Callable[[Pair], None], reason: str, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", stored)
    change(pair)
    assert reason in refusal(pair)


@pytest.mark.parametrize(
    ("algorithm", "stored", "reason"),
    [
        ("NVFP4_AWQ", NVFP4, 'quant_algo = "NVFP4_AWQ": only NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN are supported'),
        ("MIXED_PRECISION", NVFP4, 'quant_algo = "MIXED_PRECISION": only'),
        (None, NVFP4, "quant_algo = null: is missing"),
        ("FP8", NVFP4, "q_proj.weight has shape [128, 64], config.json makes it [128, 128]"),
        ("NVFP4", FP8, "q_proj.weight has shape [128, 128], config.json makes it [128, 64]"),
    ],
)
def test_an_algorithm_that_is_refused(algorithm: str | None, stored: ModelOpt, reason: str, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", stored)
    pair.section["quant_algo"] = algorithm
    assert reason in refusal(pair)


def test_groups_of_another_size_are_refused(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", ModelOpt(is_nested=True))
    pair.section["quantization"]["group_size"] = 32
    assert "quantization_config.quantization.group_size = 32: NVFP4 has groups of 16" in refusal(pair)
