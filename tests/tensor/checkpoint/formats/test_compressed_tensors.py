"""Tests compressed-tensors: the model is that of the weights that the stored parts stand for, and what does not fit is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from float_formats_kit import Compressed, pack_rows
from quantized_kit import ARCHITECTURES, LINEAR, Pair, load, logits, save_pair
from safetensors.torch import save_file

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.checkpoint.formats import table
from headrace.tensor.checkpoint.formats.compressed_tensors import read_format
from headrace.tensor.checkpoint.formats.table import QuantizedSource

pytestmark = pytest.mark.pure

INTEGERS = Compressed(symmetric=False)
NVFP4 = Compressed("nvfp4-pack-quantized", 4, (1, 16))
MXFP4 = Compressed("mxfp4-pack-quantized", 4, (1, 32))
MXFP8 = Compressed("mxfp8-quantized", 8, (1, 32))
ORDERED = Compressed(is_ordered=True)
BYTES = Compressed("int-quantized", 8, (1, 0))
FLOATS = Compressed("float-quantized", 8, (1, 0))
STORED = [
    *(Compressed(bits=bits, symmetric=bits % 2 == 0) for bits in (2, 3, 5, 6, 7, 8)),
    *(Compressed(bits=bits, symmetric=bits % 2 == 0, is_padded=True) for bits in (3, 5, 6, 7)),
    Compressed(bits=3, blocks=(1, 0), symmetric=False),
    Compressed(blocks=(0, 0), symmetric=False, dtype=torch.float32),
    Compressed(is_ordered=True, symmetric=False),
    Compressed(blocks=(1, 128), dtype=torch.float16),
    BYTES,
    Compressed("int-quantized", 8, (0, 0), symmetric=False),
    Compressed("int-quantized", 4, (1, 64), symmetric=False),
    Compressed("float-quantized", 8, (0, 0)),
    Compressed("float-quantized", 8, (48, 56), dtype=torch.float32),
    MXFP8,
]
MLP = LINEAR.removesuffix(".down_proj")
ATTENTION = MLP.replace("mlp", "self_attn")


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return save_pair(tmp_path, "Llama", INTEGERS)


def refusal(pair: Pair) -> str:
    """The error of what the pair's tensors and config.json are now."""
    pair.write()
    with pytest.raises(CheckpointError) as caught:
        load(pair.folder)
    return str(caught.value)


