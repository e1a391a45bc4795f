"""Makes GGML's blocks dense one value at a time, in Python's own numbers, from the published layouts: the oracle of tests.

Floats are doubles here, rounded once at the end: the tested code may differ by the roundings of float32.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""Type -> (values, bytes) of a block."""
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Type -> where a block holds a float16."""


def slow_values(kind: str, content: bytes) -> list[float]:
    _, size = BLOCKS[kind]
    values = _VALUES[kind]
    return [value for begin in range(0, len(content), size) for value in values(content[begin : begin + size])]


def _half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def _nibble(packed: bytes, i: int) -> int:
    """Value i of 32 in 16 bytes."""
    return packed[i] & 15 if i < 16 else packed[i - 16] >> 4


def _q4_0(block: bytes) -> Iterator[float]:
    for i in range(32):
        yield _half(block, 0) * (_nibble(block[2:], i) - 8)


def _q4_1(block: bytes) -> Iterator[float]:
    for i in range(32):
        yield _half(block, 0) * _nibble(block[4:], i) + _half(block, 2)


def _q5_0(block: bytes) -> Iterator[float]:
    bits = int.from_bytes(block[2:6], "little")
    for i in range(32):
        yield _half(block, 0) * ((_nibble(block[6:], i) | (bits >> i & 1) << 4) - 16)


def _q5_1(block: bytes) -> Iterator[float]:
    bits = int.from_bytes(block[4:8], "little")
    for i in range(32):
        yield _half(block, 0) * (_nibble(block[8:], i) | (bits >> i & 1) << 4) + _half(block, 2)


def _q8_0(block: bytes) -> Iterator[float]:
    for (value,) in struct.iter_unpack("<b", block[2:]):
        yield _half(block, 0) * value


def _q2_k(block: bytes) -> Iterator[float]:
    for i in range(256):
        half, quarter, place = i // 128, i % 128 // 32, i % 32
        integer = block[16 + 32 * half + place] >> 2 * quarter & 3
        scale = block[i // 16]
        yield _half(block, 80) * (scale & 15) * integer - _half(block, 82) * (scale >> 4)


def _q3_k(block: bytes) -> Iterator[float]:
    packed = block[96:108]
    for i in range(256):
        half, quarter, place, group = i // 128, i % 128 // 32, i % 32, i // 16
        low = packed[group] & 15 if group < 8 else packed[group - 8] >> 4
        scale = (low | (packed[8 + group % 4] >> 2 * (group // 4) & 3) << 4) - 32
        integer = block[32 + 32 * half + place] >> 2 * quarter & 3
        is_high = block[place] >> (4 * half + quarter) & 1
        yield _half(block, 108) * scale * (integer if is_high else integer - 4)


def _scale_and_minimum(packed: bytes, group: int) -> tuple[int, int]:
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    rest = packed[group + 4]
    return rest & 15 | packed[group - 4] >> 6 << 4, rest >> 4 | packed[group] >> 6 << 4


def _q4_k(block: bytes) -> Iterator[float]:
    for i in range(256):
        group, place = i // 32, i % 32
        scale, least = _scale_and_minimum(block[4:16], group)
        byte = block[16 + 32 * (group // 2) + place]
        yield _half(block, 0) * scale * (byte >> 4 if group % 2 else byte & 15) - _half(block, 2) * least


def _q5_k(block: bytes) -> Iterator[float]:
    for i in range(256):
        group, place = i // 32, i % 32
        scale, least = _scale_and_minimum(block[4:16], group)
        byte = block[48 + 32 * (group // 2) + place]
        integer = (byte >> 4 if group % 2 else byte & 15) | (block[16 + place] >> group & 1) << 4
        yield _half(block, 0) * scale * integer - _half(block, 2) * least


def _q6_k(block: bytes) -> Iterator[float]:
    for i in range(256):
        half, quarter, place = i // 128, i % 128 // 32, i % 32
        byte = block[64 * half + 32 * (quarter % 2) + place]
        low = byte & 15 if quarter < 2 else byte >> 4
        high = block[128 + 32 * half + place] >> 2 * quarter & 3
        (scale,) = struct.unpack_from("<b", block, 192 + i // 16)
        yield _half(block, 208) * scale * ((low | high << 4) - 32)


_VALUES: dict[str, Callable[[bytes], Iterator[float]]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip
