"""Tests GPTQ checkpoints: the model is that of the weights that the stored parts stand for, and what does not fit is refused by name."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_families import AVX2
from quantized_kit import ARCHITECTURES, LINEAR, Gptq, Pair, load, logits, save_pair

from headrace.core.errors import CheckpointError, ConfigError
from headrace.tensor.backends import load_backend
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.checkpoint.formats import table
from headrace.tensor.checkpoint.formats.gptq import read_format
from headrace.tensor.checkpoint.formats.table import QuantizedSource
from headrace.tensor.packed import store as packed_store
from headrace.tensor.packed.file import SUFFIX, PackedFolder

pytestmark = pytest.mark.pure

FLAGS = list(product((False, True), (False, True), (1, 2)))
"""(sym, desc_act, version)"""
CASES = [
    (architecture, Gptq(bits, group, *FLAGS[number % 8]))
    for number, (bits, group, architecture) in enumerate(product((2, 3, 4, 8), (32, 64, 128, -1), ARCHITECTURES))
]
"""All flags with every number of bits; all three architectures with every number of bits and every group."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A Llama of 4 bits in act-order, its zero points as version 2 stores them."""
    return save_pair(tmp_path_factory.mktemp("made"), "Llama", Gptq(desc_act=True, version=2))


@pytest.fixture
def pair(made: Pair, tmp_path: Path) -> Pair:
    return made.copied(tmp_path / "quantized")


def refusal(pair: Pair) -> str:
    """The error of what the pair's tensors and config.json are now."""
    pair.write()
    with pytest.raises(CheckpointError) as caught:
        load(pair.folder)
    return str(caught.value)


@pytest.mark.parametrize(("architecture", "stored"), CASES, ids=[f"{name}-{stored}" for name, stored in CASES])
def test_the_logits_are_those_of_the_same_weights_stored_plainly(architecture: str, stored: Gptq, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, architecture, stored)
    loaded = load(pair.folder)
    assert loaded.stored_as == f"gptq, {stored.bits} bits" + (f" in groups of {stored.group}" if stored.group > 0 else "")
    assert torch.equal(logits(loaded), logits(load(pair.plain)))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_any_region_is_that_of_the_weight(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks and fused parts read it; made dense a few rows at a time."""
    pair = save_pair(tmp_path, "Llama", Gptq(bits, 64, desc_act=True))
    weight, draw = pair.dense[f"{LINEAR}.weight"], random.Random(bits)
    section = ConfigFile("config.json", pair.section)
    source = QuantizedSource(Checkpoint(pair.folder), read_format(section))
    monkeypatch.setattr(table, "SLAB_ELEMENTS", 7 * weight.shape[1])
    for _ in range(20):
        region = tuple(slice(*sorted(draw.sample(range(size + 1), 2))) for size in weight.shape)[: draw.randint(0, 2)]
        assert torch.equal(source.read(f"{LINEAR}.weight", tuple(weight.shape), region), weight[region])


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_weights_are_rounded_further_on_demand(precision: str, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Qwen2", Gptq())
    rounded = logits(load(pair.folder, quantization=precision))
    assert torch.equal(rounded, logits(load(pair.plain, quantization=precision)))
    assert not torch.equal(rounded, logits(load(pair.folder)))


def test_the_formats_name_as_an_option_rounds_nothing(pair: Pair) -> None:
    expected = logits(load(pair.plain))
    assert all(torch.equal(logits(load(pair.folder, quantization=name)), expected) for name in ("none", "gptq", "gptq_marlin"))
    with pytest.raises(ConfigError, match="'awq', but the checkpoint is stored as gptq, 4 bits in groups of 32"):
        load(pair.folder, quantization="awq")
    with pytest.raises(ConfigError, match="'gptq', but the checkpoint holds plain weights"):
        load(pair.plain, quantization="gptq")


def test_the_head_may_be_quantized_and_a_linear_plain(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Gptq(3), head=True, plain=(LINEAR,))
    assert f"{LINEAR}.weight" in pair.tensors
    assert "lm_head.qweight" in pair.tensors
    pair.section["lm_head"] = True
    pair.write()
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_other_dtypes(dtype: torch.dtype, pair: Pair) -> None:
    tensors = {name: tensor.to(dtype).half() if name.endswith("scales") else tensor for name, tensor in pair.tensors.items()}
    pair.tensors = tensors
    pair.write()
    expected = logits(load(pair.folder))
    pair.tensors = {name: tensor.to(dtype) if name.endswith("scales") else tensor for name, tensor in tensors.items()}
    pair.write()
    assert torch.equal(logits(load(pair.folder)), expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stored_in", [1, 2])
@pytest.mark.parametrize("called", ["gptq", "gptq_v2", None])
def test_symmetric_zero_points_are_the_middle_however_they_are_stored(
    bits: int, stored_in: int, called: str | None, tmp_path: Path
) -> None:
    """Recent writers call what they store in version 2's way "gptq"."""
    pair = save_pair(tmp_path, "Llama", Gptq(bits, symmetric=True, version=stored_in))
    expected = logits(load(pair.plain))
    pair.section["checkpoint_format"] = called
    for is_symmetric in (True, None):
        pair.section["sym"] = is_symmetric
        pair.write()
        assert torch.equal(logits(load(pair.folder)), expected)


def test_symmetric_weights_need_no_zero_points(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Phi3", Gptq(symmetric=True, desc_act=True))
    pair.tensors = {name: tensor for name, tensor in pair.tensors.items() if not name.endswith("qzeros")}
    pair.write()
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))
    pair.section["sym"] = False
    assert ".qzeros is missing" in refusal(pair)


