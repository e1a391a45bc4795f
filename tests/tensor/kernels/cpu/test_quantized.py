"""Tests linears of small integers: the compiled one against the plain one, and both against what rounding promises."""

from __future__ import annotations

import math

import llvmlite.binding
import pytest
import torch
from llvmlite import ir
from torch import Tensor

from headrace.tensor.backends import load_backend
from headrace.tensor.kernels.cpu.integer import simd as integer_simd
from headrace.tensor.kernels.cpu.integer.quantized import IntegerLinear, can_pack
from headrace.tensor.kernels.cpu.integer.simd import STRIP_COLUMNS, STRIPS
from headrace.tensor.kernels.rounding import GROUPS, Precision, RoundedWeight, group_for, round_inputs, round_weight

pytestmark = pytest.mark.pure

REFERENCE, NUMBA = load_backend("reference").packing, load_backend("numba").packing
PRECISIONS = [Precision.INT8, Precision.INT4]


def made(out_features: int, in_features: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out_features, in_features, generator=generator) * 0.03, torch.randn(out_features, generator=generator)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 64), (65, 96), (448, 1088), (2240, 64)])
def test_the_compiled_product_is_the_plain_one(precision: Precision, has_bias: bool, out_features: int, in_features: int) -> None:
    weight, bias = made(out_features, in_features)
    rounded = round_weight(weight, precision)
    fast, plain = (packing.pack_rounded(rounded, bias if has_bias else None) for packing in (NUMBA, REFERENCE))
    assert isinstance(fast, IntegerLinear)
    assert fast.weight_bytes >= plain.weight_bytes
    for rows in (1, 2, 3, 4, 5, 6, 11):
        x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows))
        expected = plain(x)
        assert (fast(x) - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_does_not_depend_on_its_neighbours(precision: Precision) -> None:
    """Up to two whole blocks and a row: fours, a pair, one alone; spans of every length, so that strips are left over, too."""
    weight, bias = made(9 * STRIP_COLUMNS + 3, 256)
    linear = NUMBA.pack_rounded(round_weight(weight, precision), bias)
    assert isinstance(linear, IntegerLinear)
    x = torch.randn(9, 256)
    expected = REFERENCE.pack_rounded(round_weight(weight, precision), bias)(x)
    for span in (1, 2, 3, STRIPS, STRIPS + 3):
        linear.span = span
        alone = torch.cat([linear(x[row : row + 1]) for row in range(9)])
        assert (alone - expected).abs().max() <= 1e-6 * expected.abs().max()
        for rows in range(1, 10):
            assert torch.equal(linear(x[:rows]), alone[:rows])


def stored(out_features: int, in_features: int, group: int, *, has_zeros: bool) -> RoundedWeight:
    """A weight as a quantized checkpoint has it: float16 scales of both signs, among them the smallest ones, and zero points."""
    generator = torch.Generator().manual_seed(in_features)
    values = torch.randint(-8, 8, (out_features, in_features), generator=generator, dtype=torch.int8)
    shape = (out_features, in_features // group)
    scales = (torch.randn(shape, generator=generator) * 0.01).to(torch.float16)
    scales[0, 0], scales[-1, -1] = 6e-8, 0.0
    zeros = (torch.randint(-30, 31, shape, generator=generator) / 4).to(torch.float16)
    return RoundedWeight(values, scales, group, zeros if has_zeros else None)


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("out_features", [1, 65, 448])
def test_stored_scales_and_zero_points_are_multiplied_as_they_are(out_features: int, group: int, has_zeros: bool) -> None:
    weight = stored(out_features, 384, group, has_zeros=has_zeros)
    bias = torch.randn(out_features, generator=torch.Generator().manual_seed(out_features))
    fast, plain = (packing.pack_rounded(weight, bias) for packing in (NUMBA, REFERENCE))
    assert isinstance(fast, IntegerLinear)
    assert fast.weight_bytes >= plain.weight_bytes
    for rows in (1, 2, 4, 7):
        x = torch.randn(rows, 384, generator=torch.Generator().manual_seed(rows))
        expected = plain(x)
        bound = 1e-6 * max(expected.abs().max(), bias.abs().max())  # a product that the bias cancels is rounded as the bias is
        assert (fast(x) - expected).abs().max() <= bound
        values, scales = round_inputs(x)
        dense = (values * scales).double() @ weight.dense().double().T + bias
        assert (plain(x) - dense).abs().max() <= bound
    again = IntegerLinear.of(fast.packed())
    assert torch.equal(again(x), fast(x))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(precision: Precision, bad: float) -> None:
    weight, bias = made(64, 64)
    rounded = round_weight(weight, precision)
    x = torch.randn(5, 64)
    spoiled = x.clone()
    spoiled[2, 7] = bad
    for packing in (NUMBA, REFERENCE):
        linear = packing.pack_rounded(rounded, bias)
        result = linear(spoiled)
        assert result[2].isnan().all()
        others = [0, 1, 3, 4]
        assert torch.equal(result[others], linear(x)[others])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("packing", [NUMBA, REFERENCE], ids=["numba", "reference"])
def test_zeros_stay_zero(precision: Precision, packing) -> None:  # type: ignore[no-untyped-def]
    weight, bias = made(64, 64)
    linear = packing.pack_rounded(round_weight(weight, precision), bias)
    assert torch.equal(linear(torch.zeros(3, 64)), bias.expand(3, 64))
    nothing = packing.pack_rounded(round_weight(torch.zeros(64, 64), precision), bias)
    assert torch.equal(nothing(torch.randn(3, 64)), bias.expand(3, 64))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e4, 1e30])
