"""Masks rows of logits by a grammar, and draws one random token per row: temperature, filters, the inverse of the distribution function.

The filters keep these tokens (ordered by falling weight, equal weights by rising id):
  top_k  the first k tokens
  top_p  the shortest prefix of the tokens kept by top_k whose mass is at least top_p of their whole mass
  min_p  the tokens of that prefix whose weight is at least min_p times the largest weight
The drawn token is the first one, in id order, at which the running sum of kept weights exceeds u times the sum of all kept weights.

Few tokens are above a floor below which none can be kept. Their weights are sorted without ids (ties are resolved afterwards), which NumPy
does with vector instructions. Shape letters: N rows, V vocabulary, M tokens above the floor (or rows with a mask).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Words = NDArray[np.uint32]
"""Grammar masks: bit i of word w allows token 32 w + i. Bits beyond the vocabulary are ignored."""

_BLOCK = 256
"""Tokens summed at once: [N, V / 256] running sums are cheap enough to keep in double precision."""


@dataclass(frozen=True, slots=True)
class FilterLimits:
    """temperature [N] > 0, top_k [N] in 1..V, top_p [N] in (0, 1], min_p [N] in [0, 1]."""

    temperature: Floats
    top_k: Ints
    top_p: Doubles
    min_p: Floats

    def of(self, rows: NDArray[np.bool_]) -> FilterLimits:
        return FilterLimits(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


ApplyMasks = Callable[[Floats, Ints, Words], tuple[Ints, Floats]]
Draw = Callable[[Floats, Floats, Doubles, FilterLimits], Ints]


def draw(logits: Floats, peak: Floats, u: Doubles, limits: FilterLimits) -> Ints:
    """The token [N] of each row of logits [N, V], whose largest are peak [N]; u [N] in [0, 1)."""
    weights = _to_weights(logits, peak, limits.temperature)
    filtered = (limits.top_k < logits.shape[1]) | (limits.top_p < 1.0) | (limits.min_p > 0.0)
    token_ids = np.zeros(len(logits), dtype=np.int64)
    if not filtered.all():
        token_ids[~filtered] = _pick(weights[~filtered] if filtered.any() else weights, u[~filtered])
    if filtered.any():
        token_ids[filtered] = _pick_filtered(weights if filtered.all() else weights[filtered], u[filtered], limits.of(filtered))
    return token_ids


def _to_weights(logits: Floats, peak: Floats, temperature: Floats) -> Floats:
    """A new [N, V]: 1 at the best token, never above. Subtracting the peak first keeps tiny temperatures from overflowing."""
    weights = logits - peak[:, None]
    if (temperature != 1.0).any():
        weights /= temperature[:, None]
    np.exp(weights, out=weights)
    return weights


def _pick_filtered(weights: Floats, u: Doubles, limits: FilterLimits) -> Ints:
    top_k, top_p, min_p = limits.top_k, limits.top_p, limits.min_p
    mass = weights.sum(axis=1).astype(np.float64)
    above, ids = _compact(weights, _floors(weights, mass, top_k, top_p, min_p))
    falling = np.sort(above, axis=1)[:, ::-1].copy()
    limited = top_k < weights.shape[1]
    size = np.where(limited, top_k, falling.shape[1])
    if (top_p < 1.0).any():
        falling[np.arange(falling.shape[1]) >= size[:, None]] = 0.0
        size = np.where(top_p < 1.0, _nucleus_size(falling, top_p, np.where(limited, np.inf, mass)), size)
    if (min_p > 0.0).any():
        size = np.minimum(size, (falling >= min_p[:, None]).sum(axis=1))
    size = np.maximum(size, 1)
    _drop_beyond(above, falling[np.arange(len(size)), size - 1], size)
    token: Ints = np.take_along_axis(ids, _pick(above, u)[:, None], axis=1)[:, 0]
    return token


def _floors(weights: Floats, mass: Doubles, top_k: Ints, top_p: Doubles, min_p: Floats) -> Floats:
    """A weight [N] below which no token of the row is kept.

    With top_k the k-th best. Else min_p, or what the nucleus cannot need: tokens lighter than (1 - top_p) * mass / V weigh less than (1 -
    top_p) of the mass together. The floor is one per cent lower, for rounding.
    """
    vocab = weights.shape[1]
    floors: Floats = np.maximum(min_p, 0.99 * (1.0 - top_p) * mass / vocab).astype(np.float32)
    limited = np.flatnonzero(top_k < vocab)
    if len(limited):
        place = vocab - top_k[limited]
        floors[limited] = np.partition(weights[limited], np.unique(place), axis=1)[np.arange(len(limited)), place]
    return floors


def _compact(weights: Floats, floors: Floats) -> tuple[Floats, Ints]:
    """Weights and ids [N, M] are in id order, filled up with weight 0. M is a multiple of the block, so that a row's block sums do not
    depend on how many its neighbours kept."""
    num_rows, vocab = weights.shape
    mask = weights >= floors[:, None]
    counts = np.count_nonzero(mask, axis=1)
    flat = np.flatnonzero(mask)
    rows = np.repeat(np.arange(num_rows), counts)
    starts = np.cumsum(counts) - counts
    width = -(-int(counts.max()) // _BLOCK) * _BLOCK
    places = rows * width + np.arange(len(flat)) - starts[rows]
    above = np.zeros((num_rows, width), dtype=np.float32)
    ids = np.zeros((num_rows, width), dtype=np.int64)
    above.ravel()[places] = weights.ravel()[flat]
    ids.ravel()[places] = flat - rows * vocab
    return above, ids


def _nucleus_size(falling: Floats, top_p: Doubles, mass: Doubles) -> Ints:
    """Where the mass is infinite, that of `falling` [N, M] counts."""
    running = _running(_block_sums(falling))
    wanted = top_p * np.where(np.isinf(mass), running[:, -1], mass)
    size: Ints = _descend(falling, running, np.nextafter(wanted, 0.0)) + 1
    return size


def _drop_beyond(above: Floats, threshold: Floats, size: Ints) -> None:
    """Zero, in place, all but the `size` [N] largest weights [N, M], the last of which is `threshold`; equal ones: the first stay."""
    kept = above >= threshold[:, None]
    surplus = kept.sum(axis=1) - size
    for row in np.flatnonzero((surplus > 0) & (threshold > 0.0)):
        tied = np.flatnonzero(above[row] == threshold[row])
        kept[row, tied[len(tied) - surplus[row] :]] = False
    above *= kept


def _running(weights: Floats) -> Doubles:
    """Weights are widened first: summing while converting is four times slower."""
    sums: Doubles = np.cumsum(weights.astype(np.float64), axis=-1)
    return sums


def _pick(weights: Floats, u: Doubles) -> Ints:
    """The token [N] at which the running sum of weights [N, V] first exceeds u [N] in [0, 1) times the row's sum.

    Never a token of weight zero. Each row needs one positive weight.
    """
    running = _running(_block_sums(weights))
    return _descend(weights, running, u * running[:, -1])


def _block_sums(weights: Floats) -> Floats:
    num_rows, vocab = weights.shape
    whole = vocab // _BLOCK * _BLOCK
    body = weights[:, :whole].reshape(num_rows, -1, _BLOCK).sum(axis=2)
    return body if whole == vocab else np.concatenate((body, weights[:, whole:].sum(axis=1, keepdims=True)), axis=1)


def _descend(weights: Floats, running: Doubles, target: Doubles) -> Ints:
    block = _locate(running, target)
    before = np.where(block > 0, np.take_along_axis(running, np.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    columns = block[:, None] * _BLOCK + np.arange(_BLOCK)
    inside = np.take_along_axis(weights, np.minimum(columns, weights.shape[1] - 1), axis=1)
    inside[columns >= weights.shape[1]] = 0.0
    place: Ints = block * _BLOCK + _locate(_running(inside), target - before)
    return place


def _locate(running: Doubles, target: Doubles) -> Ints:
    """First place [N] where running [N, M] exceeds target [N], held to the last place that still adds something."""
    place = (running <= target[:, None]).sum(axis=1)
    last = (running < running[:, -1:]).sum(axis=1)
    found: Ints = np.minimum(place, last)
    return found


def num_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def apply_masks(logits: Floats, rows: Ints, masks: Words) -> tuple[Ints, Floats]:
    """logits [N, V], masked in place; rows [M] ascending, without NaN; masks [M, num_words(V)]. Returns `best_tokens` of these rows."""
    vocab = logits.shape[1]
    is_allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=vocab).view(np.bool_)
    masked = np.where(is_allowed, logits[rows], np.float32(-np.inf))
    logits[rows] = masked
    return best_tokens(masked)


def best_tokens(logits: Floats) -> tuple[Ints, Floats]:
    """Each row's best token, of equal ones the lowest id, and its logit. NaN wins, so an unusable row shows in its best logit."""
    best = logits.argmax(axis=1)
    return best, np.take_along_axis(logits, best[:, None], axis=1)[:, 0]
