"""Log-probabilities under the raw model distribution (logits before bias, penalties, temperature and filters), vLLM's default."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from headrace.core.plan import LogprobColumns

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def top_tokens(logits: Floats, k: int) -> tuple[Ints, Floats]:
    """Ids and logits [N, k] of each row's k best, best first, equal logits by rising id. logits [N, V] must hold no NaN.

    The first j columns are the same for every k >= j, so a row's result does not depend on how many its neighbours list.
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


def token_logprobs(logits: Floats, token_ids: Ints, num_top: Ints) -> LogprobColumns:
    """One token per row.

    logits     [N, V] raw; each row has a finite value
    token_ids  [N]
    num_top    [N] number of most likely tokens to list beside it
    """
    best_ids, best = top_tokens(logits, int(num_top.max(initial=0)))
    peak = logits.max(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        log_sum = peak + np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
    value = np.take_along_axis(logits, token_ids[:, None], axis=1)
    rank = 1 + (logits > value).sum(axis=1)
    is_listed = np.arange(best.shape[1]) < num_top[:, None]
    return LogprobColumns(
        _ints(token_ids),
        _floats((value - log_sum)[:, 0]),
        _ints(rank),
        _ints(is_listed.sum(axis=1)),
        _ints(best_ids[is_listed]),
        _floats((best - log_sum)[is_listed]),
    )


def _ints(values: Ints) -> array[int]:
    return array("i", values.astype(np.int32).tobytes())


def _floats(values: Floats) -> array[float]:
    return array("f", values.astype(np.float32).tobytes())


def not_asked(num_positions: int) -> LogprobColumns:
    zeros = bytes(4 * num_positions)
    return LogprobColumns(array("i", zeros), array("f", zeros), array("i", zeros), array("i", zeros))


def scattered(columns: LogprobColumns, rows: Ints, num_rows: int) -> LogprobColumns:
    """Columns of num_rows positions: position i of `columns` becomes position rows[i], ascending; the rest are not asked for."""
    spread = not_asked(num_rows)
    for wide, column in zip(spread.columns()[:4], columns.columns(), strict=False):
        np.frombuffer(wide, dtype=wide.typecode)[rows] = column
    spread.top_ids.extend(columns.top_ids)
    spread.top_logprobs.extend(columns.top_logprobs)
    return spread


def prompt_logprobs(logits: Floats, next_ids: Ints, num_top: int) -> LogprobColumns | None:
    """The prompt tokens next_ids [N], each under its row of logits [N, V]; None if a row is not finite."""
    if not np.isfinite(logits.max(axis=1)).all():
        return None
    return token_logprobs(logits, next_ids, np.full(len(next_ids), num_top, dtype=np.int64))
