"""Tests AWQ checkpoints: the model is that of the weights that the stored parts stand for, and what does not fit is refused by name."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
import torch
from quantized_kit import ARCHITECTURES, LINEAR, Awq, Pair, load, logits, save_pair

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.checkpoint.formats import table
from headrace.tensor.checkpoint.formats.awq import read_format
from headrace.tensor.checkpoint.formats.table import QuantizedSource

pytestmark = pytest.mark.pure

FFN = 256
"""Divides into every group."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("made"), "Llama", Awq(), ffn=FFN)


@pytest.fixture
def pair(made: Pair, tmp_path: Path) -> Pair:
    return made.copied(tmp_path / "quantized")


def refusal(pair: Pair) -> str:
    """The error of what the pair's tensors and config.json are now."""
    pair.write()
    with pytest.raises(CheckpointError) as caught:
        load(pair.folder)
    return str(caught.value)


@pytest.mark.parametrize(("architecture", "group"), list(product(ARCHITECTURES, [32, 64, 128, -1])))
def test_the_logits_are_those_of_the_same_weights_stored_plainly(architecture: str, group: int, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, architecture, Awq(group), ffn=FFN)
    loaded = load(pair.folder)
    assert loaded.stored_as == "awq, 4 bits" + (f" in groups of {group}" if group > 0 else "")
    assert torch.equal(logits(loaded), logits(load(pair.plain)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_stored", [True, False])
def test_weights_without_zero_points_have_the_middle_of_the_range(architecture: str, is_stored: bool, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, architecture, Awq(symmetric=True), ffn=FFN)
    pair.section["sym"] = True
    pair.tensors = {name: tensor for name, tensor in pair.tensors.items() if is_stored or not name.endswith("qzeros")}
    pair.write()
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


def test_zero_points_that_the_configuration_denies_are_refused(pair: Pair) -> None:
    """With the word that says what is meant."""
    expected = logits(load(pair.folder))
    pair.section["zero_point"] = False
    assert "q_proj.qzeros: its zero points are not the middle of the range, though config.json has zero_point = false" in refusal(pair)
    pair.tensors = {name: torch.zeros_like(tensor) if name.endswith("qzeros") else tensor for name, tensor in pair.tensors.items()}
    assert 'Write "zero_point": true into quantization_config if they are meant' in refusal(pair)
    pair = pair.copied(pair.folder.with_name("again"))
    pair.section["zero_point"] = True
    pair.write()
    assert not torch.equal(logits(load(pair.folder)), expected)


@pytest.mark.parametrize("group", [32, -1])
def test_any_region_is_that_of_the_weight(group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks and fused parts read it; made dense a few rows at a time, which begin and end within words."""
    pair = save_pair(tmp_path, "Llama", Awq(group), ffn=FFN)
    weight, draw = pair.dense[f"{LINEAR}.weight"], random.Random(group)
    source = QuantizedSource(Checkpoint(pair.folder), read_format(ConfigFile("config.json", pair.section)))
    monkeypatch.setattr(table, "SLAB_ELEMENTS", 11 * weight.shape[1])
    for _ in range(20):
        region = tuple(slice(*sorted(draw.sample(range(size + 1), 2))) for size in weight.shape)[: draw.randint(0, 2)]
        assert torch.equal(source.read(f"{LINEAR}.weight", tuple(weight.shape), region), weight[region])


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_weights_are_rounded_further_on_demand(precision: str, pair: Pair) -> None:
    rounded = logits(load(pair.folder, quantization=precision))
    assert torch.equal(rounded, logits(load(pair.plain, quantization=precision)))
    assert not torch.equal(rounded, logits(load(pair.folder, quantization="awq")))


def test_the_words_of_other_exporters(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Awq(64), ffn=FFN, head=True, plain=(LINEAR,))
    expected = logits(load(pair.plain))
    for section in (
        {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM", "modules_to_not_convert": ["down_proj"]},
        {"bits": 4, "group_size": 64, "checkpoint_format": "gemm", "sym": False, "desc_act": False, "lm_head": True},
        {"bits": 4, "group_size": 64, "backend": "autoawq"},
    ):
        pair.config["quantization_config"] = {"quant_method": "awq", **section}
        pair.write()
        assert torch.equal(logits(load(pair.folder)), expected)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("bits", 8, "bits = 8: only 4 is supported"),
        ("bits", None, "bits = null: is missing"),
        ("bits", 0, "bits = 0: must be an integer from 1 to 16"),
        ("group_size", 0, "group_size = 0: must be -1, for one group, or positive"),
        ("group_size", -128, "group_size = -128: must be an integer from -1 to 1048576"),
        ("group_size", 10**12, "group_size = 1000000000000: must be an integer"),
        ("group_size", None, "group_size = null: is missing"),
        ("version", "gemv", 'version = "gemv": only gemm is supported'),
        ("version", "gemv_fast", 'version = "gemv_fast": only gemm is supported'),
        ("version", "marlin", 'version = "marlin": only gemm is supported'),
        ("zero_point", "no", 'zero_point = "no": must be true or false'),
        ("backend", "llm-awq", 'backend = "llm-awq": only autoawq\'s layout is supported'),
    ],
)
def test_a_field_that_is_refused(field: str, value: object, reason: str, pair: Pair) -> None:
    pair.section[field] = value
    assert f"config.json: quantization_config.{reason}" in refusal(pair)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_part_that_is_missing(part: str, pair: Pair) -> None:
    del pair.tensors[f"{LINEAR}.{part}"]
    assert f"tensor {LINEAR}.{part} is missing" in refusal(pair)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_of_another_shape(part: str, dim: int, pair: Pair) -> None:
    name = f"{LINEAR}.{part}"
    right = list(pair.tensors[name].shape)
    pair.tensors[name] = pair.tensors[name].narrow(dim, 1, right[dim] - 1)
    assert f"tensor {name} has shape {list(pair.tensors[name].shape)}, config.json makes it {right}" in refusal(pair)


@pytest.mark.parametrize(("part", "dtype"), [("qweight", "I64"), ("qzeros", "F32"), ("scales", "I32")])
def test_a_part_of_another_dtype(part: str, dtype: str, pair: Pair) -> None:
    name = f"{LINEAR}.{part}"
    pair.tensors[name] = pair.tensors[name].to({"I64": torch.int64, "I32": torch.int32, "F32": torch.float32}[dtype])
    assert f"tensor {name} has dtype {dtype}" in refusal(pair)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_scale_that_is_not_finite(value: float, pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.scales"][1, 2] = value
    assert f"tensor {LINEAR}.scales holds 1 values that are NaN or infinite" in refusal(pair)


def test_groups_that_do_not_divide_the_inputs(pair: Pair) -> None:
    pair.section["group_size"] = 48
    assert "q_proj: 128 inputs do not divide into groups of 48" in refusal(pair)


def test_words_that_the_weight_does_not_fill(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Awq(-1), ffn=FFN)
    pair.config["intermediate_size"] = 84
    assert "mlp.gate_proj: 84 outputs cannot be packed in words of 8" in refusal(pair)


@pytest.mark.parametrize("extra", ["model.layers.0.mlp.other_proj.qzeros", f"{LINEAR}.weight", f"{LINEAR}.g_idx"])
def test_a_tensor_that_no_linear_needs(extra: str, pair: Pair) -> None:
    pair.tensors[extra] = torch.zeros(3)
    assert f'1 tensors this architecture does not have, e.g. "{extra}"' in refusal(pair)
