"""Tests the paged cache's memory: zero, aligned, reserved rather than written; blocks copied within their group only."""

from __future__ import annotations

import pytest
import torch

from headrace.core.model_info import KvGroup
from headrace.tensor.batch import KvCache, allocate_kv, stored_as
from headrace.tensor.device import CPU
from headrace.tensor.kernels.reference import KERNELS as REFERENCE

pytestmark = pytest.mark.pure


def resident_kib() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Rss:"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_caches_are_zero_and_aligned_and_a_layers_block_is_contiguous(dtype: torch.dtype) -> None:
    kv = allocate_kv([(2, 8), (1, 24)], (0, 1), (5, 3), 4, dtype, CPU)
    assert [tuple(layer.values.shape) for layer in kv.layers] == [(5, 2, 4, 2, 8), (3, 2, 4, 1, 24)]
    for layer in (layer.values for layer in kv.layers):
        assert layer.dtype is dtype
        assert layer[1].is_contiguous()
        assert layer.data_ptr() % 64 == 0
        assert not layer.any()


def test_a_large_cache_takes_no_memory_before_it_is_used() -> None:
    before = resident_kib()
    kv = allocate_kv([(8, 128)], (0,), (1 << 15,), 16, torch.bfloat16, CPU)
    assert kv.layers[0].values.nbytes == 2 << 30
    assert resident_kib() - before < 64 * 1024


def test_a_block_is_copied_in_all_layers_of_its_group() -> None:
    kv = allocate_kv([(1, 2), (1, 2), (1, 2)], (0, 1, 0), (3, 3), 2, torch.float32, CPU)
    for layer in kv.layers:
        layer.values[1] = 7.0
    kv.copy_block(0, 1, 2)
    assert [bool((layer.values[2] == 7.0).all()) for layer in kv.layers] == [True, False, True]


@pytest.mark.parametrize(("heads", "dim", "block_size"), [(2, 8, 4), (1, 24, 1), (3, 2, 5), (1, 6, 16)])
def test_a_rounded_block_and_its_scales_are_one_piece_of_the_size_that_is_counted(heads: int, dim: int, block_size: int) -> None:
    kv = allocate_kv([(heads, dim)], (0,), (5,), block_size, torch.int8, CPU)
    values, scales = kv.layers[0].values, kv.layers[0].scales
    assert scales is not None
    assert (values.shape, values.dtype) == ((5, 2, block_size, heads, dim), torch.int8)
    assert (scales.shape, scales.dtype) == ((5, 2, block_size, heads), torch.float32)
    size = stored_as(KvGroup((0,), heads, dim, 4), torch.int8).block_bytes(block_size)
    assert values[1].is_contiguous()
    assert scales[1].is_contiguous()
    assert values[1].data_ptr() - values[0].data_ptr() == size
    assert scales[0].data_ptr() - values[0].data_ptr() == values[0].nbytes
    assert values[0].nbytes + scales[0].nbytes == size


def test_scales_are_copied_and_cleared_with_their_block() -> None:
    kv = allocate_kv([(1, 2)], (0,), (3,), 2, torch.int8, CPU)
    scales = kv.layers[0].scales
    assert scales is not None
    scales[0], scales[1] = 1.0, 2.0
    kv.copy_block(0, 1, 2)
    kv.clear_pad_block()
    assert [{float(scale) for scale in scales[block].flatten()} for block in range(3)] == [{0.0}, {2.0}, {2.0}]


SHAPES, GROUP_OF, NUM_BLOCKS = [(2, 32), (1, 16), (2, 32), (2, 32)], (0, 1, 0, 0), (6, 4)


def filled(dtype: torch.dtype, seed: int = 0) -> KvCache:
    """Blocks 1.. of every layer written through the plain kernels."""
    kv = allocate_kv(SHAPES, GROUP_OF, NUM_BLOCKS, 4, dtype, CPU)
    torch.manual_seed(seed)
    for (heads, dim), layer in zip(SHAPES, kv.layers, strict=True):
        slots = torch.arange(4, 4 * len(layer.values))
        key, value = torch.randn(2, len(slots), heads, dim).to(torch.float32 if dtype == torch.int8 else dtype)
        REFERENCE.scatter_kv(key, value, layer.values, slots, kv_scales=layer.scales)
    return kv


def parts_of(kv: KvCache, group: int, block: int) -> list[torch.Tensor]:
    """Copies of what every layer of the group holds in a block."""
    layers = [layer for layer, owner in zip(kv.layers, kv.group_of, strict=True) if owner == group]
    return [part[block].clone() for layer in layers for part in (layer.values, layer.scales) if part is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_one_piece_of_memory_is_the_block_of_all_layers_of_its_group(dtype: torch.dtype) -> None:
    """What a tier elsewhere keeps of a block and writes back under another number is the block, to the bit, and nothing else changes."""
    kv, other = filled(dtype), filled(dtype, seed=1)
    for group, (source, target) in ((0, (2, 5)), (1, (3, 1))):
        piece = kv.block_bytes(group, source)
        assert piece.is_contiguous()
        assert piece.dtype == torch.uint8
        untouched = [(b, parts_of(other, group, b)) for b in range(NUM_BLOCKS[group]) if b != target]
        elsewhere = piece.numpy().tobytes()
        other.block_bytes(group, target).copy_(torch.frombuffer(bytearray(elsewhere), dtype=torch.uint8))
        for got, want in zip(parts_of(other, group, target), parts_of(kv, group, source), strict=True):
            assert torch.equal(got, want)
            assert want.any()
        for block, parts in untouched:
            assert all(torch.equal(got, want) for got, want in zip(parts_of(other, group, block), parts, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_block_is_as_large_as_the_group_says(dtype: torch.dtype) -> None:
    kv = filled(dtype)
    for group, layers, (heads, dim) in ((0, (0, 2, 3), (2, 32)), (1, (1,), (1, 16))):
        said = stored_as(KvGroup(layers, heads, dim, 4), dtype).block_bytes(4)
        assert kv.block_bytes(group, 0).nbytes == said
        assert kv.pools[group].nbytes == said * NUM_BLOCKS[group]


def test_a_model_that_keeps_nothing_of_a_sequence_has_no_pools() -> None:
    kv = allocate_kv([], (), (), 4, torch.float32, CPU)
    assert (kv.layers, kv.pools) == ([], ())
    kv.clear_pad_block()
