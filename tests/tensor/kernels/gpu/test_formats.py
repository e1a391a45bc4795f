"""Tests the assembly that widens stored bits by running one instruction after another in Python.

Triton's interpreter has no assembly, and computes the same in another way.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from headrace.tensor.kernels.gpu import formats

pytestmark = pytest.mark.pure

WORD = 0xFFFFFFFF


def floats_of(word: int) -> tuple[float, float]:
    """The two bfloat16 of a word, low half first."""
    low, high = (struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in (word & 0xFFFF, word >> 16))
    return low, high


def fma(a: int, b: int, c: int) -> int:
    """Two bfloat16 in a word: a * b + c, each rounded once. What is tested is exact, so float64 loses nothing."""
    values = [x * y + z for x, y, z in zip(floats_of(a), floats_of(b), floats_of(c), strict=True)]
    halves = torch.tensor(values, dtype=torch.float64).to(torch.bfloat16).view(torch.int16).tolist()
    return int(halves[0] & 0xFFFF) | int(halves[1] & 0xFFFF) << 16


def pick(a: int, b: int, selector: int) -> int:
    """prmt: four of the eight bytes of b:a, one per nibble of the selector."""
    both = a | b << 32
    return sum(((both >> 8 * (selector >> 4 * byte & 7)) & 255) << 8 * byte for byte in range(4))


def logic(a: int, b: int, c: int, table: int) -> int:
    """lop3: bit n of the result is the table's bit (a_n, b_n, c_n)."""
    return sum((table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1) & 1) << n for n in range(32))


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "prmt.b32": pick,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": logic,
    "fma.rn.bf16x2": fma,
}


def execute(assembly: str, words: list[int]) -> list[int]:
    """The outputs $0, $1, .. of a block of instructions whose last operands are the given words."""
    num_operands = 1 + max(int(number) for number in re.findall(r"\$(\d+)", assembly))
    held = {f"${num_operands - len(words) + place}": word for place, word in enumerate(words)}
    for line in assembly.strip("{}; \n").split(";\n"):
        name, _, operands = line.strip().partition(" ")
        if name == ".reg" or not name:
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [held[source] if source in held else int(source, 0) for source in sources]
        held[target] = OPERATIONS[name](*values) & WORD
    return [held[f"${place}"] for place in range(num_operands - len(words))]


def instructions(assembly: object) -> str:
    """Without the declaration of registers, which is the first line."""
    return str(assembly.value).partition(";\n")[2]  # type: ignore[attr-defined]


def test_nibbles() -> None:
    words = [0xFEDCBA98, 0x76543210]
    outputs = execute(instructions(formats.INT4_WORDS), words)
    assert [floats_of(output) for output in outputs] == [tuple(float((word >> 4 * field & 15) - 8) for word in words) for field in range(8)]


def signed(byte: int) -> float:
    return float(byte - 256 if byte > 127 else byte)


@pytest.mark.parametrize("first", range(0, 256, 8))
def test_signed_bytes_of_two_words_and_of_one(first: int) -> None:
    words = [int.from_bytes(bytes(range(first + start, first + start + 4)), "little") for start in (0, 4)]
    outputs = execute(instructions(formats.INT8_WORDS), words)
    assert [floats_of(output) for output in outputs] == [(signed(first + field), signed(first + 4 + field)) for field in range(4)]
    pairs = [floats_of(output) for output in execute(instructions(formats.INT8_BYTES), words[:1])]
    assert pairs == [(signed(first), signed(first + 1)), (signed(first + 2), signed(first + 3))]


@pytest.mark.parametrize("first", range(0, 256, 4))
def test_fp8_bytes(first: int) -> None:
    """All but the two that are no number."""
    stored = bytes(range(first, first + 4))
    want = torch.tensor(list(stored), dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    outputs = execute(instructions(formats.FP8_BYTES), [int.from_bytes(stored, "little")])
    got = [value for output in outputs for value in floats_of(output)]
    assert [value for byte, value in zip(stored, got, strict=True) if byte & 127 != 127] == [value for value in want if value == value]


@pytest.mark.parametrize(("bits", "layout"), [(4, 128), (4, 512), (8, 64), (8, 256)])
def test_planar_words_hold_an_input_of_each_field(bits: int, layout: int) -> None:
    values = torch.randint(-8, 8, (3, 1024), dtype=torch.int8)
    words = formats.planar_words(values, bits, layout)
    fields = 32 // bits
    assert words.shape == (3, 1024 // fields)
    for row, position in ((0, 0), (1, 513), (2, 1023)):
        block, inside = divmod(position, layout)
        field, place = divmod(inside, layout // fields)
        word = int(words[row, block * (layout // fields) + place]) & WORD
        assert (word >> bits * field) & ((1 << bits) - 1) == int(values[row, position]) & ((1 << bits) - 1)
