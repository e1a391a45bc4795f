"""Tests FP8 as `rounding` and the reference define it; the GPU's kernels are compared with both (tests/tensor/kernels/gpu)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.tensor.backends import load_backend
from headrace.tensor.kernels.reference import KERNELS, PACKING
from headrace.tensor.kernels.rounding import Precision, round_weight

pytestmark = pytest.mark.pure

FP8 = torch.float8_e4m3fn


def test_a_weight_is_rounded_by_one_scale_per_output() -> None:
    weight = torch.randn(20, 64) * torch.logspace(-3, 3, 20)[:, None]
    weight[3] = 0.0
    rounded = round_weight(weight, Precision.FP8)
    assert (rounded.values.dtype, rounded.group, rounded.packed_bytes) == (FP8, 0, 20 * 64 + 4 * 20)
    assert rounded.values.float().abs().amax(dim=1)[:3].tolist() == [448.0] * 3
    error = (rounded.dense() - weight).abs()
    assert bool((error <= weight.abs() / 16 + weight.abs().amax(dim=1, keepdim=True) * 2**-18).all())  # half of the last of three bits


def test_a_product_rounds_its_inputs_too(relative_error: Callable[[Tensor, Tensor], float]) -> None:
    weight, bias, x = torch.randn(30, 256), torch.randn(30), torch.randn(9, 256)
    got = PACKING.pack_rounded(round_weight(weight, Precision.FP8), bias)(x)
    assert 1e-3 < relative_error(got, x @ weight.T + bias) < 6e-2


def test_a_cache_holds_what_is_beyond_its_range_as_its_largest_number() -> None:
    key, value = torch.tensor([[[1000.0, -2.0]]]), torch.tensor([[[-1e6, 0.3]]])
    cache = torch.zeros(1, 2, 4, 1, 2).to(FP8)
    KERNELS.scatter_kv(key, value, cache, torch.tensor([2]))
    assert cache[0, :, 2, 0].tolist() == [[448.0, -2.0], [-448.0, 0.3125]]


def test_the_cpu_refuses_fp8_by_name_and_says_what_to_use() -> None:
    pytest.importorskip("numba")
    with pytest.raises(ConfigError, match=r"quantization: .*fp8.*Use int8\."):
        load_backend("numba").packing.round_weight(torch.randn(64, 64), Precision.FP8)
