"""Tests weights kept in their stored bits: the values are the checkpoint's, and a weight without such a form becomes int8 or dense."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_families import AVX2
from float_formats_kit import Compressed, Fp8, ModelOpt
from quantized_kit import LINEAR, Awq, Gptq, Stored, load, logits, save_pair
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.tensor.backends import load_backend
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.checkpoint.formats.nibbles import from_minimum, nibbles
from headrace.tensor.checkpoint.formats.table import FORMATS, QuantizedSource
from headrace.tensor.device import META
from headrace.tensor.kernels.reference import PlainPacking, RoundedLinear
from headrace.tensor.kernels.rounding import Precision, RoundedWeight
from headrace.tensor.layers.weights import Part, WeightReader
from headrace.tensor.models import decoder, describe

pytestmark = pytest.mark.pure

NAME = f"{LINEAR}.weight"
FOUR_BITS: list[Stored] = [
    *(Gptq(bits, group, version=version) for bits in (2, 3, 4) for group in (32, 64, -1) for version in (1, 2)),
    Gptq(4, 32, symmetric=True),
    Awq(32),
    Awq(-1),
    Compressed("pack-quantized", 4, (1, 32)),
    Compressed("pack-quantized", 3, (1, 0)),
    Compressed("int-quantized", 4, (1, 32)),
]
"""Stored in groups that the kernels take: those of 64 in 160 inputs are not, but in the other linears."""
EIGHT_BITS: list[Stored] = [Compressed("int-quantized", 8, (1, 0)), Compressed("int-quantized", 8, (0, 0))]
TO_INT8: list[Stored] = [Gptq(8, 32), Gptq(4, 32, desc_act=True), Compressed("pack-quantized", 8, (1, 32))]
DENSE: list[Stored] = [Fp8((64, 32), "weight_scale_inv"), ModelOpt("NVFP4"), Compressed("mxfp4-pack-quantized", 4, (1, 32))]


def source_of(folder: Path, section: dict[str, object]) -> QuantizedSource:
    return QuantizedSource(Checkpoint(folder), FORMATS[str(section["quant_method"])](ConfigFile("config.json", section)))


@pytest.mark.parametrize("stored", [*FOUR_BITS, *EIGHT_BITS], ids=str)
def test_any_rows_are_those_of_the_weight(stored: Stored, tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", stored)
    weight, draw = pair.dense["model.layers.0.self_attn.q_proj.weight"], random.Random(3)
    source, name = source_of(pair.folder, pair.section), "model.layers.0.self_attn.q_proj.weight"
    for _ in range(8):
        rows = slice(*sorted(draw.sample(range(weight.shape[0] + 1), 2)))
        found = source.rounded(name, tuple(weight.shape), rows)
        assert found is not None
        assert found.group in ((32, 64, 128) if stored in FOUR_BITS else (0,))
        torch.testing.assert_close(found.dense(), weight[rows], rtol=2e-3, atol=0)


def test_symmetric_integers_have_no_zero_points(tmp_path: Path) -> None:
    """Their product costs nothing more than that of weights that were rounded at load."""
    both: list[Stored] = [Gptq(4, 32, symmetric=True), Compressed("pack-quantized", 4, (1, 32))]
    for index, stored in enumerate(both):
        pair = save_pair(tmp_path / str(index), "Llama", stored)
        found = source_of(pair.folder, pair.section).rounded(NAME, tuple(pair.dense[NAME].shape), slice(None))
        assert found is not None
        assert found.zeros is None


@pytest.mark.parametrize(
    ("stored", "held"),
    [
        *((stored, 4) for stored in (Gptq(4, 32), Gptq(2, 32, version=2), Awq(32), Compressed("pack-quantized", 4, (1, 32)))),
        *((stored, 8) for stored in (*EIGHT_BITS, *TO_INT8)),
        *((stored, 16) for stored in (*DENSE, Fp8())),
    ],
    ids=str,
)
def test_linears_are_held_as_they_are_stored(stored: Stored, held: int, tmp_path: Path) -> None:
    """On a CPU. Logits are those of the same weights up to the rounding of inputs, and of integers that go to int8."""
    pair = save_pair(tmp_path, "Llama", stored)
    loaded = load(pair.folder, backend=load_backend("numba", features=AVX2))
    words = {4: "in 4 bits: 4, dense: 1", 8: "in 8 bits: 4, dense: 1", 16: "dense: 5"}
    assert loaded.held == f"linears {words[held]}"
    plain = logits(load(pair.plain))
    found = logits(loaded)
    assert (found - plain).abs().max() <= 0.05 * plain.abs().max()
    if held == 16:
        torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))


def test_parts_of_a_fused_linear_that_are_stored_in_different_ways_go_to_int8(tmp_path: Path) -> None:
    """Of a plain part the fused linear is dense: a layer that was left in 16 bits is not rounded."""
    pair = save_pair(tmp_path, "Llama", Gptq(4, 32), plain=("model.layers.0.self_attn.k_proj",))
    loaded = load(pair.folder, backend=load_backend("numba", features=AVX2))
    assert loaded.held == "linears in 4 bits: 3, dense: 2"
    pair = save_pair(tmp_path / "groups", "Llama", Gptq(4, 64))  # down_proj has 160 inputs, and a last group of 32
    loaded = load(pair.folder, backend=load_backend("numba", features=AVX2))
    assert loaded.held == "linears in 4 bits: 3, in 8 bits: 1, dense: 1"


def test_a_linear_held_in_few_bits_takes_as_many_bytes(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Gptq(4, 32, symmetric=True))
    backend = load_backend("numba", features=AVX2)
    linear = load(pair.folder, backend=backend).model.blocks[0].mlp.linears[1]
    assert linear.weight_bytes == linear.in_features * linear.out_features * (4 + 16 / 32) / 8


@pytest.mark.parametrize("stored", [Fp8(), Compressed("float-quantized", 8, (1, 0))], ids=str)
def test_float8_with_a_scale_per_output_or_tensor_is_given_as_it_is(stored: Stored, tmp_path: Path) -> None:
    """For devices that have such products."""
    pair = save_pair(tmp_path, "Llama", stored)
    source, weight = source_of(pair.folder, pair.section), pair.dense[NAME]
    assert source.precision_of(NAME) is Precision.FP8
    found = source.rounded(NAME, tuple(weight.shape), slice(3, 9))
    assert found is not None
    assert found.values.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(found.dense(), weight[3:9], rtol=1e-6, atol=0)
    pair.tensors[NAME].view(torch.uint8)[5, 7] = 0xFF
    pair.write()
    with pytest.raises(CheckpointError, match="holds values that are NaN or infinite"):
        source_of(pair.folder, pair.section).rounded(NAME, tuple(weight.shape), slice(3, 9))


def test_stored_weights_are_packed_where_the_model_lies(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Gptq(4, 32))
    devices: list[str] = []

    class Packing(PlainPacking):
        def pack_rounded(self, weight: RoundedWeight, bias: Tensor | None) -> RoundedLinear:
            assert weight.zeros is not None
            devices.extend(tensor.device.type for tensor in (weight.values, weight.scales, weight.zeros))
            return super().pack_rounded(weight, bias)

    backend, source = replace(load_backend("reference"), packing=Packing()), source_of(pair.folder, pair.section)
    weight = pair.dense[NAME]
    reader = WeightReader(source, backend, torch.float32, META, stored=source)
    reader.whole_linear(Part(NAME, weight.shape[0]), weight.shape[1])
    assert devices == ["meta"] * 3


def test_a_shorter_last_group_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    """160 inputs in groups of 64, the last of 32; compressed-tensors has such files."""
    pair = save_pair(tmp_path, "Llama", Compressed("pack-quantized", 4, (1, 64)))
    source, weight = source_of(pair.folder, pair.section), pair.dense[NAME]
    assert weight.shape[1] == 160
    assert source.rounded(NAME, tuple(weight.shape), slice(None)) is None
    assert torch.equal(source.read(NAME, tuple(weight.shape)), weight)


def test_integers_beyond_their_bits_are_refused(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "Llama", Compressed("int-quantized", 4, (1, 32)))
    pair.tensors[NAME][3, 5] = 100
    pair.write()
    with pytest.raises(CheckpointError, match="holds integers beyond 4 bits"):
        load(pair.folder)


@pytest.mark.parametrize(("group", "taken"), [(256, 128), (128, 128), (96, 32), (32, 32), (48, None), (16, None)])
def test_groups_that_the_kernels_take(group: int, taken: int | None) -> None:
    values = torch.randint(-8, 8, (3, 2 * group), dtype=torch.int8)
    scales, zeros = torch.rand(3, 2) + 0.5, torch.randint(-8, 8, (3, 2)).float()
    found = nibbles(values, scales.half().float(), zeros)
    assert (None if found is None else found.group) == taken
    if found is not None:
        grouped = values.view(3, 2, group).float() - zeros[:, :, None]
        assert torch.equal(found.dense(), (grouped * scales.half().float()[:, :, None]).flatten(1))


@pytest.mark.parametrize(("scale", "fits"), [(1e-3, True), (1e5, False), (1e-8, False)])
def test_a_scale_beyond_float16_is_not_held(scale: float, fits: bool) -> None:
    assert (nibbles(torch.ones(2, 64, dtype=torch.int8), torch.full((2, 2), scale)) is not None) == fits
    beside_larger = torch.tensor([[1e-8, 1e-2], [1e-8, 1e-2]])
    assert nibbles(torch.ones(2, 64, dtype=torch.int8), beside_larger) is not None


@pytest.mark.parametrize(("scale", "least"), [(0.1, -0.73), (0.0, 0.5), (0.0, -0.5), (0.0, 0.0), (1e-6, 7.0), (-0.1, 0.4)])
def test_a_minimum_becomes_a_zero_point(scale: float, least: float) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).view(1, 1, 32)
    scales, minimum = torch.tensor([[scale]]), torch.tensor([[least]])
    values, made, zeros = from_minimum(codes, scales, minimum)
    found = nibbles(values.view(1, 32), made, zeros)
    assert found is not None
    wanted = codes.view(1, 32) * scale + least
    torch.testing.assert_close(found.dense(), wanted.float(), rtol=0, atol=2e-3 * max(abs(least), 1e-9) + 1e-3 * abs(scale))


def test_the_log_says_how_far_loading_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pair = save_pair(tmp_path, "Llama", Gptq(4, 32))
    with caplog.at_level("INFO"):
        load(pair.folder)
        assert "layers" not in caplog.text
        monkeypatch.setattr(decoder, "PROGRESS_S", 0.0)
        load(pair.folder)
    assert "loaded 1 of 1 layers" in caplog.text


@pytest.mark.parametrize(
    ("stored", "held"), [(Gptq(4, 32), Precision.INT4), (Gptq(8, 32), Precision.INT8), (Fp8(), Precision.NONE)], ids=str
)
def test_a_description_counts_the_bits_that_are_held(stored: Stored, held: Precision, tmp_path: Path) -> None:
    """Before a weight is read: what does not fit the free memory is refused by it."""
    pair = save_pair(tmp_path, "Llama", stored)
    found, plain = describe(pair.folder), describe(pair.plain)
    assert found.held is held
    assert found.num_parameters == plain.num_parameters
    assert (found.resident_bytes < plain.resident_bytes) == (held is not Precision.NONE)
    loaded = load(pair.folder, backend=load_backend("numba", features=AVX2))
    assert found.resident_bytes <= 1.1 * loaded.resident_bytes
    assert describe(pair.folder, has_fp8=True).held is (Precision.FP8 if held is Precision.NONE else held)
