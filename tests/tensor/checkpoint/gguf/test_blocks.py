"""Tests every type's blocks against a dequantizer that computes one value at a time."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from gguf_blocks import BLOCKS, HALVES, slow_values

from headrace.tensor.checkpoint.formats.nibbles import nibbles
from headrace.tensor.checkpoint.gguf.blocks import DENSE, NIBBLES
from headrace.tensor.checkpoint.gguf.header import KINDS

pytestmark = pytest.mark.pure


def random_blocks(kind: str, count: int) -> bytes:
    """Blocks of random integers and scales, all bits of which matter."""
    rng = np.random.default_rng(len(kind) + ord(kind[1]))
    _, size = BLOCKS[kind]
    blocks = [bytearray(rng.integers(0, 256, size, dtype=np.uint8).tobytes()) for _ in range(count)]
    for block in blocks:
        for at in HALVES[kind]:
            struct.pack_into("<e", block, at, rng.normal())
    return b"".join(blocks)


def test_every_type_is_tested() -> None:
    assert DENSE.keys() == BLOCKS.keys()
    assert {name: (kind.block, kind.num_bytes) for name, kind in KINDS.items() if name in DENSE} == BLOCKS


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_what_the_layout_says(kind: str) -> None:
    content = random_blocks(kind, 24)
    wanted = torch.tensor(slow_values(kind, content), dtype=torch.float64).reshape(24, -1)
    found = DENSE[kind](torch.frombuffer(bytearray(content), dtype=torch.uint8).view(24, -1))
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    # A product of two and a difference: each rounded to 24 bits, of terms that may cancel.
    torch.testing.assert_close(found.double(), wanted, rtol=3e-7, atol=3e-7 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_of_zero_scale_are_zeros(kind: str) -> None:
    blocks = torch.full((2, BLOCKS[kind][1]), 0xA5, dtype=torch.uint8)
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = 0
    assert int(DENSE[kind](blocks).count_nonzero()) == 0


@pytest.mark.parametrize("kind", NIBBLES)
def test_blocks_in_few_bits_are_the_same_weights(kind: str) -> None:
    """Up to the rounding of scales and minimums to float16, which is that of the larger ones in a block."""
    content = torch.frombuffer(bytearray(random_blocks(kind, 24)), dtype=torch.uint8).view(24, -1)
    wanted = DENSE[kind](content)
    values, scales, zeros = NIBBLES[kind](content)
    found = nibbles(values.reshape(24, -1), scales.reshape(24, -1), None if zeros is None else zeros.reshape(24, -1))
    assert found is not None
    assert found.group == 32
    torch.testing.assert_close(found.dense(), wanted, rtol=0, atol=0 if kind == "Q4_0" else 1.5e-3 * float(wanted.abs().max()))