def test_the_largest_inputs_and_weights_fit(precision: Precision, size: float) -> None:
    """All products at their extremes, of one sign and of both: nothing overflows on the way."""
    for sign in (torch.ones(1088), torch.tensor([1.0, -1.0]).repeat(544)):
        rounded = round_weight((sign * 0.02).repeat(64, 1), precision)
        expected = (rounded.dense()[0].double() @ sign.double()).item() * size
        linear = NUMBA.pack_rounded(rounded, None)
        assert (linear((sign * size)[None, :]).double() / expected - 1).abs().max() < 1e-6


def test_results_have_the_dtype_of_the_inputs() -> None:
    weight, _ = made(64, 64)
    x = torch.randn(3, 64)
    for precision in PRECISIONS:
        linear = NUMBA.pack_rounded(round_weight(weight.bfloat16(), precision), None)
        assert linear(x.bfloat16()).dtype == torch.bfloat16
        assert torch.equal(linear(x.bfloat16()), linear(x.bfloat16().float()).bfloat16())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounding_moves_no_weight_by_more_than_half_a_step(precision: Precision) -> None:
    weight, _ = made(37, 384)
    rounded = round_weight(weight, precision)
    if precision is Precision.INT8:
        steps = rounded.scales[:, None].expand(37, 384)
    else:
        steps = rounded.scales.float().abs().repeat_interleave(rounded.group, dim=1)
    clipped = 1.0 if precision is Precision.INT8 else 2.2  # int4 has no +8, and its scale is a rounded bfloat16
    assert ((rounded.dense() - weight).abs() <= 0.5001 * clipped * steps).all()
    low, high = (-127, 127) if precision is Precision.INT8 else (-8, 7)
    assert (rounded.values.min().item(), rounded.values.max().item()) >= (low, 0)
    assert rounded.values.max() <= high


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = made(50, 128)
    for precision in PRECISIONS:
        whole = round_weight(weight, precision)
        monkeypatch.setattr("headrace.tensor.kernels.rounding.SLAB_ELEMENTS", 300)
        parts = round_weight(weight, precision)
        monkeypatch.undo()
        assert torch.equal(whole.values, parts.values)
        assert torch.equal(whole.scales, parts.scales)


@pytest.mark.parametrize(("in_features", "group"), [(1024, 64), (192, 64), (96, 32), (160, 32), (48, 0), (7, 0)])
def test_a_width_that_no_group_divides_is_stored_in_bytes(in_features: int, group: int) -> None:
    assert group_for(in_features) == group
    assert round_weight(torch.randn(8, in_features), Precision.INT4).group == group


def test_every_group_size_has_its_arithmetic() -> None:
    weight, _ = made(70, 768)
    x = torch.randn(5, 768)
    for group in GROUPS:
        rounded = round_weight(weight, Precision.INT4, group=group)
        assert rounded.group == group
        expected = REFERENCE.pack_rounded(rounded, None)(x)
        assert (NUMBA.pack_rounded(rounded, None)(x) - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_widths_the_kernel_does_not_take_go_to_the_plain_one() -> None:
    for width in (7, 48):
        rounded = round_weight(torch.randn(8, width), Precision.INT8)
        assert not can_pack(rounded)
        x = torch.randn(2, width)
        assert torch.equal(NUMBA.pack_rounded(rounded, None)(x), REFERENCE.pack_rounded(rounded, None)(x))


def test_inputs_are_rounded_to_the_nearest_of_255() -> None:
    values, scales = round_inputs(torch.tensor([[1.0, -2.0, 0.0, 0.51 * 2 / 127], [0.0, 0.0, 0.0, 0.0]]))
    assert values.tolist() == [[64.0, -127.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    assert scales[0].item() == pytest.approx(2 / 127)


# --- CPUs with `vpdpbusd` and those without it: this one is of one kind ---


@pytest.mark.parametrize("lanes", [16, 8])
def test_a_dot_product_of_bytes_is_one_instruction_where_there_is_one(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ir.VectorType(ir.IntType(32), lanes)
    monkeypatch.setattr(integer_simd, "LANES", lanes)
    monkeypatch.setattr(integer_simd, "WORDS", words)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(words, [words] * 3), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(integer_simd.dot_bytes(builder, *function.args))
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    target = llvmlite.binding.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="icelake-server" if lanes == 16 else "alderlake")
    assembly = machine.emit_assembly(llvmlite.binding.parse_assembly(str(module)))
    assert "vpdpbusd" in assembly
    assert ("zmm" if lanes == 16 else "ymm") in assembly
