"""Steps that between them launch every variant of every kernel that a model needs, so that nothing is compiled while requests run.

Whatever a variant is chosen by (rows, tokens, pairs of a mixture) changes at powers of two, and the number of a variant's programs is no
part of its name. Held to that by tests/tensor/kernels/gpu/test_compile.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.tensor.kernels.gpu.experts import MAX_SMALL


@dataclass(frozen=True, slots=True)
class WarmStep:
    """num_decodes rows of one token, or one row of num_tokens tokens of a prompt; the other is 0."""

    num_decodes: int
    num_tokens: int


def warm_steps(max_rows: int, max_tokens: int) -> list[WarmStep]:
    """For steps of at most max_rows decoding sequences, and of at most max_tokens tokens; smallest first."""
    decodes = [WarmStep(rows, 0) for rows in _powers_to(max_rows)]
    prompts = sorted({*_powers_to(min(max_tokens, 2 * MAX_SMALL)), max_tokens})
    return [*decodes, *(WarmStep(0, tokens) for tokens in prompts)]


def _powers_to(most: int) -> Iterator[int]:
    """1, 2, 4, .. and `most` itself."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most
