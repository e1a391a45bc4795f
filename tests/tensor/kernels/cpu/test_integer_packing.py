"""Tests that compiled rounding and packing equal their reference to the bit, whatever the shape, dtype and number of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("numba")

from headrace.tensor.kernels import rounding
from headrace.tensor.kernels.cpu.integer.packing import pack_bytes, pack_nibbles, round_weight
from headrace.tensor.kernels.cpu.integer.simd import BYTE_OFFSET, NIBBLE_OFFSET, STRIP, STRIP_COLUMNS
from headrace.tensor.kernels.cpu.jit.launch import set_thread_limit, thread_limit
from headrace.tensor.kernels.cpu.jit.vector_ir import LANES
from headrace.tensor.kernels.rounding import Precision, RoundedWeight

pytestmark = pytest.mark.pure

SHAPES = [(1, 32), (64, 64), (65, 96), (130, 128), (3, 2048), (192, 160), (1000, 1024)]
INTEGERS = (Precision.INT8, Precision.INT4)


def plain_bytes(values: Tensor) -> Tensor:
    return _strips(values, BYTE_OFFSET, 4).permute(0, 3, 1, 2, 4).contiguous().view(torch.int32)[..., 0]


def plain_nibbles(values: Tensor) -> Tensor:
    octets = _strips(values, NIBBLE_OFFSET, 8)
    merged = octets[..., :4] | (octets[..., 4:] << 4)
    return merged.permute(0, 3, 1, 2, 4).contiguous().view(torch.int32)[..., 0]


def _strips(values: Tensor, offset: int, chunk: int) -> Tensor:
    """[out, in] -> uint8 [strips, STRIP, LANES, in / chunk, chunk]; rows of zero weights are added at the end."""
    padded = F.pad(values, (0, 0, 0, -values.shape[0] % STRIP_COLUMNS))
    return (padded.to(torch.int16) + offset).to(torch.uint8).reshape(-1, STRIP, LANES, values.shape[1] // chunk, chunk)


def assert_same(got: RoundedWeight, want: RoundedWeight) -> None:
    assert got.group == want.group
    assert torch.equal(got.values, want.values)
    assert got.scales.dtype == want.scales.dtype
    assert torch.equal(got.scales, want.scales)


@pytest.mark.parametrize("shape", SHAPES)
def test_packing_is_its_plain_twin(shape: tuple[int, int]) -> None:
    values = torch.randint(-128, 128, shape, dtype=torch.int8)
    assert torch.equal(pack_bytes(values), plain_bytes(values))
    nibbles = torch.randint(-8, 8, shape, dtype=torch.int8)
    assert torch.equal(pack_nibbles(nibbles), plain_nibbles(nibbles))


def test_packing_takes_a_view_that_is_not_aligned() -> None:
    values = torch.randint(-8, 8, (1 + 65 * 64,), dtype=torch.int8)[1:].view(65, 64)
    assert torch.equal(pack_bytes(values), plain_bytes(values))
    assert torch.equal(pack_nibbles(values.t().contiguous().t()), plain_nibbles(values))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", INTEGERS)
def test_rounding_is_its_plain_twin(shape: tuple[int, int], dtype: torch.dtype, precision: Precision) -> None:
    weight = torch.randn(shape).to(dtype)
    for group in (32, 64, 128):
        assert_same(round_weight(weight, precision, group=group), rounding.round_weight(weight, precision, group=group))


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 7.5, -7.5, 8.0, -8.0, 1e-30, -3e38]), min_size=64, max_size=64))
def test_ties_zeros_and_extremes_are_rounded_as_the_twin_does(values: list[float]) -> None:
    weight = torch.tensor(values).repeat(2, 1)
    for precision in INTEGERS:
        assert_same(round_weight(weight, precision, group=32), rounding.round_weight(weight, precision, group=32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("precision", INTEGERS)
def test_what_is_not_finite_spoils_its_scale_and_no_other(bad: float, precision: Precision) -> None:
    weight = torch.randn(3, 64)
    weight[1, 5] = bad
    got, want = round_weight(weight, precision), rounding.round_weight(weight, precision)
    assert not got.scales[1].isfinite().any()
    for row in (0, 2):
        assert torch.equal(got.values[row], want.values[row])
        assert torch.equal(got.scales[row], want.scales[row])


def test_threads_change_nothing() -> None:
    weight, before = torch.randn(700, 512), thread_limit()
    try:
        set_thread_limit(1)
        alone = [round_weight(weight, precision) for precision in INTEGERS]
    finally:
        set_thread_limit(before)
    for precision, want in zip(INTEGERS, alone, strict=True):
        assert_same(round_weight(weight, precision), want)


@pytest.mark.parametrize("shape", [(4, 33), (0, 64), (5, 7)])
def test_widths_that_registers_do_not_fit_are_left_to_the_twin(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    for precision in INTEGERS:
        assert_same(round_weight(weight, precision), rounding.round_weight(weight, precision))
