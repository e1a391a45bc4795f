"""From the logits of random rows to one token each: temperature, top_k, top_p, min_p, inverse distribution function.

What is kept, exactly (tokens ordered by falling weight, equal weights by rising id):
  top_k  the first k
  top_p  of those, the shortest prefix whose mass is at least top_p of their whole mass
  min_p  of those, the ones whose weight is at least min_p times the largest
The token is then the first one, in id order, at which the running sum of kept weights exceeds u times their whole. So the answer is a
function of the row and of u alone.

A full sort of the vocabulary is never made: a floor below which nothing can be kept is cheap to find, what stands above it is small, and
values are sorted without their ids (ties are settled afterwards), which numpy does with vector instructions.
Shape letters: N rows, V vocabulary, M tokens above the floor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]

_BLOCK = 256
"""Tokens summed at once before the fine search: [N, V / 256] running sums are cheap enough to keep in double precision."""


def to_weights(logits: Floats, peak: Floats, temperature: Floats) -> Floats:
    """exp((logits - peak) / temperature), a new [N, V]: proportional to probability, 1 at the best token, never above.

    peak [N] is each row's largest logit; temperature [N] > 0. Subtracting first keeps tiny temperatures from overflowing.
    """
    weights = logits - peak[:, None]
    if (temperature != 1.0).any():
        weights /= temperature[:, None]
    np.exp(weights, out=weights)
    return weights


def pick_filtered(weights: Floats, u: float, top_k: int, top_p: float, min_p: float) -> int:
    """The token of one row of weights [V] (largest 1) after the filters. top_k in 1..V, top_p in (0, 1], min_p in [0, 1]."""
    ids = np.flatnonzero(weights >= _floor(weights, top_k, top_p, min_p))
    above = weights[ids]
    falling = -np.sort(-above)[:top_k]
    size = len(falling)
    if top_p < 1.0:
        mass = weights.sum() if top_k >= len(weights) else falling.sum()
        size = min(size, int(np.searchsorted(_running(falling), top_p * float(mass))) + 1)
    if min_p > 0.0:
        size = max(1, min(size, int(np.count_nonzero(falling >= min_p))))
    kept = _best(above, falling[size - 1], size)
    running = _running(above[kept])
    place = min(np.searchsorted(running, u * running[-1], side="right"), np.searchsorted(running, running[-1]))
    return int(ids[kept][place])


def _floor(weights: Floats, top_k: int, top_p: float, min_p: float) -> float:
    """A weight below which no token is kept.

    With top_k: the k-th best. Else min_p, or what the nucleus cannot need: tokens lighter than (1 - top_p) * mass / V weigh less than
    (1 - top_p) of the mass together, so the others hold top_p of it. One per cent lower, for rounding.
    """
    vocab = len(weights)
    if top_k < vocab:
        return float(np.partition(weights, vocab - top_k)[vocab - top_k])
    return max(min_p, 0.99 * (1.0 - top_p) * float(weights.sum()) / vocab)


def _best(weights: Floats, threshold: float, size: int) -> Ints:
    """Places, in order, of the `size` largest weights [M], the last of which is `threshold`; of those equal to it the first stay."""
    kept = np.flatnonzero(weights >= threshold)
    surplus = len(kept) - size
    if surplus:
        tied = np.flatnonzero(weights[kept] == threshold)
        kept = np.delete(kept, tied[len(tied) - surplus :])
    return kept


def _running(weights: Floats) -> Doubles:
    """Cumulative sums along the last dim in double precision. Widened first: summing while converting is four times slower."""
    sums: Doubles = np.cumsum(weights.astype(np.float64), axis=-1)
    return sums


def pick(weights: Floats, u: Doubles) -> Ints:
    """The token [N] at which the running sum of weights [N, V] first exceeds u [N] in [0, 1) times the row's sum.

    Never a token of weight zero. Each row needs one positive weight. Two levels, blocks and then tokens, both in double precision.
    """
    sums = _block_sums(weights)
    block, target = _search(_running(sums), u)
    columns = block[:, None] * _BLOCK + np.arange(_BLOCK)
    inside = np.take_along_axis(weights, np.minimum(columns, weights.shape[1] - 1), axis=1)
    inside[columns >= weights.shape[1]] = 0.0
    place = _locate(_running(inside), target)
    token: Ints = block * _BLOCK + place
    return token


def _block_sums(weights: Floats) -> Floats:
    """[N, ceil(V / 256)] sums of consecutive runs of 256; the last run may be shorter."""
    num_rows, vocab = weights.shape
    whole = vocab // _BLOCK * _BLOCK
    body = weights[:, :whole].reshape(num_rows, -1, _BLOCK).sum(axis=2)
    return body if whole == vocab else np.concatenate((body, weights[:, whole:].sum(axis=1, keepdims=True)), axis=1)


def _search(running: Doubles, u: Doubles) -> tuple[Ints, Doubles]:
    """Block [N] in which u times the total lies, and how far into it [N]. running [N, M] are cumulative block sums."""
    target = u * running[:, -1]
    block = _locate(running, target)
    before = np.where(block > 0, np.take_along_axis(running, np.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    return block, target - before


def _locate(running: Doubles, target: Doubles) -> Ints:
    """First place [N] where running [N, M] exceeds target [N], held to the last place that still adds something."""
    place = (running <= target[:, None]).sum(axis=1)
    last = (running < running[:, -1:]).sum(axis=1)
    found: Ints = np.minimum(place, last)
    return found
