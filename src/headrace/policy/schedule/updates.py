"""What a step says about its rows: one row's output, and the updates of many rows that have one token each and nothing else."""

from __future__ import annotations

from array import array
from itertools import repeat
from typing import NamedTuple

from headrace.core.plan import TokenLogprobs
from headrace.core.update import SequenceUpdate
from headrace.policy.schedule.step_rows import Lane


class Output(NamedTuple):
    """What one row of a step produced."""

    token_ids: array[int]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


NOTHING = Output(array("i"))


_UNSAID = tuple(repeat(SequenceUpdate._field_defaults[name]) for name in SequenceUpdate._fields[4:])


def token_updates(lane: Lane, token_ids: list[int]) -> list[SequenceUpdate]:
    """One more token for each sequence of a lane, nothing else.

    There is one per row and step, so the loop runs in C, past the tuple's Python constructor: half the time.
    """
    values = zip(lane.request_ids, lane.epochs, lane.indices, zip(token_ids, strict=True), *_UNSAID, strict=False)
    return list(map(tuple.__new__, repeat(SequenceUpdate), values))
