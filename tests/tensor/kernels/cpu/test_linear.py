"""Tests packed linears of the CPU: equal to F.linear up to float32 rounding, and strips independent of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

import llvmlite.binding
from llvmlite import ir

from headrace.core.errors import ConfigError
from headrace.tensor.backends import load_backend
from headrace.tensor.kernels.cpu import backend as cpu
from headrace.tensor.kernels.cpu import packing
from headrace.tensor.kernels.cpu.jit import vector_ir
from headrace.tensor.kernels.cpu.linear import CHUNK_ROWS, MOST_ROWS, Arithmetic, OneDnnLinear, StripLinear, onednn_takes
from headrace.tensor.kernels.cpu.packing import can_strip, padded
from headrace.tensor.kernels.reference import PACKING as PLAIN
from headrace.tensor.kernels.rounding import Precision

pytestmark = pytest.mark.pure

PACKING, DETERMINISTIC = (load_backend("numba", deterministic=promised).packing for promised in (False, True))
Error = Callable[[Tensor, Tensor], float]


def _weight(out_features: int, in_features: int, *, exact: bool) -> Tensor:
    weight = torch.randn(out_features, in_features)
    return weight.bfloat16().float() if exact else weight


def _strips(arithmetic: Arithmetic, out_features: int, in_features: int, bias: Tensor | None = None) -> tuple[StripLinear, Tensor]:
    """A random layer of this arithmetic, and its weight."""
    weight = _weight(out_features, in_features, exact=arithmetic is not Arithmetic.FLOAT32)
    layer = StripLinear.pack(weight, bias, torch.bfloat16 if arithmetic is Arithmetic.BFLOAT16 else torch.float32)
    assert layer.arithmetic is arithmetic
    return layer, weight


def _as_multiplied(arithmetic: Arithmetic, x: Tensor) -> Tensor:
    return (x.bfloat16() if arithmetic is Arithmetic.BFLOAT16 else x).double()


@pytest.mark.parametrize("arithmetic", Arithmetic)
@pytest.mark.parametrize(("out_features", "in_features"), [(4, 32), (68, 96), (68, 98), (200, 1024), (96, 2144)])
@pytest.mark.parametrize("rows", [1, 4, 9, 27, 131])
def test_strips_equal_float64_products(
    relative_error: Error, arithmetic: Arithmetic, out_features: int, in_features: int, rows: int
) -> None:
    """2144 inputs are eight whole pieces of depth and a short one; 200 outputs leave a short last strip; 98 inputs fill no register."""
    layer, weight = _strips(arithmetic, out_features, in_features)
    x = torch.randn(rows, in_features)
    assert layer.weight_bytes == padded(out_features) * in_features * (4 if arithmetic is Arithmetic.FLOAT32 else 2)
    assert relative_error(layer(x), _as_multiplied(arithmetic, x) @ weight.double().T) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_is_added_and_the_dtype_kept(relative_error: Error, dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(36, 64).to(dtype), torch.randn(36).to(dtype), torch.randn(5, 64).to(dtype)
    got = StripLinear.pack(weight, bias)(x)
    assert got.dtype == dtype
    want = x.double() @ weight.double().T + bias.double()
    assert relative_error(got, want) < (1e-6 if dtype == torch.float32 else 1 / 256)


@pytest.mark.parametrize("arithmetic", Arithmetic)
def test_a_row_of_strips_has_the_same_bits_in_every_batch(arithmetic: Arithmetic) -> None:
    layer, x = _strips(arithmetic, 132, 1120, torch.randn(132))[0], torch.randn(139, 1120)
    together = layer(x)
    for first, count in ((0, 1), (138, 1), (5, 2), (4, 4), (1, 7), (3, 12), (0, 38), (9, 125)):
        assert torch.equal(layer(x[first : first + count]), together[first : first + count])


@pytest.mark.parametrize("arithmetic", [Arithmetic.WIDENED, Arithmetic.BFLOAT16])
def test_every_number_of_rows_is_packed_into_the_panels_it_is_multiplied_by(arithmetic: Arithmetic) -> None:
    """Panels are cut twice, by who packs and by who multiplies: also where a chunk ends, whatever is left in it."""
    layer, x = _strips(arithmetic, 16, 32, torch.randn(16))[0], torch.randn(2 * CHUNK_ROWS + 2 * MOST_ROWS, 32)
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in range(1, len(x) + 1):
        assert torch.equal(layer(x[:rows]), alone[:rows]), f"{rows} rows"


def test_storing_exact_weights_as_bfloat16_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = _weight(64, 160, exact=True), torch.randn(6, 160)
    halves = StripLinear.pack(weight, None)
    monkeypatch.setattr(packing, "narrowed", lambda weight, block: None)
    whole = StripLinear.pack(weight, None)
    assert (halves.arithmetic, whole.arithmetic) == (Arithmetic.WIDENED, Arithmetic.FLOAT32)
    assert torch.equal(halves(x), whole(x))


@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13])
def test_rows_are_rounded_to_the_nearest_bfloat16_and_ties_to_even(rows: int) -> None:
    """The unit matrix shows what a row became."""
    x = torch.randn(rows, 98) * torch.tensor([1e-30, 1.0, 1e30]).repeat(33)[:98]
    x[:, 3:9] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 0.0, 3.3e38])
    got = StripLinear.pack(torch.eye(98), None, torch.bfloat16)(x)
    assert torch.equal(got, x.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_products_equal_their_plain_twin(relative_error: Error, dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(70, 1120).bfloat16(), torch.randn(70).to(dtype), torch.randn(17, 1120).to(dtype)
    twin, got = PLAIN.pack_linear(weight, bias, torch.bfloat16)(x), StripLinear.pack(weight, bias, torch.bfloat16)(x)
    assert got.dtype == twin.dtype == dtype
    assert relative_error(got, twin) < (1e-6 if dtype == torch.float32 else 1 / 128)


def test_a_row_of_bfloat16_products_that_is_not_finite_leaves_its_neighbours_alone() -> None:
    layer, x = _strips(Arithmetic.BFLOAT16, 40, 64)[0], torch.randn(13, 64)
    want = layer(x)
    x[4, 9], x[7, 0] = float("nan"), float("inf")
    got = layer(x)
    assert not got[4].isfinite().any()
    assert not got[7].isfinite().any()
    others = [row for row in range(13) if row not in (4, 7)]
    assert torch.equal(got[others], want[others])


def test_what_is_packed_says_what_is_multiplied() -> None:
    """The same words serve both arithmetics, which differ in their results."""
    wide, _ = _strips(Arithmetic.WIDENED, 40, 64)
    packed, x = wide.packed(), torch.randn(3, 64)
    narrow = StripLinear.of(replace(packed, kind=StripLinear.KINDS[torch.bfloat16]))
    assert (StripLinear.of(packed).arithmetic, narrow.arithmetic) == (Arithmetic.WIDENED, Arithmetic.BFLOAT16)
    assert (narrow(x) - wide(x.bfloat16().float())).abs().max() < 1e-4 < (narrow(x) - wide(x)).abs().max()
    for unfit in (replace(packed, kind="others"), replace(_strips(Arithmetic.FLOAT32, 40, 64)[0].packed(), kind=narrow.packed().kind)):
        with pytest.raises(ValueError, match="do not fit"):
            StripLinear.of(unfit)


@pytest.mark.parametrize("cpu_name", ["cooperlake", "znver4"])
def test_a_product_of_bfloat16_pairs_is_one_instruction_where_there_is_one(cpu_name: str) -> None:
    words, floats = (ir.VectorType(element, 16) for element in (ir.IntType(32), ir.FloatType()))
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(floats, [floats, words, words]), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(vector_ir.emit_dot(builder, *function.args))
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    machine = llvmlite.binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(cpu=cpu_name)
    assembly = machine.emit_assembly(llvmlite.binding.parse_assembly(str(module)))
    assert assembly.count("vdpbf16ps") == 1
    assert "zmm" in assembly


def test_one_dnn_equals_the_reference(relative_error: Error) -> None:
    if not onednn_takes(torch.float32):
        pytest.skip("this torch has no oneDNN")
    weight, bias = torch.randn(48, 72), torch.randn(48)
    for rows in (1, 2, 33):
        x = torch.randn(rows, 72)
        assert relative_error(OneDnnLinear(weight, bias)(x), PLAIN.pack_linear(weight, bias)(x)) < 1e-5


def test_one_dnn_rounds_wider_rows_to_its_weight(relative_error: Error) -> None:
    if not onednn_takes(torch.bfloat16):
        pytest.skip("this torch has no oneDNN")
    weight, bias, x = torch.randn(48, 72).bfloat16(), torch.randn(48).bfloat16().float(), torch.randn(5, 72)
    got = OneDnnLinear(weight, bias)(x)
    assert got.dtype == torch.float32
    assert relative_error(got, PLAIN.pack_linear(weight, bias)(x)) < 1 / 128


@pytest.mark.parametrize("has_bf16", [True, False])
def test_bfloat16_that_strips_cannot_hold_is_multiplied_where_onednn_refuses_it(
    relative_error: Error, monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    """A CPU with AVX2 alone: oneDNN raises as soon as it is given such a weight."""
    if not has_bf16:
        monkeypatch.setattr(cpu, "onednn_takes", lambda dtype: dtype == torch.float32)
    weight, x = torch.randn(5, 7).bfloat16(), torch.randn(3, 7).bfloat16()
    got = PACKING.pack_linear(weight, None)(x)
    assert got.dtype == torch.bfloat16
    assert relative_error(got.float(), x.float() @ weight.float().T) < 1e-2


@pytest.mark.parametrize(("out_features", "in_features"), [(3, 35), (5, 7), (64, 1), (0, 32)])
def test_shapes_that_strips_cannot_hold_are_multiplied_all_the_same(relative_error: Error, out_features: int, in_features: int) -> None:
    weight, x = torch.randn(out_features, in_features), torch.randn(6, in_features)
    assert not can_strip(weight)
    got = PACKING.pack_linear(weight, None)(x)
    assert got.shape == (6, out_features)
    assert out_features == 0 or relative_error(got, x @ weight.T) < 1e-5


def test_deterministic_kernels_take_strips_where_they_can() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(DETERMINISTIC.pack_linear(torch.randn(8, 32).to(dtype), None), StripLinear)


@pytest.mark.parametrize("weight", [torch.randn(3, 35), torch.randn(64, 1), torch.randn(8, 32).half()])
def test_deterministic_kernels_refuse_what_only_a_library_can_multiply(weight: Tensor) -> None:
    with pytest.raises(ConfigError, match="deterministic: a linear of"):
        DETERMINISTIC.pack_linear(weight, None)
    PACKING.pack_linear(weight, None)


def test_deterministic_kernels_refuse_rounded_widths_and_head_sizes_that_have_no_kernel() -> None:
    rounded = DETERMINISTIC.round_weight(torch.randn(8, 36), Precision.INT8)
    with pytest.raises(ConfigError, match="a rounded linear"):
        DETERMINISTIC.pack_rounded(rounded, None)
    query, cache = torch.randn(1, 2, 5), torch.randn(2, 2, 4, 1, 5)
    table, starts, lengths = torch.ones(1, 1, dtype=torch.int32), torch.tensor([0, 1]).int(), torch.ones(1).int()
    with pytest.raises(ConfigError, match="attention with heads of 5"):
        load_backend("numba", deterministic=True).kernels.attention(query, cache, table, starts, lengths, scale=1.0)


@pytest.mark.parametrize(("out_features", "in_features"), [(40, 32), (3, 35)])
def test_a_bfloat16_weight_for_float32_rows_is_its_widened_twin(out_features: int, in_features: int) -> None:
    weight, x = torch.randn(out_features, in_features).bfloat16(), torch.randn(5, in_features)
    for made in (PACKING, PLAIN, *((DETERMINISTIC,) if in_features % 2 == 0 else ())):
        narrow, wide = made.pack_linear(weight, None, torch.float32), made.pack_linear(weight.float(), None)
        assert type(narrow) is type(wide)
        assert narrow.weight_bytes == wide.weight_bytes
        assert torch.equal(narrow(x), wide(x))


def test_float16_weights_are_left_to_the_reference() -> None:
    layer = PACKING.pack_linear(torch.randn(8, 32).half(), None)
    assert layer(torch.randn(2, 32).half()).dtype == torch.float16


def test_no_rows_are_no_error() -> None:
    assert StripLinear.pack(torch.randn(8, 32), None)(torch.empty(0, 32)).shape == (0, 8)


def test_inputs_may_be_strided(relative_error: Error) -> None:
    weight, wide = torch.randn(8, 32), torch.randn(5, 64)
    assert relative_error(StripLinear.pack(weight, None)(wide[:, 16:48]), wide[:, 16:48] @ weight.T) < 1e-6
