"""Packed linears of the CPU: equal to F.linear up to float32 rounding, and strips independent of the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from headrace.core.errors import ConfigError
from headrace.tensor.kernels import load_backend
from headrace.tensor.kernels.cpu import backend as cpu
from headrace.tensor.kernels.cpu import packing
from headrace.tensor.kernels.cpu.linear import CHUNK_ROWS, MOST_ROWS, OneDnnLinear, StripLinear, onednn_takes
from headrace.tensor.kernels.cpu.packing import can_strip, padded
from headrace.tensor.kernels.plain_packing import PACKING as PLAIN
from headrace.tensor.kernels.rounding import Precision

PACKING, DETERMINISTIC = (load_backend("numba", deterministic=promised).packing for promised in (False, True))
Error = Callable[[Tensor, Tensor], float]


def _weight(out_features: int, in_features: int, *, exact: bool) -> Tensor:
    weight = torch.randn(out_features, in_features)
    return weight.bfloat16().float() if exact else weight


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("out_features", "in_features"), [(4, 32), (68, 96), (200, 1024), (96, 2144)])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 27, 131])
def test_strips_equal_float64_products(relative_error: Error, exact: bool, out_features: int, in_features: int, rows: int) -> None:
    """2144 inputs are eight whole pieces of depth and a short one; 200 outputs leave a short last strip."""
    weight, x = _weight(out_features, in_features, exact=exact), torch.randn(rows, in_features)
    layer = StripLinear.pack(weight, None)
    assert layer.is_bf16 is exact
    assert layer.weight_bytes == padded(out_features) * in_features * (2 if exact else 4)
    assert relative_error(layer(x), x.double() @ weight.double().T) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_is_added_and_the_dtype_kept(relative_error: Error, dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(36, 64).to(dtype), torch.randn(36).to(dtype), torch.randn(5, 64).to(dtype)
    got = StripLinear.pack(weight, bias)(x)
    assert got.dtype == dtype
    want = x.double() @ weight.double().T + bias.double()
    assert relative_error(got, want) < (1e-6 if dtype == torch.float32 else 1 / 256)


@pytest.mark.parametrize("exact", [True, False])
def test_a_row_of_strips_has_the_same_bits_in_every_batch(exact: bool) -> None:
    layer, x = StripLinear.pack(_weight(132, 1120, exact=exact), torch.randn(132)), torch.randn(139, 1120)
    together = layer(x)
    for first, count in ((0, 1), (138, 1), (5, 2), (4, 4), (1, 7), (3, 12), (0, 38), (9, 125)):
        assert torch.equal(layer(x[first : first + count]), together[first : first + count])


def test_every_number_of_rows_is_packed_into_the_panels_it_is_multiplied_by() -> None:
    """Panels are cut twice, by who packs and by who multiplies: also where a chunk ends, whatever is left in it."""
    layer, x = StripLinear.pack(_weight(16, 32, exact=True), torch.randn(16)), torch.randn(2 * CHUNK_ROWS + 2 * MOST_ROWS, 32)
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in range(1, len(x) + 1):
        assert torch.equal(layer(x[:rows]), alone[:rows]), f"{rows} rows"


def test_storing_exact_weights_as_bfloat16_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = _weight(64, 160, exact=True), torch.randn(6, 160)
    halves = StripLinear.pack(weight, None)
    monkeypatch.setattr(packing, "narrowed", lambda weight, block: None)
    whole = StripLinear.pack(weight, None)
    assert (halves.is_bf16, whole.is_bf16) == (True, False)
    assert torch.equal(halves(x), whole(x))


def test_one_dnn_equals_the_reference(relative_error: Error) -> None:
    if not onednn_takes(torch.float32):
        pytest.skip("this torch has no oneDNN")
    weight, bias = torch.randn(48, 72), torch.randn(48)
    for rows in (1, 2, 33):
        x = torch.randn(rows, 72)
        assert relative_error(OneDnnLinear(weight, bias)(x), PLAIN.pack_linear(weight, bias)(x)) < 1e-5


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
