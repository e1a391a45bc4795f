"""Log-probabilities under the raw model distribution (float32 logits before bias, penalties, temperature and filters).

This is vLLM's default (`raw_logprobs`): what the model thought, not what the request's filters left of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.core.plan import TokenLogprobs

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def top_tokens(logits: Floats, k: int) -> tuple[Ints, Floats]:
    """Ids and logits [N, k] of each row's k best, best first, equal logits by rising id. logits [N, V] must hold no NaN.

    The first j columns are the same for every k >= j, so a row's answer does not depend on what its neighbours asked.
    """
    num_rows, vocab = logits.shape
    k = min(k, vocab)
    if k == 0:
        return np.zeros((num_rows, 0), dtype=np.int64), np.zeros((num_rows, 0), dtype=np.float32)
    threshold = np.partition(logits, vocab - k, axis=1)[:, vocab - k]
    rows, ids = np.divmod(np.flatnonzero(logits >= threshold[:, None]), vocab)
    values = logits[rows, ids]
    order = np.lexsort((ids, -values, rows))
    first = np.searchsorted(rows, np.arange(num_rows))
    chosen = order[first[:, None] + np.arange(k)]
    return ids[chosen], values[chosen]


def token_logprobs(logits: Floats, token_ids: Ints, num_top: Ints) -> list[TokenLogprobs]:
    """One entry per row. logits [N, V] raw and finite somewhere in each row; token_ids [N]; num_top [N] how many best to list."""
    best_ids, best = top_tokens(logits, int(num_top.max(initial=0)))
    peak = logits.max(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        log_sum = peak + np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
    value = np.take_along_axis(logits, token_ids[:, None], axis=1)
    rank = 1 + (logits > value).sum(axis=1)
    columns = (token_ids, (value - log_sum)[:, 0], rank, best_ids, best - log_sum, num_top)
    return [
        TokenLogprobs(token, logprob, place, tuple(ids[:k]), tuple(logprobs[:k]))
        for token, logprob, place, ids, logprobs, k in zip(*(column.tolist() for column in columns), strict=True)
    ]


def prompt_logprobs(logits: Floats, next_ids: Ints, num_top: int) -> list[TokenLogprobs] | None:
    """Entries for the prompt tokens next_ids [N] that follow the positions of logits [N, V]; None when a row is not a distribution."""
    if not np.isfinite(logits.max(axis=1)).all():
        return None
    return token_logprobs(logits, next_ids, np.full(len(next_ids), num_top, dtype=np.int64))
