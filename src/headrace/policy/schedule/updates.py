"""What a step emits: one row's output, and the updates of many rows that have one token each and nothing else."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from headrace.core.plan import TokenLogprobs
from headrace.core.update import SequenceUpdate
from headrace.policy.schedule.sequence import NO_DRAFTS
from headrace.policy.schedule.step_rows import RunningColumns


class Output(NamedTuple):
    """What one row of a step produced."""

    token_ids: array[int]
    logprobs: Sequence[TokenLogprobs | None] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    drafts: array[int] = NO_DRAFTS


NOTHING = Output(array("i"))


_UNSET = tuple(repeat(SequenceUpdate._field_defaults[name]) for name in SequenceUpdate._fields[4:])


def token_updates(columns: RunningColumns, token_ids: list[int]) -> list[SequenceUpdate]:
    """One more token for each sequence of these columns, nothing else.

    There is one per row and step, so the loop runs in C, past the tuple's Python constructor: half the time.
    """
    values = zip(columns.request_ids, columns.epochs, columns.indices, zip(token_ids, strict=True), *_UNSET, strict=False)
    return list(map(tuple.__new__, repeat(SequenceUpdate), values))
