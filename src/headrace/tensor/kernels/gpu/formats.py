"""Storage formats of weights and KV caches on the GPU (FP8, INT8, INT4), and their conversion to bfloat16 inside a kernel.

A weight of small integers is stored as *planar* words: in a layout block of P inputs, word i holds in its field j the input j * (P / J) +
i, where J is the number of fields (4 bytes or 8 nibbles). Each field of a tile of words is then a tile of consecutive inputs for a product
of its own, and nothing is shuffled.

An integer n in the low mantissa bits of the bfloat16 number 128 gives 128 + n, from which 128 is subtracted exactly.
tests/tensor/kernels/gpu/test_formats.py runs the instructions one by one. Triton's interpreter has no assembly and computes the same values
by arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
MAX_FP8 = tl.constexpr(448.0)
PLAIN, FP8, INT8, INT4 = (tl.constexpr(number) for number in range(4))
"""Weights: as computed with, FP8 (e4m3) and its scale per output, planar bytes and a scale per output, planar nibbles and a scale per
group. Caches: as computed with or another float, FP8 without scales, bytes and a scale per vector."""

_ONE_AND_136 = "mov.b32 one, 0x3f803f80;\nmov.b32 c, 0xc308c308;\n"  # 1 and -136, twice each
_SIGNED_BYTES = (  # of t, each byte twice, to {out}: 128 + the low bits, less 128 or, for a negative byte, 256
    "lop3.b32 a, t, 0x007f007f, 0x43004300, 0xEA;\nlop3.b32 b, t, 0x00800080, 0xc300c300, 0xEA;\nfma.rn.bf16x2 {out}, a, one, b;\n"
)
_FP8_BYTES = (  # exponent and mantissa moved into place, times 2^120, which makes up for the other bias
    "shr.u32 a, t, 4;\nand.b32 a, a, 0x07f007f0;\nlop3.b32 a, t, 0x80008000, a, 0xEA;\nfma.rn.bf16x2 {out}, a, b, c;\n"
)


def _assembly(*parts: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 lo, hi, a, b, c, t, one;\n" + "".join(parts) + "}")


INT4_WORDS = _assembly(
    _ONE_AND_136,
    "prmt.b32 lo, $8, $9, 0x5410;\nprmt.b32 hi, $8, $9, 0x7632;\n",
    *(
        f"shr.u32 t, {'lo' if j < 4 else 'hi'}, {4 * (j % 4)};\nlop3.b32 t, t, 0x000f000f, 0x43004300, 0xEA;\n"
        f"fma.rn.bf16x2 ${j}, t, one, c;\n"
        for j in range(8)
    ),
)
"""Two words to eight outputs: output j holds nibble j of both, less 8."""
INT8_WORDS = _assembly(
    _ONE_AND_136, *(f"prmt.b32 t, $4, $5, 0x{4 + j}{4 + j}{j}{j};\n" + _SIGNED_BYTES.format(out=f"${j}") for j in range(4))
)
"""Two words to four outputs: output j holds byte j of both."""


def _bytes_to_bfloat16(setup: str, convert: str) -> tl.constexpr:
    pick = (f"prmt.b32 t, $2, $2, 0x{2 * h + 1}{2 * h + 1}{2 * h}{2 * h};\n" + convert.format(out=f"${h}") for h in range(2))
    return _assembly(setup, *pick)


INT8_BYTES = _bytes_to_bfloat16(_ONE_AND_136, _SIGNED_BYTES)
FP8_BYTES = _bytes_to_bfloat16("mov.b32 b, 0x7b807b80;\nmov.b32 c, 0x80008000;\n", _FP8_BYTES)


@triton.jit
def _nibble(words, j: tl.constexpr):
    return (((words >> (4 * j)) & 15) - 8).to(tl.float32)


@triton.jit
def _byte(words, j: tl.constexpr):
    byte = (words >> (8 * j)) & 255
    return tl.where(byte > 127, byte - 256, byte).to(tl.float32)


@triton.jit
def expand_int4(words):
    """int32 [..] of eight nibbles -> eight tensors, field j: nibble - 8."""
    if IS_COMPILED:
        return tl.inline_asm_elementwise(
            INT4_WORDS, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (
            _nibble(words, 0), _nibble(words, 1), _nibble(words, 2), _nibble(words, 3),
            _nibble(words, 4), _nibble(words, 5), _nibble(words, 6), _nibble(words, 7),
        )  # fmt: skip


@triton.jit
def expand_int8(words):
    """int32 [..] of four signed bytes -> four tensors, field j: byte j."""
    if IS_COMPILED:
        return tl.inline_asm_elementwise(
            INT8_WORDS, "=&r,=&r,=&r,=&r,r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return _byte(words, 0), _byte(words, 1), _byte(words, 2), _byte(words, 3)


@triton.jit
def widen(x, FORMAT: tl.constexpr):
    """FP8: x holds the bytes, uint8; INT8: int8, without their scales; PLAIN: x as it is."""
    if FORMAT == PLAIN:
        return x
    elif not IS_COMPILED:
        if FORMAT == INT8:
            return x.to(tl.float32)
        byte = x.to(tl.int32)
        return (((byte & 127) << 20) | ((byte & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif FORMAT == FP8:
        return tl.inline_asm_elementwise(FP8_BYTES, "=&r,=&r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(INT8_BYTES, "=&r,=&r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4)


def cache_format(cache: Tensor, kv_scales: Tensor | None) -> tuple[int, Tensor]:
    """(format, scales or any tensor in their place)."""
    if cache.dtype == torch.float8_e4m3fn:
        return FP8.value, cache
    return (PLAIN.value, cache) if kv_scales is None else (INT8.value, kv_scales)


def readable(stored: Tensor) -> Tensor:
    return stored.view(torch.uint8) if stored.dtype == torch.float8_e4m3fn else stored


def planar_words(values: Tensor, bits: int, layout: int) -> Tensor:
    """Small integers [N, K], their low `bits` bits, as planar words int32 [N, K * bits / 32]. layout: inputs of a block, divides K."""
    rows, inputs = values.shape
    fields = 32 // bits
    split = values.view(rows, inputs // layout, fields, layout // fields)
    words = torch.zeros((rows, inputs // layout, layout // fields), dtype=torch.int32, device=values.device)
    for field in range(fields):
        words |= (split[:, :, field].to(torch.int32) & ((1 << bits) - 1)) << (bits * field)
    return words.view(rows, inputs // fields)
