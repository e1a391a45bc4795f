"""Tests masks applied by the kernel against the plain implementation: the same bits, and the same best tokens."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from headrace.tensor.kernels.cpu import backend as cpu
from headrace.tensor.kernels.cpu import mask
from headrace.tensor.kernels.cpu.jit import launch
from headrace.tensor.kernels.filters import Floats, Ints, Words, apply_masks, best_tokens, num_words

pytestmark = pytest.mark.pure

ROWS = np.array([0, 2, 3, 7])


def masks_of(kind: str, vocab: int, rng: np.random.Generator) -> Words:
    """Masks for ROWS."""
    words = rng.integers(0, 2**32, (len(ROWS), num_words(vocab)), dtype=np.uint32)
    if kind == "narrow":
        words[rng.random(words.shape) < 0.98] = 0
    elif kind == "wide":
        words[rng.random(words.shape) < 0.98] = 2**32 - 1
    elif kind == "none":
        words[:] = 0
    return words


def assert_same(logits: Floats, rows: Ints, words: Words) -> None:
    plain, fast = logits.copy(), logits.copy()
    best, peak = apply_masks(plain, rows, words)
    fast_best, fast_peak = cpu.mask_logits(fast, rows, words)
    assert plain.tobytes() == fast.tobytes()
    assert (best.tolist(), peak.tolist()) == (fast_best.tolist(), fast_peak.tolist())


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 255, 256, 257, 5003])
@pytest.mark.parametrize("kind", ["random", "narrow", "wide", "none"])
@pytest.mark.parametrize("values", ["normal", "ties", "infinite"])
def test_the_kernel_does_what_the_plain_function_does(vocab: int, kind: str, values: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (9, vocab)).astype(np.float32)
    if values == "ties":
        logits = np.round(logits)
    elif values == "infinite":
        logits[rng.random(logits.shape) < 0.5] = -np.inf
    assert_same(logits, ROWS, masks_of(kind, vocab, rng))


def test_a_mask_allows_the_tokens_whose_bits_are_set() -> None:
    """Against the definition, token by token."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (9, 100)).astype(np.float32)
    words = masks_of("random", 100, rng)
    masked = logits.copy()
    best, _ = cpu.mask_logits(masked, ROWS, words)
    for place, row in enumerate(ROWS):
        allowed = [token for token in range(100) if int(words[place, token // 32]) >> (token % 32) & 1]
        assert np.flatnonzero(masked[row] > -np.inf).tolist() == allowed
        assert best[place] == max(allowed, key=lambda token: (logits[row, token], -token))
    untouched = [row for row in range(9) if row not in ROWS]
    assert (masked[untouched] == logits[untouched]).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_share_the_rows(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(mask, "ELEMENTS_PER_THREAD", 1)
    before = launch.thread_limit()
    launch.set_thread_limit(threads)
    try:
        rng = np.random.default_rng(1)
        assert_same(rng.normal(0, 3, (9, 3000)).astype(np.float32), ROWS, masks_of("random", 3000, rng))
    finally:
        launch.set_thread_limit(before)


def test_rows_may_be_strided_and_the_logits_of_a_row_may_not() -> None:
    rng = np.random.default_rng(2)
    words = masks_of("random", 40, rng)
    wide = rng.normal(0, 1, (18, 40)).astype(np.float32)
    expected = wide[::2].copy()
    apply_masks(expected, ROWS, words)
    cpu.mask_logits(wide[::2], ROWS, words)
    assert (wide[::2] == expected).all()
    with pytest.raises(ValueError, match="one behind the other"):
        cpu.mask_logits(wide.T, ROWS, words)
    with pytest.raises(ValueError, match=r"masks of \(4, 2\)"):
        cpu.mask_logits(np.zeros((9, 70), dtype=np.float32), ROWS, words)


def test_the_best_token_is_the_first_of_equal_ones_and_nan_wins() -> None:
    logits = np.array([[0, 2, 2, 1], [0, np.nan, 5, 1]], dtype=np.float32)
    best, peak = best_tokens(logits)
    assert best.tolist() == [1, 1]
    assert peak[0] == 2
    assert np.isnan(peak[1])
