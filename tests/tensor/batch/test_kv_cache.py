"""The paged cache's memory: zero, aligned, reserved rather than written; blocks copied within their group only."""

from __future__ import annotations

import pytest
import torch

from headrace.tensor.batch import allocate_kv


def resident_kib() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Rss:"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_caches_are_zero_aligned_and_contiguous(dtype: torch.dtype) -> None:
    kv = allocate_kv([(2, 8), (1, 24)], (0, 1), (5, 3), 4, dtype, "cpu")
    assert [tuple(layer.shape) for layer in kv.layers] == [(5, 2, 4, 2, 8), (3, 2, 4, 1, 24)]
    for layer in kv.layers:
        assert layer.dtype is dtype
        assert layer.is_contiguous()
        assert layer.data_ptr() % 64 == 0
        assert not layer.any()


def test_a_large_cache_takes_no_memory_before_it_is_used() -> None:
    before = resident_kib()
    kv = allocate_kv([(8, 128)], (0,), (1 << 15,), 16, torch.bfloat16, "cpu")
    assert kv.layers[0].nbytes == 2 << 30
    assert resident_kib() - before < 64 * 1024


def test_a_block_is_copied_in_all_layers_of_its_group() -> None:
    kv = allocate_kv([(1, 2), (1, 2), (1, 2)], (0, 1, 0), (3, 3), 2, torch.float32, "cpu")
    for layer in kv.layers:
        layer[1] = 7.0
    kv.copy_block(0, 1, 2)
    assert [bool((layer[2] == 7.0).all()) for layer in kv.layers] == [True, False, True]
