"""Makes the updates of a step's output: for one row, and for many rows of one token each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from itertools import accumulate, pairwise, repeat
from typing import NamedTuple

from headrace.core.plan import Result, TokenLogprobs
from headrace.core.update import FinishReason, SequenceUpdate, StageSeconds
from headrace.policy.sequence import QUEUE, Sequence
from headrace.policy.step_builder import RunningColumns, StepRow, StepRows


class RowOutput(NamedTuple):
    token_ids: array[int]
    logprobs: Items[TokenLogprobs | None] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


NOTHING = RowOutput(array("i"))


def are_plain(rows: StepRows, result: Result) -> bool:
    count = rows.num_decodes
    if result.logprobs or (result.errors and min(row for row, _ in result.errors) < count):
        return False
    if result.prompt_rows and min(result.prompt_rows) < count:
        return False
    return result.token_counts[:count] == rows.samples[:count]


def outputs(result: Result, first: int) -> list[RowOutput]:
    ends = accumulate(result.token_counts[first:], initial=first)
    plain = [RowOutput(result.token_ids[begin:end]) for begin, end in pairwise(ends)]
    if not (result.logprobs or result.prompt_rows):
        return plain
    logprobs, prompts = result.logprobs.entries(), result.prompt_entries()
    ends = accumulate(result.token_counts[first:], initial=first)
    return [
        output._replace(logprobs=logprobs[begin:end], prompt_logprobs=prompts.get(row, ()))
        for row, (output, (begin, end)) in enumerate(zip(plain, pairwise(ends), strict=True), first)
    ]


def take_not_emitted(row: StepRow, entries: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
    """The entries count as emitted from now on."""
    if not row.seq.is_first:
        return ()  # the sequences of a request share their prompt, and the first one emits its log-probabilities
    fresh = entries[max(0, row.seq.num_prompt_logprobs_emitted - row.start) :]
    row.seq.num_prompt_logprobs_emitted += len(fresh)
    return fresh


def sequence_update(
    seq: Sequence,
    output: RowOutput,
    kept: int,
    now: float,
    finish: FinishReason | None,
    stop_token_id: int | None = None,
    error: str | None = None,
) -> SequenceUpdate:
    """The sequence notes that its first token was emitted. kept: tokens of the output that count; finish: None: it goes on"""
    request, token_ids, prompt_logprobs = seq.request, tuple(output.token_ids[:kept]), output.prompt_logprobs
    logprobs = tuple(entry for entry in output.logprobs[:kept] if entry is not None) if output.logprobs else ()
    num_cached_tokens = queue_time_s = stages = miss_reason = None
    entered: tuple[tuple[int, float], ...] = ()
    if kept and not seq.first_token_emitted:
        seq.first_token_emitted = True
        num_cached_tokens, queue_time_s, miss_reason = seq.num_cached, seq.stage_seconds[QUEUE], seq.miss_reason
    if finish is not None:
        seq.enter(seq.stage, now)
        stages = StageSeconds(*seq.stage_seconds)
        entered = tuple(seq.stages_entered)
    # fmt: off
    return SequenceUpdate(  # by place: fourteen fields given by name take 0.9 us longer
        request.request_id, request.epoch, seq.index, token_ids, logprobs, prompt_logprobs,
        finish, stop_token_id, error, num_cached_tokens, queue_time_s, stages, entered, miss_reason,
    )
    # fmt: on


_UNSET = tuple(repeat(SequenceUpdate._field_defaults[name]) for name in SequenceUpdate._fields[4:])


def token_updates(columns: RunningColumns, token_ids: list[int]) -> list[SequenceUpdate]:
    """The loop runs in C and bypasses the tuple's Python constructor, which halves its time."""
    values = zip(columns.request_ids, columns.epochs, columns.indices, zip(token_ids, strict=True), *_UNSET, strict=False)
    return list(map(tuple.__new__, repeat(SequenceUpdate), values))