def test_one_zero_point_that_is_not_the_middle_contradicts_a_symmetric_file(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Gptq(symmetric=True))
    pair.tensors[f"{LINEAR}.qzeros"][1, 3] += 1
    assert f"{LINEAR}.qzeros: its zero points are not the middle of the range, though config.json has sym = true" in refusal(pair)
    pair.section["sym"] = False
    pair.write()
    assert not torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("is_symmetric", [False, None])
def test_a_word_decides_how_zero_points_are_stored_of_a_file_that_does_not_say(
    version: int, is_symmetric: bool | None, tmp_path: Path
) -> None:
    pair = save_pair(tmp_path, "Llama", Gptq(version=version))
    called = pair.section.pop("checkpoint_format")
    pair.section["sym"] = is_symmetric
    message = refusal(pair)
    assert "q_proj.qzeros: nothing says how its zero points are stored" in message
    assert '"checkpoint_format": "gptq" where zero points are stored less one' in message
    for field in ("checkpoint_format", "format"):
        pair.section[field] = called
        pair.write()
        assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


@pytest.mark.parametrize("given", ["as stored", "absent", "zeros"])
def test_groups_without_act_order_are_consecutive_whatever_g_idx_leaves_out(given: str, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Gptq())
    for name in [name for name in pair.tensors if name.endswith("g_idx")]:
        if given == "absent":
            del pair.tensors[name]
        elif given == "zeros":
            pair.tensors[name] = torch.zeros_like(pair.tensors[name])
    pair.write()
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))


def test_rules_that_exclude_modules_are_what_the_file_holds_anyway(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Gptq(), plain=(LINEAR,))
    pair.section["dynamic"] = {r"-:.*\.down_proj": {}, "-:lm_head": {"bits": 8}, "+:.*q_proj": {}}
    pair.write()
    assert torch.equal(logits(load(pair.folder)), logits(load(pair.plain)))
    pair.section["dynamic"] = {"-:.*": {}}
    assert "q_proj: is stored quantized, though a rule of config.json's dynamic excludes it" in refusal(pair)


