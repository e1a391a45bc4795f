"""Tests the small fused operations of the CPU against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba")

from headrace.tensor.kernels.cpu.backend import KERNELS
from headrace.tensor.kernels.reference import KERNELS as REFERENCE

pytestmark = pytest.mark.pure

Error = Callable[[Tensor, Tensor], float]

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1 / 128}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize("dim", [1, 33, 64, 100, 2048])
def test_rms_norm(relative_error: Error, dtype: torch.dtype, dim: int) -> None:
    x, weight = (3 * torch.randn(13, dim)).to(dtype), torch.randn(dim).to(dtype)
    assert relative_error(KERNELS.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6)) < BOUNDS[dtype]


@DTYPES
def test_rms_norm_adds_the_residual_in_place(relative_error: Error, dtype: torch.dtype) -> None:
    x, weight = torch.randn(70, 1030).to(dtype), torch.randn(1030).to(dtype)
    mine = torch.randn(70, 1030).to(dtype)
    theirs = mine.clone()
    got, want = KERNELS.rms_norm(x, weight, 1e-5, residual=mine), REFERENCE.rms_norm(x, weight, 1e-5, residual=theirs)
    assert torch.equal(mine, theirs)
    assert relative_error(got, want) < BOUNDS[dtype]


@DTYPES
def test_rms_norm_of_heads_inside_a_wider_tensor_with_a_float32_weight(relative_error: Error, dtype: torch.dtype) -> None:
    wide, weight = torch.randn(9, 6, 40).to(dtype), torch.randn(40)
    query = wide[:, 1:4]
    got = KERNELS.rms_norm(query, weight, 1e-6)
    assert got.is_contiguous()
    assert relative_error(got, REFERENCE.rms_norm(query, weight, 1e-6)) < BOUNDS[dtype]


def _tables(tokens: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(300, rotary_dim // 2) * 6
    return torch.cat([angles.cos(), angles.sin()], dim=1), torch.randint(0, 300, (tokens,))


@DTYPES
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 64), (80, 32), (24, 2)])
def test_rotary_turns_in_place_and_leaves_neighbours_alone(dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    mine = torch.randn(21, 9, head_dim).to(dtype)
    theirs = mine.clone()
    cos_sin, positions = _tables(21, rotary_dim)
    KERNELS.rotary(mine[:, :5], mine[:, 5:7], cos_sin, positions)
    REFERENCE.rotary(theirs[:, :5], theirs[:, 5:7], cos_sin, positions)
    assert torch.equal(mine, theirs)


@DTYPES
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_scatter_writes_its_slots_and_nothing_else(dtype: torch.dtype, block_size: int) -> None:
    qkv = torch.randn(20, 8, 32).to(dtype)
    mine = torch.randn(64 // block_size + 1, 2, block_size, 2, 32).to(dtype)
    theirs, slots = mine.clone(), torch.randperm(60)[:20]
    slots[[3, 11]] = -1
    KERNELS.scatter_kv(qkv[:, 4:6], qkv[:, 6:], mine, slots)
    REFERENCE.scatter_kv(qkv[:, 4:6], qkv[:, 6:], theirs, slots)
    assert torch.equal(mine, theirs)


@DTYPES
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (40, 16)])
def test_rotary_scatter_is_rotary_then_scatter(dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    mine = torch.randn(20, 8, head_dim).to(dtype)
    theirs = mine.clone()
    my_cache = torch.zeros(9, 2, 8, 2, head_dim, dtype=dtype)
    their_cache, slots = my_cache.clone(), torch.randperm(64)[:20] + 8
    slots[5] = -1
    cos_sin, positions = _tables(20, rotary_dim)
    KERNELS.rotary_scatter(mine[:, :4], mine[:, 4:6], mine[:, 6:], cos_sin, positions, my_cache, slots)
    REFERENCE.rotary_scatter(theirs[:, :4], theirs[:, 4:6], theirs[:, 6:], cos_sin, positions, their_cache, slots)
    assert torch.equal(my_cache, their_cache)
    assert torch.equal(mine[:, :4], theirs[:, :4])


def _stored(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor | None]:
    """A cache filled with something, and its scales where it is rounded."""
    if dtype != torch.int8:
        return torch.randn(shape).to(dtype), None
    return torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[:-1])


STORED = pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float32, torch.bfloat16), (torch.float32, torch.int8), (torch.bfloat16, torch.int8)]
)


@STORED
def test_scatter_into_a_cache_with_a_type_of_its_own(dtype: torch.dtype, stored: torch.dtype) -> None:
    qkv, slots = torch.randn(20, 8, 32).to(dtype), torch.randperm(60)[:20]
    qkv[7, 5] = 0.0
    slots[[3, 11]] = -1
    mine, my_scales = _stored(stored, 9, 2, 7, 2, 32)
    theirs, their_scales = mine.clone(), None if my_scales is None else my_scales.clone()
    KERNELS.scatter_kv(qkv[:, 4:6], qkv[:, 6:], mine, slots, kv_scales=my_scales)
    REFERENCE.scatter_kv(qkv[:, 4:6], qkv[:, 6:], theirs, slots, kv_scales=their_scales)
    assert torch.equal(mine, theirs)
    if my_scales is not None and their_scales is not None:
        assert torch.equal(my_scales, their_scales)


@STORED
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (48, 16), (40, 16)])
def test_rotary_scatter_into_a_cache_with_a_type_of_its_own(
    dtype: torch.dtype, stored: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    mine = torch.randn(20, 8, head_dim).to(dtype)
    theirs, slots = mine.clone(), torch.randperm(64)[:20] + 8
    slots[5] = -1
    my_cache, my_scales = _stored(stored, 9, 2, 8, 2, head_dim)
    their_cache, their_scales = my_cache.clone(), None if my_scales is None else my_scales.clone()
    cos_sin, positions = _tables(20, rotary_dim)
    KERNELS.rotary_scatter(mine[:, :4], mine[:, 4:6], mine[:, 6:], cos_sin, positions, my_cache, slots, kv_scales=my_scales)
    REFERENCE.rotary_scatter(theirs[:, :4], theirs[:, 4:6], theirs[:, 6:], cos_sin, positions, their_cache, slots, kv_scales=their_scales)
    assert torch.equal(my_cache, their_cache)
    assert torch.equal(mine[:, :4], theirs[:, :4])
    if my_scales is not None and their_scales is not None:
        assert torch.equal(my_scales, their_scales)


def test_a_key_that_is_no_number_spoils_its_own_scale_only() -> None:
    key = torch.randn(3, 1, 16)
    key[1, 0, 5] = float("nan")
    cache, scales = torch.zeros(1, 2, 4, 1, 16, dtype=torch.int8), torch.zeros(1, 2, 4, 1)
    KERNELS.scatter_kv(key, torch.randn(3, 1, 16), cache, torch.arange(3), kv_scales=scales)
    assert scales[0, 0, :, 0].isnan().tolist() == [False, True, False, False]
    assert not scales[0, 1].isnan().any()


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dim", [3, 64, 1000])
def test_gated_activation(relative_error: Error, dtype: torch.dtype, activation: str, dim: int) -> None:
    gate_up = torch.randn(11, 2 * dim).to(dtype) * 4
    got, want = KERNELS.gated_activation(gate_up, activation), REFERENCE.gated_activation(gate_up, activation)
    assert got.dtype == dtype
    assert relative_error(got, want) < BOUNDS[dtype]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_of_extreme_gates_stay_finite(activation: str) -> None:
    gate = torch.tensor([[-3e38, -1e4, -100.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 100.0, 1e4, 1e38]])
    got = KERNELS.gated_activation(torch.cat([gate, torch.ones_like(gate)], dim=1), activation)
    want = REFERENCE.gated_activation(torch.cat([gate, torch.ones_like(gate)], dim=1), activation)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-30)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_bfloat16_rounding_is_torchs(values: list[float]) -> None:
    """The copy a cache write makes keeps every bit; a residual sum is rounded to nearest even, NaN stays NaN."""
    x = torch.tensor([values]).bfloat16()
    total, want = torch.zeros_like(x), torch.zeros_like(x)
    KERNELS.rms_norm(x, torch.ones(x.shape[1], dtype=torch.bfloat16), 1.0, residual=total)
    REFERENCE.rms_norm(x, torch.ones(x.shape[1], dtype=torch.bfloat16), 1.0, residual=want)
    torch.testing.assert_close(total, want, rtol=0, atol=0, equal_nan=True)
    halves = torch.full_like(x, 0.001953125)  # sums now need rounding
    mine, theirs = halves.clone(), halves.clone()
    KERNELS.rms_norm(x, torch.ones(x.shape[1], dtype=torch.bfloat16), 1.0, residual=mine)
    REFERENCE.rms_norm(x, torch.ones(x.shape[1], dtype=torch.bfloat16), 1.0, residual=theirs)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@DTYPES
def test_a_token_alone_has_the_bits_it_has_among_others(dtype: torch.dtype) -> None:
    x, weight = torch.randn(300, 600).to(dtype), torch.randn(600).to(dtype)
    normed, gated = KERNELS.rms_norm(x, weight, 1e-6), KERNELS.gated_activation(x, "silu")
    for token in (0, 150, 299):
        assert torch.equal(KERNELS.rms_norm(x[token : token + 1], weight, 1e-6)[0], normed[token])
        assert torch.equal(KERNELS.gated_activation(x[token : token + 1], "silu")[0], gated[token])


def test_what_is_not_supported_goes_to_the_reference() -> None:
    half = torch.randn(3, 8).half()
    assert torch.equal(KERNELS.gated_activation(half, "silu"), REFERENCE.gated_activation(half, "silu"))
    strided = torch.randn(8, 3).T
    weight = torch.randn(8)
    assert torch.equal(KERNELS.rms_norm(strided, weight, 1e-6), REFERENCE.rms_norm(strided, weight, 1e-6))


def test_no_tokens_are_no_error() -> None:
    assert KERNELS.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert KERNELS.gated_activation(torch.empty(0, 8), "silu").shape == (0, 4)
    cache = torch.zeros(1, 2, 4, 1, 16)
    KERNELS.scatter_kv(torch.empty(0, 1, 16), torch.empty(0, 1, 16), cache, torch.empty(0, dtype=torch.int64))
    assert not cache.any()
