"""Tests float8 checkpoints: the model is that of the weights that the stored parts stand for, and what does not fit is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from float_formats_kit import Fp8
from quantized_kit import ARCHITECTURES, LINEAR, Pair, load, logits, save_pair

from headrace.core.errors import CheckpointError, ConfigError
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.checkpoint.formats import table
from headrace.tensor.checkpoint.formats.fp8 import read_format
from headrace.tensor.checkpoint.formats.table import QuantizedSource

pytestmark = pytest.mark.pure

BLOCK = Fp8((128, 128), "weight_scale_inv")
STORED = [
    Fp8((48, 56), "weight_scale_inv", dtype=torch.bfloat16),
    Fp8((64, 32), "weight_scale_inv", dtype=torch.float8_e8m0fnu),
    Fp8(),
    Fp8(shape="one"),
    Fp8(scale="weight_scale_inv", shape="none", dtype=torch.bfloat16),
    Fp8((1, 0)),
    Fp8((1, 0), shape="row", dtype=torch.float16),
    Fp8((1, 0), method="fbgemm_fp8"),
]
ATTENTION = LINEAR.replace("mlp.down_proj", "self_attn")


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return save_pair(tmp_path, "Llama", BLOCK)


def refusal(pair: Pair) -> str:
    """The error of what the pair's tensors and config.json are now."""
    pair.write()
    with pytest.raises(CheckpointError) as caught:
        load(pair.folder)
    return str(caught.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_logits_are_those_of_the_same_weights_stored_plainly(architecture: str, tmp_path: Path) -> None:
    """Blocks are cut off at both ends of a weight."""
    pair = save_pair(tmp_path, architecture, BLOCK)
    loaded = load(pair.folder, quantization="none")
    assert loaded.stored_as == "fp8, in blocks of 128 x 128, its rounding of activations unused"
    assert torch.equal(logits(loaded), logits(load(pair.plain)))


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_scales_of_every_shape_and_dtype(stored: Fp8, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", stored)
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


@pytest.mark.parametrize("stored", [BLOCK, STORED[0], Fp8(), Fp8((1, 0))], ids=str)
def test_any_region_is_that_of_the_weight(stored: Fp8, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks and fused parts read it; made dense a few rows at a time, which begin and end within blocks."""
    pair = save_pair(tmp_path, "Llama", stored)
    weight, draw = pair.dense[f"{LINEAR}.weight"], random.Random(0)
    source = QuantizedSource(Checkpoint(pair.folder), read_format(ConfigFile("config.json", pair.section)))
    monkeypatch.setattr(table, "SLAB_ELEMENTS", 11 * weight.shape[1])
    for _ in range(20):
        region = tuple(slice(*sorted(draw.sample(range(size + 1), 2))) for size in weight.shape)[: draw.randint(0, 2)]
        assert torch.equal(source.read(f"{LINEAR}.weight", tuple(weight.shape), region), weight[region])


@pytest.mark.parametrize(("method", "names"), [("fp8", ("none", "fp8")), ("fbgemm_fp8", ("none", "fbgemm_fp8"))])
def test_the_names_that_say_how_it_is_stored(method: str, names: tuple[str, ...], tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Fp8((1, 0), method=method))
    expected = logits(load(pair.plain))
    for name in names:
        assert torch.equal(logits(load(pair.folder, quantization=name)), expected)
    with pytest.raises(ConfigError, match=f"'modelopt', but the checkpoint is stored as {method}"):
        load(pair.folder, quantization="modelopt")


def test_linears_that_were_not_converted_and_a_head_that_was(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Qwen2", BLOCK, head=True, plain=(LINEAR, f"{ATTENTION}.k_proj"))
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


def test_scales_of_activations_keys_and_values_change_nothing(tmp_path: Path) -> None:
    """Also where the linears beside them are plain."""
    pair = save_pair(tmp_path, "Llama", Fp8(), plain=(f"{ATTENTION}.q_proj", f"{ATTENTION}.o_proj"))
    pair.section["activation_scheme"] = "static"
    for part in (
        "k_scale",
        "v_scale",
        "q_scale",
        "o_proj.input_scale",
        "k_proj.input_scale",
        "q_proj.output_scale",
        "v_proj.activation_scale",
    ):
        pair.tensors[f"{ATTENTION}.{part}"] = torch.tensor(7.5)
    pair.write()
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


def drop_scale(pair: Pair) -> None:
    del pair.tensors[f"{LINEAR}.weight_scale_inv"]


def transpose_scale(pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.weight_scale_inv"] = torch.ones(2, 1)


def cut_weight(pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.weight"] = pair.tensors[f"{LINEAR}.weight"][:, :150]


def spoil_weight(pair: Pair, byte: int = 0x7F) -> None:
    pair.tensors[f"{LINEAR}.weight"].view(torch.uint8)[3, 4] = byte


def spoil_weight_below_zero(pair: Pair) -> None:
    spoil_weight(pair, 0xFF)


def spoil_scale(pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.weight_scale_inv"][0, 1] = float("nan")


def spoil_scale_infinitely(pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.weight_scale_inv"][0, 1] = float("inf")


def spoil_power(pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.weight_scale_inv"] = torch.tensor([[120, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)


def overflow(pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.weight_scale_inv"][:] = 3e38


def make_integers(pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.weight_scale_inv"] = torch.ones(1, 2, dtype=torch.int32)


def make_wide_range(pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.weight"] = pair.tensors[f"{LINEAR}.weight"].float().to(torch.float8_e5m2)


def add_part(pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.pre_quant_scale"] = torch.ones(160)


def forget_blocks(pair: Pair) -> None:
    pair.section["weight_block_size"] = None


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (drop_scale, f"tensor {LINEAR}.weight_scale_inv is missing"),
        (transpose_scale, f"tensor {LINEAR}.weight_scale_inv has shape [2, 1], config.json makes it [1, 2]"),
        (cut_weight, f"tensor {LINEAR}.weight has shape [128, 150], config.json makes it [128, 160]"),
        (spoil_weight, f"weight {LINEAR}.weight holds values that are NaN or infinite"),
        (spoil_weight_below_zero, f"weight {LINEAR}.weight holds values that are NaN or infinite"),
        (spoil_scale, f"tensor {LINEAR}.weight_scale_inv holds 1 values that are NaN or infinite"),
        (spoil_scale_infinitely, f"tensor {LINEAR}.weight_scale_inv holds 1 values that are NaN or infinite"),
        (spoil_power, f"{LINEAR}.weight_scale_inv: 1 scales are NaN"),
        (overflow, f"weight {LINEAR}.weight holds values that are NaN or infinite"),
        (make_integers, f"tensor {LINEAR}.weight_scale_inv has dtype I32"),
        (make_wide_range, f"tensor {LINEAR}.weight has dtype F8_E5M2"),
        (add_part, f'1 tensors this architecture does not have, e.g. "{LINEAR}.pre_quant_scale"'),
        (forget_blocks, "mlp.gate_proj.weight_scale_inv has shape [2, 1], config.json makes it [160, 1]"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_bad_file_is_refused(spoil: Callable[[Pair], None], reason: str, pair: Pair) -> None:
    spoil(pair)
    assert reason in refusal(pair)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("weight_block_size", [128], "must be two positive numbers"),
        ("weight_block_size", [128, 0], "must be two positive numbers"),
        ("weight_block_size", [True, 128], "must be two positive numbers"),
        ("weight_block_size", "128x128", "must be a list"),
        ("activation_scheme", "token", "only dynamic and static are supported"),
        ("quant_method", "mxfp4", "It is of gpt-oss, which is not supported either"),
        ("quant_method", 8, "must be a string"),
    ],
)
def test_a_field_that_is_refused(field: str, value: object, reason: str, pair: Pair) -> None:
    pair.section[field] = value
    text = refusal(pair)
    assert f"config.json: quantization_config.{field} = " in text
    assert reason in text