MLP = LINEAR.removesuffix(".down_proj")
OTHERS = [Gptq(8, 32), Gptq(4, 64), Gptq(2, -1, desc_act=True), Gptq(3, 32, symmetric=True)]


def with_rules(path: Path, other: Gptq, rules: dict[str, object]) -> tuple[Pair, torch.Tensor]:
    """A Llama of 4 bits whose feed-forward block is stored in another way, and its logits."""
    pair, mlp = save_pair(path / "a", "Llama", Gptq()), save_pair(path / "b", "Llama", other)
    for name in [name for name in pair.tensors if name.startswith(MLP)]:
        del pair.tensors[name]
    pair.tensors |= {name: tensor for name, tensor in mlp.tensors.items() if name.startswith(MLP)}
    pair.section["dynamic"] = rules
    pair.write()
    plain = pair.copied(path / "plain")
    dense = pair.dense | {name: weight for name, weight in mlp.dense.items() if name.startswith(MLP)}
    plain.tensors = {name: tensor for name, tensor in plain.tensors.items() if f"{name.rpartition('.')[0]}.weight" not in dense} | dense
    del plain.config["quantization_config"]
    plain.write()
    return pair, logits(load(plain.folder))


@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize("pattern", [r"+:model\.layers\.0\.mlp\..*", r".*\.mlp\.(gate|up|down)_proj$", r"+:(?!.*self_attn)model"])
def test_rules_change_how_modules_are_stored(other: Gptq, pattern: str, tmp_path: Path) -> None:
    changes = {"bits": other.bits, "group_size": other.group, "desc_act": other.desc_act, "sym": other.symmetric}
    pair, expected = with_rules(tmp_path, other, {"-:.*visual.*": {}, pattern: changes, "+:.*": {}, ".*mlp.*": {"bits": 2}})
    loaded = load(pair.folder)
    assert loaded.stored_as.startswith(f"gptq, 4 bits in groups of 32 or {other.bits} bits")
    assert torch.equal(logits(loaded), expected)


def test_rules_name_modules_of_a_model_that_was_saved_without_its_head(tmp_path: Path) -> None:
    pair, expected = with_rules(tmp_path, Gptq(8, 32), {r"model\.layers\.0\.mlp": {"bits": 8}})
    pair.tensors = {name.removeprefix("model."): tensor for name, tensor in pair.tensors.items()}
    pair.write()
    assert torch.equal(logits(load(pair.folder)), expected)


def test_the_first_rule_that_matches_counts(tmp_path: Path) -> None:
    rules: dict[str, object] = {"+:.*mlp": {"bits": 8}, ".*": {"bits": 4}, "-:.*mlp": {}}
    pair, expected = with_rules(tmp_path, Gptq(8, 32), rules)
    assert torch.equal(logits(load(pair.folder)), expected)
    pair.section["dynamic"] = dict(reversed(rules.items()))
    assert "gate_proj: is stored quantized, though a rule of config.json's dynamic excludes it" in refusal(pair)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("bits", 5, "bits = 5: only 2, 3, 4, 8 are supported"),
        ("bits", 16, "bits = 16: must be an integer from 2 to 8"),
        ("bits", None, "bits = null: is missing"),
        ("group_size", 0, "group_size = 0: must be -1, for one group, or positive"),
        ("group_size", -2, "group_size = -2: must be an integer from -1 to 1048576"),
        ("group_size", 10**12, "group_size = 1000000000000: must be an integer"),
        ("group_size", "128", 'group_size = "128": must be an integer'),
        ("group_size", None, "group_size = null: is missing"),
        ("desc_act", 1, "desc_act = 1: must be true or false"),
        ("checkpoint_format", "marlin", 'checkpoint_format = "marlin": only gptq and gptq_v2 are supported'),
        ("is_marlin_format", True, "is_marlin_format = true: Marlin's layout is not supported"),
        ("format", "gptq", 'format = "gptq": contradicts checkpoint_format'),
        ("format", "gptq_pro", 'format = "gptq_pro": only gptq and gptq_v2 are supported'),
        ("sym", 1, "sym = 1: must be true or false"),
        ("dynamic", {"-:a": {}, "+:b": {"bits": 5}}, "dynamic.+:b.bits = 5: only 2, 3, 4, 8 are supported"),
        ("dynamic", {"a": {"checkpoint_format": "marlin"}}, 'dynamic.a.checkpoint_format = "marlin": only gptq and gptq_v2'),
        ("dynamic", {"+:b": 8}, "dynamic.+:b = 8: must be an object"),
        ("dynamic", {"+:(b": {}}, 'the pattern "(b" is no regular expression'),
        ("quant_method", "bitsandbytes", 'quant_method = "bitsandbytes": checkpoints of this format are not supported'),
    ],
)  # fmt: skip
def test_a_field_that_is_refused(field: str, value: object, reason: str, pair: Pair) -> None:
    pair.section[field] = value
    message = refusal(pair)
    assert f"config.json: {'' if 'pattern' in reason else 'quantization_config.'}{reason}" in message


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
def test_a_part_that_is_missing(part: str, pair: Pair) -> None:
    del pair.tensors[f"{LINEAR}.{part}"]
    assert f"tensor {LINEAR}.{part} is missing" in refusal(pair)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
