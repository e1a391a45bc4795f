"""Applies grammar masks to rows of logits on all threads, and finds the best token of each row in the same pass.

The logits of a block of 256 tokens that are all forbidden are written without being read. `kernels.filters` is the reference in tests.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from headrace.tensor.kernels.cpu.elementwise import share
from headrace.tensor.kernels.cpu.jit.launch import compile_kernel, helper, launch, thread_limit
from headrace.tensor.kernels.cpu.jit.scalars import as_f32, as_i32, as_i64, at, load, read_arguments, store
from headrace.tensor.kernels.filters import Floats, Ints, Words, num_words

Pointer = Any

BLOCK_WORDS = 8
BLOCK = 32 * BLOCK_WORDS
FORBIDDEN = np.float32(-np.inf)
ELEMENTS_PER_THREAD = 1 << 19


@helper
def mask_word(logits: Pointer, word: int, count: int) -> None:
    for i in range(count):  # no branch: LLVM makes vectors of it
        store(load(logits, i) if (word >> i) & 1 else FORBIDDEN, logits, i)


@helper
def mask_block(logits: Pointer, words: Pointer, count: int) -> bool:
    num_words = (count + 31) // 32
    seen = 0
    for w in range(num_words):
        seen |= load(words, w)
    if seen == 0:
        for i in range(count):
            store(FORBIDDEN, logits, i)
        return False
    for w in range(num_words):
        mask_word(at(logits, 32 * w), load(words, w), min(32, count - 32 * w))
    return True


@helper
def largest(logits: Pointer, count: int) -> float:
    """Numbers are compared four at a time, since each comparison waits for the one before."""
    a: Any = FORBIDDEN
    b, c, d = a, a, a
    whole = count // 4 * 4
    for i in range(0, whole, 4):
        a = max(a, load(logits, i))
        b = max(b, load(logits, i + 1))
        c = max(c, load(logits, i + 2))
        d = max(d, load(logits, i + 3))
    for i in range(whole, count):
        a = max(a, load(logits, i))
    top: float = max(max(a, b), max(c, d))
    return top


@helper
def mask_row(logits: Pointer, words: Pointer, vocab: int) -> int:
    """Returns the best token, of equal ones the first; 0 where none is allowed."""
    best: Any = FORBIDDEN
    block = 0
    for first in range(0, vocab, BLOCK):
        count = min(BLOCK, vocab - first)
        if mask_block(at(logits, first), at(words, first // 32), count):
            top = largest(at(logits, first), count)
            if top > best:
                best, block = top, first
    place = block
    while load(logits, place) < best:
        place += 1
    return place


class MaskArguments(NamedTuple):
    """rows int64 [num_rows], which rows of logits; masks uint32 [num_rows, masks_row]; best int64, peak float32 [num_rows]"""

    logits: int
    logits_row: int
    rows: int
    num_rows: int
    vocab: int
    masks: int
    masks_row: int
    best: int
    peak: int


def _mask(arguments: int, worker: int, workers: int) -> None:
    a: MaskArguments = read_arguments(MaskArguments, arguments)
    first, last = share(a.num_rows, worker, workers)
    for i in range(first, last):
        logits = at(as_f32(a.logits), load(as_i64(a.rows), i) * a.logits_row)
        best = mask_row(logits, at(as_i32(a.masks), i * a.masks_row), a.vocab)
        store(best, as_i64(a.best), i)
        store(load(logits, best), as_f32(a.peak), i)


@cache
def _kernel() -> int:
    return compile_kernel(_mask)


def apply_masks(logits: Floats, rows: Ints, masks: Words) -> tuple[Ints, Floats]:
    """Rows of logits may be strided. Raises ValueError when the logits of one row are not contiguous."""
    vocab = logits.shape[1]
    if logits.dtype != np.float32 or logits.strides[1] != logits.itemsize:
        raise ValueError(f"logits of {logits.dtype} with strides {logits.strides}: float32 is needed, a row's numbers one behind the other")
    if masks.shape != (len(rows), num_words(vocab)):
        raise ValueError(f"masks of {masks.shape} for {len(rows)} rows of {vocab} tokens")
    rows, masks = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(masks, np.uint32)
    best, peak = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.float32)
    arguments = MaskArguments(
        logits=logits.ctypes.data,
        logits_row=logits.strides[0] // logits.itemsize,
        rows=rows.ctypes.data,
        num_rows=len(rows),
        vocab=vocab,
        masks=masks.ctypes.data,
        masks_row=masks.shape[1],
        best=best.ctypes.data,
        peak=peak.ctypes.data,
    )
    workers = max(1, min(thread_limit(), len(rows), len(rows) * vocab // ELEMENTS_PER_THREAD))
    launch(_kernel(), arguments, workers, best, peak, logits, rows, masks)
    return best, peak
