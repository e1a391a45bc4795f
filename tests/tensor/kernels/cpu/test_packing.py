"""Tests that strips equal their reference implementation to the bit, whatever the shape, dtype and number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("numba")

from headrace.tensor.host import pages
from headrace.tensor.kernels.cpu.jit.launch import set_thread_limit, thread_limit
from headrace.tensor.kernels.cpu.jit.vector_ir import LANES, STRIP_COLUMNS
from headrace.tensor.kernels.cpu.packing import DEPTH, narrowed, pack_strips, padded

pytestmark = pytest.mark.pure

SLAB_ELEMENTS = 1 << 14
"""Weights packed at a time."""


def fits_bfloat16(weight: Tensor) -> bool:
    """True where every value of `weight` [out, in] is a bfloat16: the lower half of its float32 bits is zero."""
    if weight.dtype == torch.bfloat16:
        return True
    return all(not bool((slab.contiguous().view(torch.int32) & 0xFFFF).any()) for slab in _slabs(weight, 1))


def _slabs(weight: Tensor, multiple: int) -> Iterator[Tensor]:
    """Rows of `weight` in slices of some megabytes, of a multiple of `multiple` rows, so that temporary copies stay small."""
    rows = max(1, SLAB_ELEMENTS // (weight.shape[1] * multiple)) * multiple
    for first in range(0, weight.shape[0], rows):
        yield weight[first : first + rows]


def plain_strips(weight: Tensor, block: int) -> Tensor:
    """Weight [out, in] as one flat tensor: float32, or int32 words of two bfloat16 where nothing is lost by it.

    Blocks of `block` strips (the last may have fewer) stand one after the other. In a block, for each piece of DEPTH inputs (the last may
    be shorter) its strips stand one after the other, so that the work of `linear` reads memory strictly forward.
    """
    is_exact = weight.dtype == torch.bfloat16 or fits_bfloat16(weight)
    elements = padded(weight.shape[0]) * weight.shape[1]
    packed = torch.empty(elements // 2 if is_exact else elements, dtype=torch.int32 if is_exact else torch.float32)
    used = 0
    for slab in _slabs(weight, block * STRIP_COLUMNS):
        strips = F.pad(slab, (0, 0, 0, -slab.shape[0] % STRIP_COLUMNS)).reshape(-1, STRIP_COLUMNS, weight.shape[1])
        whole = strips.shape[0] // block * block
        for group in (strips[:whole].reshape(-1, block, STRIP_COLUMNS, weight.shape[1]), strips[whole:].unsqueeze(0)):
            if group.numel() > 0:
                pieces = torch.cat([_interleave(piece, is_exact).flatten(1) for piece in torch.split(group, DEPTH, dim=-1)], dim=1)
                packed[used : used + pieces.numel()] = pieces.flatten()
                used += pieces.numel()
    return packed


def _interleave(piece: Tensor, is_exact: bool) -> Tensor:
    """[..., STRIP_COLUMNS, length] -> [..., length, STRIP_COLUMNS], or words of two at half as many elements."""
    if not is_exact:
        return piece.float().transpose(-2, -1).contiguous()
    words = piece.to(torch.bfloat16).contiguous().view(torch.int32)  # of inputs k and k + 1
    return words.transpose(-2, -1).contiguous()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = thread_limit()
    set_thread_limit(request.param)
    yield
    set_thread_limit(before)


@pytest.mark.parametrize("kind", ["bfloat16", "exact", "float32"])
@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 2), (36, 64), (17, 258), (200, 1024), (196, 1058), (96, 2144), (2049, 512)])
def test_strips_equal_their_plain_twin(kind: str, block: int, rows: int, inputs: int, threads: None) -> None:
    weight = torch.randn(rows, inputs)
    if kind != "float32":
        weight = weight.bfloat16() if kind == "bfloat16" else weight.bfloat16().float()
    got, want = pack_strips(weight, block), plain_strips(weight, block)
    assert got.dtype == want.dtype == (torch.float32 if kind == "float32" else torch.int32)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("place", [(0, 0), (2, 7), (LANES + 1, 31), (68, 95)])
def test_one_value_that_bfloat16_cannot_hold_keeps_the_weight_in_float32(place: tuple[int, int]) -> None:
    weight = torch.randn(69, 96).bfloat16().float()
    assert narrowed(weight, 2) is not None
    weight[place] = 1.0 + 2**-20
    assert narrowed(weight, 2) is None
    assert torch.equal(pack_strips(weight, 2), plain_strips(weight, 2))


def test_values_that_are_no_numbers_keep_their_bits() -> None:
    weight = torch.tensor([[float("nan"), float("inf")], [-0.0, float("-inf")]])
    assert pack_strips(weight, 1)[:2].tolist() == [0x7F807FC0, 0xFF808000 - 2**32]


def test_a_transposed_weight_is_packed_as_if_it_lay_in_order() -> None:
    weight = torch.randn(64, 96).bfloat16()
    assert torch.equal(pack_strips(weight.t(), 2), plain_strips(weight.t().contiguous(), 2))


def test_a_large_weight_lies_in_memory_of_its_own() -> None:
    elements = pages.LEAST_BYTES // 4
    first, second = pages.empty(elements, torch.float32), pages.empty(elements, torch.float32)
    first.fill_(1.0)
    second.fill_(2.0)
    assert (float(first.sum()), float(second.sum())) == (elements, 2.0 * elements)