@pytest.mark.parametrize("dim", [0, -1])
def test_a_part_of_another_shape(part: str, dim: int, pair: Pair) -> None:
    name = f"{LINEAR}.{part}"
    right = list(pair.tensors[name].shape)
    pair.tensors[name] = pair.tensors[name].narrow(dim, 1, right[dim] - 1)
    assert f"tensor {name} has shape {list(pair.tensors[name].shape)}, config.json makes it {right}" in refusal(pair)


@pytest.mark.parametrize(("part", "dtype"), [("qweight", "I64"), ("qzeros", "F32"), ("scales", "I32"), ("g_idx", "I64")])
def test_a_part_of_another_dtype(part: str, dtype: str, pair: Pair) -> None:
    name = f"{LINEAR}.{part}"
    pair.tensors[name] = pair.tensors[name].to({"I64": torch.int64, "I32": torch.int32, "F32": torch.float32}[dtype])
    assert f"tensor {name} has dtype {dtype}" in refusal(pair)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_scale_that_is_not_finite(value: float, pair: Pair) -> None:
    pair.tensors[f"{LINEAR}.scales"][1, 2] = value
    assert f"tensor {LINEAR}.scales holds 1 values that are NaN or infinite" in refusal(pair)


@pytest.mark.parametrize("group", [-1, 5, 2**31 - 1])
def test_a_group_that_does_not_exist(group: int, pair: Pair) -> None:
    """Of 160 inputs in groups of 32."""
    pair.tensors[f"{LINEAR}.g_idx"][3] = group
    assert f"{LINEAR}.g_idx: names groups {min(group, 0)} to {max(group, 4)}, but there are 5, from 0" in refusal(pair)


def test_an_order_that_the_configuration_denies(pair: Pair) -> None:
    pair.section["desc_act"] = False
    assert ".g_idx: its groups are not consecutive, but config.json has desc_act = false" in refusal(pair)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_point_that_version_1_wrapped(bits: int, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Gptq(bits))
    pair.tensors[f"{LINEAR}.qzeros"][2] = -1
    message = refusal(pair)
    assert f"{LINEAR}.qzeros: holds 128 zero points beyond {2**bits - 1}, the highest integer of {bits} bits" in message
    pair.section["checkpoint_format"] = "gptq_v2"
    pair.write()
    load(pair.folder)


def test_words_that_the_weight_does_not_fill(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Gptq())
    pair.config["intermediate_size"] = 84
    assert "cannot be packed in words of 32 bits, 4 bits each" in refusal(pair)


def test_another_number_of_bits_than_the_files(pair: Pair) -> None:
    pair.section["bits"] = 8
    assert "q_proj.qweight has shape [16, 128], config.json makes it [32, 128]" in refusal(pair)


