"""Makes the `Result` of a computed step."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.plan import LogprobColumns, Plan, Result, int_column
from headrace.engine.failpoints import failpoint
from headrace.engine.runner.batch import Rows, Selection
from headrace.engine.runner.slots import Ints, SlotState
from headrace.tensor.sampling import Sampled, prompt_logprobs
from headrace.tensor.sampling.sampler import NOT_A_DISTRIBUTION

_PROMPT_LOGITS = 1 << 23
"""Logits at a time, 32 MiB of float32: those of a long prompt would not fit into memory."""


@dataclass(slots=True)
class PromptLogprobColumns:
    """failed: rows whose logits were not finite"""

    rows: array[int] = field(default_factory=int_column)
    counts: array[int] = field(default_factory=int_column)
    logprobs: LogprobColumns = field(default_factory=LogprobColumns)
    failed: set[int] = field(default_factory=set)


class PromptLogprobs:
    """Computes the log-probabilities of prompt tokens from hidden states. head: hidden [N, E] -> logits [N, V]"""

    def __init__(self, head: Callable[[Tensor], Tensor], vocab_size: int, slots: SlotState) -> None:
        self._head, self._slots = head, slots
        self._piece = max(1, _PROMPT_LOGITS // vocab_size)

    def compute(self, rows: Rows, logprob_counts: Ints, selected: Selection, hidden: Tensor) -> PromptLogprobColumns:
        collected = PromptLogprobColumns()
        asked = np.flatnonzero(logprob_counts)
        for row, first in zip(asked.tolist(), selected.places(rows.row_starts[asked]).tolist(), strict=True):
            logprobs = self._of_row(int(rows.slots[row]), int(rows.starts[row]), hidden[first : first + logprob_counts[row]])
            if logprobs is None:
                collected.failed.add(row)
            else:
                collected.rows.append(row)
                collected.counts.append(len(logprobs))
                collected.logprobs.extend(logprobs)
        return collected

    def _of_row(self, slot: int, start: int, hidden: Tensor) -> LogprobColumns | None:
        """None if any of the logits are not finite."""
        slots, count = self._slots, len(hidden)
        collected = LogprobColumns()
        for begin in range(0, count, self._piece):
            end = min(begin + self._piece, count)
            failpoint("runner.prompt_logprobs")
            logits = self._head(hidden[begin:end]).float().cpu().numpy()
            next_ids = slots.token_ids[slot, start + begin + 1 : start + end + 1].astype(np.int64)
            logprobs = prompt_logprobs(logits, next_ids, int(slots.prompt_logprobs[slot]))
            if logprobs is None:
                return None
            collected.extend(logprobs)
        return collected


def row_errors(
    failed_positions: Ints, prompts: PromptLogprobColumns, has_failed: NDArray[np.bool_], mask_failures: Mapping[int, str]
) -> dict[int, str]:
    """
    failed_positions  rows of sampled positions that gave no token
    has_failed        [R] whether the row's slot had failed before
    mask_failures     row -> why its grammar cannot go on
    """
    failed = {*np.flatnonzero(has_failed).tolist(), *prompts.failed, *failed_positions.tolist()}
    return {**dict.fromkeys(failed, NOT_A_DISTRIBUTION), **mask_failures}


def are_good(rows: Ints, errors: Mapping[int, str]) -> NDArray[np.bool_]:
    if not errors:
        return np.ones(len(rows), dtype=np.bool_)
    return ~np.isin(rows, list(errors))


def make_result(
    plan: Plan, rows: Ints, is_kept: NDArray[np.bool_], sampled: Sampled, prompts: PromptLogprobColumns, errors: Mapping[int, str]
) -> Result:
    """rows, is_kept [P]: the row of each sampled position, and whether its token counts"""
    counts = np.bincount(rows[is_kept], minlength=plan.num_rows).astype(np.int32)
    token_ids = sampled.token_ids[is_kept].astype(np.int32)
    return Result(
        step_id=plan.step_id,
        token_counts=array("i", counts.tobytes()),
        token_ids=array("i", token_ids.tobytes()),
        logprobs=sampled.logprobs if len(token_ids) == len(rows) else sampled.logprobs.picked(np.flatnonzero(is_kept).tolist()),
        prompt_rows=prompts.rows,
        prompt_counts=prompts.counts,
        prompt_logprobs=prompts.logprobs,
        errors=tuple(sorted(errors.items())),
    )


def empty_result(plan: Plan) -> Result:
    return Result(step_id=plan.step_id, token_counts=array("i"), token_ids=array("i"))
