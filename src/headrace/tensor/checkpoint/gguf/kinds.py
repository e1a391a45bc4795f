"""GGML's tensor types by number: names and block sizes. Imports no torch. `blocks` dequantizes them."""

from __future__ import annotations

from typing import NamedTuple


class BlockKind(NamedTuple):
    """`block` values, consecutive in a row, are in `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


READABLE = {
    0: BlockKind("F32", 1, 4),
    1: BlockKind("F16", 1, 2),
    2: BlockKind("Q4_0", 32, 18),
    3: BlockKind("Q4_1", 32, 20),
    6: BlockKind("Q5_0", 32, 22),
    7: BlockKind("Q5_1", 32, 24),
    8: BlockKind("Q8_0", 32, 34),
    10: BlockKind("Q2_K", 256, 84),
    11: BlockKind("Q3_K", 256, 110),
    12: BlockKind("Q4_K", 256, 144),
    13: BlockKind("Q5_K", 256, 176),
    14: BlockKind("Q6_K", 256, 210),
    30: BlockKind("BF16", 1, 2),
}
KINDS = {kind.name: kind for kind in READABLE.values()}
OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L",
    14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 21: "Q2_K_S", 32: "BF16",
}  # fmt: skip
"""Value of the key general.file_type -> the mixture of types, as llama.cpp calls it."""