def group(pair: Pair) -> dict[str, Any]:
    found: dict[str, Any] = pair.section["config_groups"]["group_0"]
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("stored", "title"),
    [
        (INTEGERS, "pack-quantized, 4 bits in groups of 32"),
        (BYTES, "int-quantized, 8 bits per channel"),
        (FLOATS, "float-quantized, 8 bits per channel"),
        (NVFP4, "nvfp4-pack-quantized, 4 bits in groups of 16"),
        (MXFP4, "mxfp4-pack-quantized, 4 bits in groups of 32"),
    ],
    ids=str,
)
def test_the_logits_are_those_of_the_same_weights_stored_plainly(architecture: str, stored: Compressed, title: str, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, architecture, stored)
    loaded = load(pair.folder, quantization="compressed-tensors")
    assert loaded.stored_as == f"compressed-tensors, {title}"
    assert torch.equal(logits(loaded), logits(load(pair.plain)))


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_values_and_scales_of_every_kind(stored: Compressed, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", stored)
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


@pytest.mark.parametrize(
    "stored", [INTEGERS, Compressed(is_ordered=True), Compressed(bits=3, symmetric=False), NVFP4, MXFP4, BYTES], ids=str
)
def test_any_region_is_that_of_the_weight(stored: Compressed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks and fused parts read it; made dense a few rows at a time, which begin and end within words."""
    pair = save_pair(tmp_path, "Llama", stored)
    weight, draw = pair.dense[f"{LINEAR}.weight"], random.Random(0)
    source = QuantizedSource(Checkpoint(pair.folder), read_format(ConfigFile("config.json", pair.section)))
    monkeypatch.setattr(table, "SLAB_ELEMENTS", 11 * weight.shape[1])
    for _ in range(20):
        region = tuple(slice(*sorted(draw.sample(range(size + 1), 2))) for size in weight.shape)[: draw.randint(0, 2)]
        assert torch.equal(source.read(f"{LINEAR}.weight", tuple(weight.shape), region), weight[region])


@pytest.mark.parametrize("stored", [INTEGERS, ORDERED, NVFP4, MXFP4, MXFP8, BYTES, FLOATS], ids=str)
def test_a_checkpoint_is_checked_without_being_read(stored: Compressed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before a start from packed linears on disk. The smallest parts are read, as their values may contradict config.json."""
    pair = save_pair(tmp_path, "Llama", stored)
    checkpoint = Checkpoint(pair.folder)
    source = QuantizedSource(checkpoint, read_format(ConfigFile("config.json", pair.section)))
    read, whole = list[str](), checkpoint.read_part

    def read_part(name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        read.append(name)
        return whole(name, shape, dtypes)

    monkeypatch.setattr(checkpoint, "read_part", read_part)
    for name, tensor in pair.tensors.items():
        if f"{name.rpartition('.')[0]}.weight" not in pair.dense:
            source.expect(name, tuple(tensor.shape))
    for name, weight in pair.dense.items():
        source.expect(name, tuple(weight.shape))
    checkpoint.check_all_read()
    assert all(name.endswith(("weight_shape", "weight_global_scale")) for name in read)


def test_linears_that_are_ignored_and_a_head_that_is_not(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Qwen2", INTEGERS, head=True, plain=(LINEAR, f"{ATTENTION}.k_proj"))
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


def test_what_rounds_activations_keys_and_values_changes_nothing(pair: Pair) -> None:
    rounding = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    group(pair)["input_activations"] = pair.section["kv_cache_scheme"] = rounding
    for part in ("k_scale", "v_scale", "q_proj.input_scale", "o_proj.input_global_scale", "v_proj.output_scale", "q_proj.input_zero_point"):
        pair.tensors[f"{ATTENTION}.{part}"] = torch.tensor([7.5])
    pair.write()
    loaded = load(pair.folder)
    assert loaded.stored_as == "compressed-tensors, pack-quantized, 4 bits in groups of 32, its rounding of activations unused"
    assert torch.equal(logits(loaded), logits(load(pair.plain)))


def test_the_words_of_older_and_newer_writers(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Compressed(blocks=(1, 0)))
    expected, section = logits(load(pair.plain)), pair.config.pop("quantization_config")
    weights = {"num_bits": 4, "type": "int", "group_size": -1}
    for key, fields in (
        ("compression_config", {**section, "quant_method": None}),
        ("quantization_config", {**section, "format": "mixed-precision", "config_groups": {"a": _group(format="pack-quantized")}}),
        ("quantization_config", {**section, "sparsity_config": {"format": "dense", "global_sparsity": 0.1}}),
        ("quantization_config", {**section, "config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}),
    ):
        pair.config = {name: value for name, value in pair.config.items() if not name.endswith("_config")} | {key: fields}
        pair.write()
        assert torch.equal(logits(load(pair.folder)), expected)


def _group(**fields: object) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": Compressed(blocks=(1, 0)).weights, **fields}


@pytest.mark.parametrize("stored", [BYTES, FLOATS, INTEGERS], ids=str)
def test_zero_points_of_symmetric_weights_are_zero(stored: Compressed, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Compressed(stored.layout, stored.bits, stored.blocks))
    name, scales = f"{LINEAR}.weight_zero_point", pair.tensors[f"{LINEAR}.weight_scale"]
    pair.tensors[name] = torch.zeros_like(scales, dtype=torch.float8_e4m3fn if stored is FLOATS else torch.int8)
    pair.write()
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))
    pair.tensors[name].view(torch.int8)[0] = 1
    assert f"{name}: is not zero, though config.json says that weights are symmetric" in refusal(pair)


def mixed(tmp_path: Path, attention: list[str], mlp: list[str]) -> tuple[Pair, Pair]:
    """A model whose attention is float8 and whose MLP is packed in four bits, by these targets; the second pair has the MLP's weights."""
    floats, packed = save_pair(tmp_path / "a", "Llama", FLOATS), save_pair(tmp_path / "b", "Llama", INTEGERS)
    for name in [name for name in floats.tensors if name.startswith(MLP)]:
        del floats.tensors[name]
    floats.tensors |= {name: tensor for name, tensor in packed.tensors.items() if name.startswith(MLP)}
    groups = {"attention": {"targets": attention, "format": FLOATS.layout, "weights": FLOATS.weights}}
    floats.section["config_groups"] = groups | {"mlp": {"targets": mlp, "format": INTEGERS.layout, "weights": INTEGERS.weights}}
    floats.section["format"] = "mixed-precision"
    return floats, packed


@pytest.mark.parametrize(
    ("attention", "mlp"),
    [
        (["re:.*self_attn.*"], ["re:.*mlp.*"]),
        (["re:.*self_attn.*"], ["re:^(?!.*self_attn)"]),
        (["Linear"], [r"re:.*\.(gate|up|down)_proj$"]),
        ([r"re:model\.layers\.[0-9]+\.self_attn\.(?:q|k|v|o)_proj"], ["Linear"]),
        (["Linear"], [f"{MLP}.{name}_proj" for name in ("gate", "up", "down")]),
    ],
)
def test_groups_with_schemes_of_their_own(attention: list[str], mlp: list[str], tmp_path: Path) -> None:
    pair, packed = mixed(tmp_path, attention, mlp)
    pair.write()
    loaded = load(pair.folder)
    assert loaded.stored_as == "compressed-tensors, float-quantized, 8 bits per channel or pack-quantized, 4 bits in groups of 32"
    pair.config.pop("quantization_config")
    dense = pair.dense | {name: weight for name, weight in packed.dense.items() if name.startswith(MLP)}
    names = tuple(dense)
    pair.tensors = {name: tensor for name, tensor in pair.tensors.items() if f"{name.rpartition('.')[0]}.weight" not in names} | dense
    pair.write()
    assert torch.equal(logits(loaded), logits(load(pair.folder)))


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (["re:(mlp"], 'config.json: the pattern "(mlp" is no regular expression'),
        (["re:(?i).*mlp"], """the pattern "(?i).*mlp" has '(?i)', which is not supported"""),
        (["re:(a+)+$"], "mlp.gate_proj: is stored quantized, but no group"),
        (["re:" + "(.|.)" * 30 + "Q"], "mlp.gate_proj: is stored quantized, but no group"),
        (["re:" + "(?:(?!(?:.+){9}y).)*" * 30], "and those before it take more than 65536 steps"),
        (["re:.*up_proj"], "mlp.gate_proj: is stored quantized, but no group of config_groups has it among its targets"),
        ([7], "config_groups.mlp.targets = [7]: must be a list of strings"),
        (["re:.*self_attn.*"], "mlp.gate_proj: is stored quantized, but no group"),
    ],
)
def test_targets_that_are_refused(targets: list[Any], reason: str, tmp_path: Path) -> None:
    pair, _ = mixed(tmp_path, ["re:.*self_attn.*"], targets)
    assert reason in refusal(pair)


def test_a_linear_of_another_group_is_not_read_as_this_one(tmp_path: Path) -> None:
    pair, _ = mixed(tmp_path, ["re:.*mlp.*"], ["re:.*self_attn.*"])
    assert f"tensor {ATTENTION}.q_proj.weight_shape is missing" in refusal(pair)


@pytest.mark.parametrize("stored", [INTEGERS, BYTES, FLOATS, NVFP4, MXFP4, MXFP8, ORDERED], ids=str)
def test_parts_that_are_missing_or_of_another_shape(stored: Compressed, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", stored)
    whole = dict(pair.tensors)
    for name in [name for name in whole if name.startswith(f"{LINEAR}.")]:
        pair.tensors = {**whole, name: torch.cat([whole[name].view(torch.uint8), whole[name].view(torch.uint8)]).view(whole[name].dtype)}
        text = refusal(pair)
        assert f"tensor {name} has shape {list(pair.tensors[name].shape)}, config.json makes it {list(whole[name].shape)}" in text
        pair.tensors = {other: tensor for other, tensor in whole.items() if other != name}
        assert f"tensor {name.removesuffix('_packed')} is missing" in refusal(pair)


def spoil(name: str, place: tuple[int, ...], value: float) -> Callable[[Pair], None]:
    """An element of a part of LINEAR, bytes as they are."""

    def change(pair: Pair) -> None:
        tensor = pair.tensors[f"{LINEAR}.{name}"]
        (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor)[place] = value

    return change


@pytest.mark.parametrize(
    ("stored", "change", "reason"),
    [
        (INTEGERS, spoil("weight_scale", (0, 1), float("nan")), f"tensor {LINEAR}.weight_scale holds 1 values that are NaN or infinite"),
        (INTEGERS, spoil("weight_scale", (0, 1), float("inf")), f"tensor {LINEAR}.weight_scale holds 1 values that are NaN or infinite"),
        (INTEGERS, spoil("weight_shape", (1,), 128), f"{LINEAR}.weight_shape: says [128, 128], config.json makes it [128, 160]"),
        (ORDERED, spoil("weight_g_idx", (7,), 5), f"{LINEAR}.weight_g_idx: names groups 0 to 5, but there are 5"),
        (ORDERED, spoil("weight_g_idx", (7,), -1), f"{LINEAR}.weight_g_idx: names groups -1 to 4, but there are 5"),
        (FLOATS, spoil("weight", (5, 6), 0x7F), f"weight {LINEAR}.weight holds values that are NaN or infinite"),
        (FLOATS, spoil("weight", (5, 6), 0xFF), f"weight {LINEAR}.weight holds values that are NaN or infinite"),
        (MXFP8, spoil("weight", (5, 6), 0xFF), f"weight {LINEAR}.weight holds values that are NaN or infinite"),
        (MXFP8, spoil("weight_scale", (5, 1), 255), f"{LINEAR}.weight_scale: 1 scales are NaN"),
        (MXFP4, spoil("weight_scale", (5, 1), 255), f"{LINEAR}.weight_scale: 1 scales are NaN"),
        (NVFP4, spoil("weight_scale", (5, 1), 0x7F), f"{LINEAR}.weight_scale: 1 scales are NaN"),
        (NVFP4, spoil("weight_scale", (5, 1), 0xFF), f"{LINEAR}.weight_scale: 1 scales are NaN"),
        (NVFP4, spoil("weight_global_scale", (0,), 0.0), f"{LINEAR}.weight_global_scale: is zero, and divides all weights"),
        (NVFP4, spoil("weight_global_scale", (0,), 1e-45), f"weight {LINEAR}.weight holds values that are NaN or infinite"),
        (NVFP4, spoil("weight_global_scale", (0,), float("nan")), f"tensor {LINEAR}.weight_global_scale holds 1 values that are NaN"),
    ],
)
def test_a_bad_value_is_refused(stored: Compressed, change: Callable[[Pair], None], reason: str, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", stored)
    change(pair)
    assert reason in refusal(pair)


def test_an_order_of_inputs_that_was_never_set_is_none(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", INTEGERS)
    pair.tensors[f"{LINEAR}.weight_g_idx"] = torch.full((160,), -1, dtype=torch.int32)
    pair.write()
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


@pytest.mark.parametrize(("layout", "blocks"), [("nvfp4-pack-quantized", 16), ("mxfp4-pack-quantized", 32)])
def test_inputs_that_do_not_divide_into_groups(layout: str, blocks: int, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Compressed(layout, 4, (1, blocks)))
    pair.config["intermediate_size"] = 152
    for name in ("gate_proj", "up_proj"):
        for part in ("weight_packed", "weight_scale"):
            pair.tensors[f"{MLP}.{name}.{part}"] = pair.tensors[f"{MLP}.{name}.{part}"][:152]
    assert f"{LINEAR}: a weight of shape [128, 152] has no groups of {blocks} inputs each" in refusal(pair)


def test_zero_points_packed_along_the_inputs_are_refused(pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.weight_zero_point"] = pack_rows([[8] * 5] * 128, 4)
    assert f"tensor {LINEAR}.weight_zero_point has shape [128, 1], config.json makes it [16, 5]" in refusal(pair)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("format", "marlin-24", 'config_groups.group_0.format = "marlin-24": only pack-quantized, int-quantized'),
        ("format", None, 'group_0.format = "mixed-precision": only'),
        ("format", "dense", 'group_0.format = "dense": only'),
        ("format", "float-quantized", 'weights.type = "int": contradicts the format, float-quantized'),
        ("config_groups", {}, "config_groups = {}: no group says how weights are stored"),
        ("config_groups", {"W4A16": ["Linear"]}, 'config_groups.W4A16 = ["Linear"]: must be an object'),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config.format = "),
        ("transform_config", {"config_groups": {"R1": {}}}, "rotated weights are not supported"),
        ("moe_sparsity_config", {"method": "prune"}, "mixtures without some of their experts are not supported"),
    ],
)
def test_a_field_that_is_refused(field: str, value: object, reason: str, pair: Pair) -> None:
    pair.section[field] = value
    text = refusal(pair)
    assert "config.json: quantization_config." in text
    assert reason in text


@pytest.mark.parametrize(
    ("stored", "field", "value", "reason"),
    [
        (INTEGERS, "num_bits", 9, "num_bits = 9: must be an integer from 2 to 8"),
        (NVFP4, "num_bits", 8, "num_bits = 8: must be an integer from 4 to 4"),
        (NVFP4, "group_size", 32, "group_size = 32: nvfp4-pack-quantized has groups of 16"),
        (MXFP4, "group_size", 16, "group_size = 16: mxfp4-pack-quantized has groups of 32"),
        (FLOATS, "symmetric", False, "symmetric = false: float-quantized has no zero points"),
        (INTEGERS, "group_size", None, 'strategy = "group": only tensor, channel, group with a group_size'),
        (INTEGERS, "strategy", "block", 'strategy = "block": only tensor, channel'),
        (INTEGERS, "strategy", "token", 'strategy = "token": only tensor, channel'),
        (INTEGERS, "dynamic", True, "dynamic = true: weights have stored scales"),
        (INTEGERS, "actorder", "random", 'actorder = "random": only group, dynamic, weight and static are supported'),
        (INTEGERS, "actorder", "group", "weight_g_idx is missing"),
        (INTEGERS, "symmetric", True, "weight_zero_point has dtype I32"),
        (BYTES, "symmetric", False, "weight_zero_point is missing"),
        (INTEGERS, "group_size", 64, "q_proj.weight_scale has shape [128, 4], config.json makes it [128, 2]"),
    ],
)
def test_a_field_of_the_weights_that_is_refused(stored: Compressed, field: str, value: object, reason: str, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", stored)
    group(pair)["weights"][field] = value
    assert reason in refusal(pair)


@pytest.mark.parametrize(("bits", "count"), [(3, 11), (5, 7), (6, 11), (7, 5)])
def test_words_that_may_be_packed_in_two_ways_are_refused(bits: int, count: int, tmp_path: Path) -> None:
    """Of sizes that are no multiple of 32 alone."""
    stored = Compressed(bits=bits, blocks=(1, 0), is_padded=True)
    parts, _ = stored.store((32, count), torch.Generator().manual_seed(0))
    save_file({f"a.{name}": part for name, part in parts.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{count} integers of {bits} bits fill \d words in either of two ways of packing"):
        read_format(ConfigFile("config.json", stored.section)).open(Checkpoint(tmp_path), "a", (32, count))


def test_no_size_that_is_a_multiple_of_32_may_be_packed_in_two_ways() -> None:
    for bits in (3, 5, 6, 7):
        for count in range(32, 65536, 32):
            assert -(-count // (32 // bits)) != count * bits // 32
