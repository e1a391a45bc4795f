"""Tests that every code of the small floats stands for the value that its bits say."""

from __future__ import annotations

import pytest
import torch
from float_formats_kit import e2m1, e4m3, e8m0

from headrace.tensor.checkpoint.formats.scaled import decode_e2m1, decode_e8m0, to_float

pytestmark = pytest.mark.pure


def test_two_float4_in_every_byte() -> None:
    values = decode_e2m1(torch.arange(256, dtype=torch.uint8).reshape(2, 128))
    assert values.flatten().tolist() == [e2m1(code) for byte in range(256) for code in (byte & 15, byte >> 4)]
    assert values.signbit().flatten().tolist() == [code > 7 for byte in range(256) for code in (byte & 15, byte >> 4)]


def test_every_power_of_two() -> None:
    """The smallest is below float32's normal numbers."""
    assert decode_e8m0(torch.arange(255, dtype=torch.uint8)).tolist() == [e8m0(byte) for byte in range(255)]


def test_every_float8() -> None:
    codes = [byte for byte in range(256) if byte & 127 != 127]
    assert to_float(torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)).tolist() == [e4m3(byte) for byte in codes]
