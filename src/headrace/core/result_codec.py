"""Results as bytes: for ranks in other processes. Never pickle. Only tests use it today, since a replica is one process.

    result = `core.columns` of COLUMNS
    header = {"step_id", "errors": [[row, message], ...]}

A result that is decoded is whole: the lengths of its columns are checked against each other here, and nowhere again.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any

from headrace.core.columns import FLOAT, INT, Unpacked, pack
from headrace.core.errors import HeadraceError
from headrace.core.plan import LogprobColumns, Result

OWN_COLUMNS = ("token_counts", "token_ids", "prompt_rows", "prompt_counts", "draft_counts", "drafts", "moves_done")
LOGPROB_TYPES = (INT, FLOAT, INT, INT, INT, FLOAT)
"""Type codes of the columns of `LogprobColumns`, in order. A result holds them twice: for output tokens and for the prompt."""
NUM_COLUMNS = len(OWN_COLUMNS) + 2 * len(LOGPROB_TYPES)


class ResultCodecError(HeadraceError):
    """Bytes that are not a result."""


def encode_result(result: Result) -> bytes:
    """One result as bytes."""
    columns = [getattr(result, name) for name in OWN_COLUMNS]
    return pack(
        {"step_id": result.step_id, "errors": result.errors}, [*columns, *result.logprobs.columns(), *result.prompt_logprobs.columns()]
    )


def decode_result(data: bytes) -> Result:
    """The result `encode_result` wrote. Raises ResultCodecError for anything else."""
    try:
        result = _decode(memoryview(data))
        _check(result)
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise ResultCodecError(f"not a result: {error}") from error
    return result


def _decode(data: memoryview) -> Result:
    found = Unpacked(data)
    if found.num_columns != NUM_COLUMNS:
        raise ValueError(f"{found.num_columns} columns, expected {NUM_COLUMNS}")
    own: dict[str, array[int]] = {name: found.take(INT) for name in OWN_COLUMNS}
    logprobs, prompt = (LogprobColumns(*(found.take(code) for code in LOGPROB_TYPES)) for _ in range(2))
    errors = tuple((_row(row), str(message)) for row, message in found.header["errors"])
    return Result(step_id=int(found.header["step_id"]), logprobs=logprobs, prompt_logprobs=prompt, errors=errors, **own)


def _row(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("an error's row is no integer")
    return value


def _check(result: Result) -> None:
    """Raises ValueError where the columns do not fit together."""
    _check_counts(result.token_counts, len(result.token_ids), "tokens")
    _check_counts(result.prompt_counts, len(result.prompt_logprobs), "prompt positions")
    _check_counts(result.draft_counts, len(result.drafts), "drafted tokens")
    if len(result.draft_counts) not in (0, len(result.token_counts)):
        raise ValueError("drafts of some rows only")
    if len(result.logprobs) not in (0, len(result.token_ids)):
        raise ValueError("log-probabilities and tokens differ in number")
    _check_logprobs(result.logprobs)
    _check_logprobs(result.prompt_logprobs)
    if len(result.prompt_rows) != len(result.prompt_counts) or 0 in result.prompt_logprobs.ranks:
        raise ValueError("prompt positions without a row, or not asked for")
    rows = [*result.prompt_rows, *(row for row, _ in result.errors)]
    if not all(0 <= row < len(result.token_counts) for row in rows):
        raise ValueError("a row that the step does not have")
    if not all(move_id > 0 for move_id in result.moves_done):
        raise ValueError("a move id that no asynchronous move has")


def _check_logprobs(columns: LogprobColumns) -> None:
    if len({len(column) for column in columns.columns()[:4]}) > 1:
        raise ValueError("the columns of log-probabilities differ in length")
    _check_counts(columns.top_counts, len(columns.top_ids), "listed tokens")
    _check_counts(columns.top_counts, len(columns.top_logprobs), "listed log-probabilities")


def _check_counts(counts: array[int], total: int, what: str) -> None:
    if any(count < 0 for count in counts) or sum(counts) != total:
        raise ValueError(f"the counts of {what} do not add up to {total}")