@pytest.mark.parametrize("extra", ["model.layers.0.mlp.other_proj.qzeros", f"{LINEAR}.weight", f"{LINEAR}.qscales"])
def test_a_tensor_that_no_linear_needs(extra: str, pair: Pair) -> None:
    pair.tensors[extra] = torch.zeros(3)
    assert f'1 tensors this architecture does not have, e.g. "{extra}"' in refusal(pair)


@pytest.mark.socket
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_second_start_from_packed_weights_reads_no_part(
    quantization: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_store, "MIN_BYTES", 0)
    kept = tmp_path / "packed"
    kept.mkdir()
    backend, read = load_backend("numba", features=AVX2), list[str]()
    original: Callable[..., torch.Tensor] = Checkpoint._values

    def spy(self: Checkpoint, name: str, *rest: Any) -> torch.Tensor:
        read.append(name)
        return original(self, name, *rest)

    def start(folder: Path, packed: PackedFolder | None) -> list[torch.Tensor]:
        """The linears as the kernels have them."""
        read.clear()
        loaded = load(folder, backend=backend, quantization=quantization, packed=packed)
        if loaded.store is not None:
            deque(loaded.store.save() or (), maxlen=0)
        assert backend.packed_format is not None
        block = loaded.model.blocks[0]
        packings = [backend.packed_format.packed(linear) for linear in (loaded.model.head, *block.attention.linears, *block.mlp.linears)]
        return [tensor for packing in packings if packing is not None for tensor in packing.tensors.values()]

    monkeypatch.setattr(Checkpoint, "_values", spy)
    plain, first = start(pair.plain, None), start(pair.folder, PackedFolder(kept, {}))
    assert f"{LINEAR}.qweight" in read
    assert len(list(kept.glob("*" + SUFFIX))) == 1
    second = start(pair.folder, PackedFolder(kept, {}))
    assert read
    assert all(name.endswith("norm.weight") for name in read)
    assert len(second) >= 5
    assert all(torch.equal(*weights) for weights in zip(first, second, strict=True))
    if quantization != "none":  # as they are stored, they are others than the plain ones
        assert all(torch.equal(*weights) for weights in zip(plain, first, strict=True))


def test_parts_that_are_not_read_are_checked_all_the_same(pair: Pair, tmp_path: Path) -> None:
    """As a kept linear is checked: see `WeightReader`."""
    source = QuantizedSource(Checkpoint(pair.folder), read_format(ConfigFile("config.json", pair.section)))
    shape = tuple(pair.dense[f"{LINEAR}.weight"].shape)
    source.expect(f"{LINEAR}.weight", shape)
    pair.tensors[f"{LINEAR}.scales"] = pair.tensors[f"{LINEAR}.scales"][1:]
    del pair.tensors["model.layers.0.self_attn.o_proj.qzeros"]
    pair.write()
    source = QuantizedSource(Checkpoint(pair.folder), read_format(ConfigFile("config.json", pair.section)))
    with pytest.raises(CheckpointError, match=r"down_proj.scales has shape \[4, 128\]"):
        source.expect(f"{LINEAR}.weight", shape)
    with pytest.raises(CheckpointError, match=r"o_proj.qzeros is missing"):
        source.expect("model.layers.0.self_attn.o_proj.weight", (128, 128))


def test_a_bias_of_zeros_that_no_layer_has_is_left_out(pair: Pair) -> None:
    """Older exporters give one to every linear. One that would change something is refused."""
    wanted = logits(load(pair.folder))
    name = "model.layers.0.self_attn.o_proj.bias"
    pair.tensors[name] = torch.zeros(64)
    pair.write()
    assert torch.equal(logits(load(pair.folder)), wanted)
    pair.tensors[name][5] = 1e-3
    assert f'1 tensors this architecture does not have, e.g. "{name}"' in refusal(pair)
