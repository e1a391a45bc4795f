"""Tests the reference kernels against `scaled_dot_product_attention` and numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from headrace.tensor.backends import load_backend
from headrace.tensor.kernels import Kernels
from headrace.tensor.kernels.reference import KERNELS

pytestmark = pytest.mark.pure


def test_reference_is_loadable_by_name_and_fits_the_signature_set() -> None:
    kernels: Kernels = KERNELS
    assert load_backend("reference").kernels is kernels


@pytest.mark.parametrize("group", [1, 2, 7])
def test_attention_over_blocks_equals_dense_attention(group: int) -> None:
    torch.manual_seed(0)
    block_size, kv_heads, dim, context, count = 4, 2, 16, 10, 6
    dense = torch.randn(context, 2, kv_heads, dim)
    cache = torch.full((6, 2, block_size, kv_heads, dim), math.nan)
    blocks = [4, 1, 3]
    for position in range(context):
        cache[blocks[position // block_size], :, position % block_size] = dense[position]
    query = torch.randn(count, kv_heads * group, dim)
    got = KERNELS.attention(
        query,
        cache,
        torch.tensor([[*blocks, 0, 0]], dtype=torch.int32),
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([context], dtype=torch.int32),
        scale=0.25,
    )
    keys, values = dense[:, 0].transpose(0, 1)[None], dense[:, 1].transpose(0, 1)[None]
    mask = torch.ones(count, context, dtype=torch.bool).tril(context - count)
    want = F.scaled_dot_product_attention(query.transpose(0, 1)[None], keys, values, attn_mask=mask, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(got, want[0].transpose(0, 1))


def test_a_window_of_one_returns_the_tokens_own_value() -> None:
    cache = torch.randn(2, 2, 4, 1, 8)
    got = KERNELS.attention(
        torch.randn(3, 2, 8),
        cache,
        torch.tensor([[1]], dtype=torch.int32),
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
        scale=1.0,
        window=1,
    )
    torch.testing.assert_close(got, cache[1, 1, 1:4].expand(3, 2, 8))


def test_scatter_skips_padding_rows_and_touches_nothing_else() -> None:
    cache = torch.zeros(3, 2, 4, 1, 2)
    key, value = torch.ones(3, 1, 2), 2 * torch.ones(3, 1, 2)
    KERNELS.scatter_kv(key, value, cache, torch.tensor([5, -1, 11]))
    expected = torch.zeros_like(cache)
    for block, offset in ((1, 1), (2, 3)):
        expected[block, 0, offset], expected[block, 1, offset] = 1, 2
    assert torch.equal(cache, expected)


def test_rotary_turns_the_half_split_pair_and_leaves_the_rest() -> None:
    angle = 0.5
    cos_sin = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]])
    query, key = torch.tensor([[[1.0, 0.0, 7.0]]]), torch.tensor([[[0.0, 1.0, 9.0]]])
    KERNELS.rotary(query, key, cos_sin, torch.tensor([1]))
    torch.testing.assert_close(query, torch.tensor([[[math.cos(angle), math.sin(angle), 7.0]]]))
    torch.testing.assert_close(key, torch.tensor([[[-math.sin(angle), math.cos(angle), 9.0]]]))


def test_rms_norm_adds_the_residual_in_place_and_norms_the_sum() -> None:
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    total = x + residual
    got = KERNELS.rms_norm(x, torch.full((8,), 2.0), 1e-6, residual=residual)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(got, 2.0 * F.rms_norm(total, (8,), eps=1e-6))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation_multiplies_the_activated_gate_with_up(activation: str) -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(KERNELS.gated_activation(torch.cat([gate, up], dim=-1), activation), act * up)
