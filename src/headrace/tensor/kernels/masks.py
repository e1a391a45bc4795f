"""Grammar masks on rows of logits: what a mask forbids becomes minus infinity. The plain implementation, and the test oracle of kernels.

A mask is a row of 32-bit words; bit i of word w allows token 32 w + i. Bits beyond the vocabulary are ignored.
Shape letters: N rows, M of them masked, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.tensor.kernels.filters import Floats, Ints

Words = NDArray[np.uint32]

ApplyMasks = Callable[[Floats, Ints, Words], tuple[Ints, Floats]]


def num_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def apply_masks(logits: Floats, rows: Ints, masks: Words) -> tuple[Ints, Floats]:
    """Mask some rows in place. Returns `best_tokens` of these rows.

    logits  [N, V]; the masked rows hold no NaN
    rows    [M] ascending
    masks   [M, num_words(V)]
    """
    vocab = logits.shape[1]
    is_allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=vocab).view(np.bool_)
    masked = np.where(is_allowed, logits[rows], np.float32(-np.inf))
    logits[rows] = masked
    return best_tokens(masked)


def best_tokens(logits: Floats) -> tuple[Ints, Floats]:
    """Each row's best token, of equal ones the lowest id, and its logit. NaN wins, so an unusable row shows in its best logit."""
    best = logits.argmax(axis=1)
    return best, np.take_along_axis(logits, best[:, None], axis=1)[:, 0]
