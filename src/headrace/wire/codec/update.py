"""Converts what an engine answers to messages and back: the SequenceUpdates of one frame, and the error with which it refuses a request.

Tokens are columns; what only some rows have is a sparse list whose entries name their row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypedDict, TypeVar, cast

from headrace.core.errors import (
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestTooLarge,
    SequenceFailed,
    ShownValue,
    Unavailable,
)
from headrace.core.plan import LogprobColumns, TokenLogprobs, int_column
from headrace.core.update import MAX_ENTERED, STAGES, FinishReason, MissReason, SequenceUpdate, StageSeconds
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec.fields import FINISH_KIND, FINISH_REASON, MISS_REASON, MISS_REASON_OF, printable
from headrace.wire.service import Attempt, Handle, MalformedFrame


def encode_updates(rows: Iterable[tuple[Handle, SequenceUpdate]]) -> pb.Updates:
    message = pb.Updates()
    handles: list[int] = []
    indices: list[int] = []
    token_counts: list[int] = []
    token_ids: list[int] = []
    for row, (handle, update) in enumerate(rows):
        handles.append(handle)
        indices.append(update.index)
        token_counts.append(len(update.token_ids))
        token_ids.extend(update.token_ids)
        _add_sparse(message, row, update)
    message.handles.extend(handles)
    message.indices.extend(indices)
    message.token_counts.extend(token_counts)
    message.token_ids.extend(token_ids)
    return message


class RowExtras(TypedDict, total=False):
    logprobs: LogprobColumns
    prompt_logprobs: LogprobColumns
    finish: FinishReason
    stop_token_id: int
    error: str
    num_cached_tokens: int
    queue_time_s: float
    stages: StageSeconds
    entered: tuple[tuple[int, float], ...]
    miss_reason: MissReason


def update_of(attempt: Attempt, index: int, token_ids: tuple[int, ...], extras: RowExtras) -> SequenceUpdate:
    return SequenceUpdate(request_id=attempt.request_id, epoch=attempt.epoch, index=index, token_ids=token_ids, **extras)


UpdateRow = tuple[Handle, int, tuple[int, ...], "RowExtras | None"]
"""The extras are None for nearly all rows."""


class UpdateRows:
    """The rows of one frame of updates, in order. A row is decoded when the iterator reaches it, so a large frame can be read in slices.

    The constructor and the iterator raise MalformedFrame.
    """

    def __init__(self, message: pb.Updates, *, takes_prompt: Callable[[Handle, int], bool] = lambda _handle, _index: True) -> None:
        _check_columns(message)
        self._takes_prompt = takes_prompt
        self._message = message
        num_rows = len(message.handles)
        self._finished = _by_row("finished", message.finished, num_rows)
        self._first = _by_row("first", message.first, num_rows)
        self._logprobs = _by_row("logprobs", message.logprobs, num_rows)
        self._prompt_logprobs = _by_row("prompt_logprobs", message.prompt_logprobs, num_rows)

    def __iter__(self) -> Iterator[UpdateRow]:
        message = self._message
        handles = cast("Iterable[Handle]", message.handles)
        token_ids = tuple(message.token_ids)
        sparse = {*self._finished, *self._first, *self._logprobs, *self._prompt_logprobs}
        end = 0
        for row, (handle, index, count) in enumerate(zip(handles, message.indices, message.token_counts, strict=True)):
            start, end = end, end + count
            yield handle, index, token_ids[start:end], self._extras(row, handle, index, count) if row in sparse else None

    def _extras(self, row: int, handle: Handle, index: int, num_tokens: int) -> RowExtras:
        extras = RowExtras()
        if (finished := self._finished.get(row)) is not None:
            _add_finish(extras, finished)
        if (first := self._first.get(row)) is not None:
            if first.HasField("num_cached_tokens"):
                extras["num_cached_tokens"] = first.num_cached_tokens
            if first.HasField("queue_time_s"):
                extras["queue_time_s"] = first.queue_time_s
            if first.miss_reason in MISS_REASON_OF:  # a newer engine may have others
                extras["miss_reason"] = MISS_REASON_OF[first.miss_reason]
        if (entry := self._logprobs.get(row)) is not None:
            extras["logprobs"] = logprobs = _decode_logprobs(entry.values)
            if len(logprobs) != num_tokens:
                raise MalformedFrame(f"updates: {len(logprobs)} logprobs for {num_tokens} tokens")
        if (entry := self._prompt_logprobs.get(row)) is not None and self._takes_prompt(handle, index):
            extras["prompt_logprobs"] = _decode_logprobs(entry.values)
        return extras


def _check_columns(message: pb.Updates) -> None:
    if not len(message.handles) == len(message.indices) == len(message.token_counts):
        raise MalformedFrame("updates: columns differ in length")
    if sum(message.token_counts) != len(message.token_ids):
        raise MalformedFrame(f"updates: counts sum to {sum(message.token_counts)}, but there are {len(message.token_ids)} token ids")


def _add_finish(extras: RowExtras, finished: pb.RowFinish) -> None:
    if finished.reason not in FINISH_REASON:
        raise MalformedFrame(f"updates: unknown finish reason {finished.reason}")
    extras["finish"] = FINISH_REASON[finished.reason]
    if finished.HasField("stop_token_id"):
        extras["stop_token_id"] = finished.stop_token_id
    if finished.HasField("error"):
        extras["error"] = finished.error
    if finished.HasField("stages"):
        spent = finished.stages
        extras["stages"] = StageSeconds(spent.queue, spent.prefill, spent.decode, spent.preempted, spent.stalled)
        extras["entered"] = _entered(spent)


def _entered(spent: pb.StageSeconds) -> tuple[tuple[int, float], ...]:
    """Stages that a newer engine has and this gateway does not know are left out. Raises MalformedFrame."""
    if not len(spent.entered_stages) == len(spent.entered_s) <= MAX_ENTERED:
        raise MalformedFrame("updates: columns of the entered stages differ in length, or are too long")
    return tuple([(stage, since) for stage, since in zip(spent.entered_stages, spent.entered_s, strict=True) if stage < len(STAGES)])


def _add_sparse(message: pb.Updates, row: int, update: SequenceUpdate) -> None:
    if update.finish is not None:
        error = None if update.error is None else printable(update.error)
        stages = None if update.stages is None else pb.StageSeconds(**update.stages._asdict())
        if stages is not None:
            stages.entered_stages.extend([stage for stage, _ in update.entered])
            stages.entered_s.extend([since for _, since in update.entered])
        message.finished.add(row=row, reason=FINISH_KIND[update.finish], stop_token_id=update.stop_token_id, error=error, stages=stages)
    if update.num_cached_tokens is not None or update.queue_time_s is not None:
        reason = None if update.miss_reason is None else MISS_REASON[update.miss_reason]
        message.first.add(row=row, num_cached_tokens=update.num_cached_tokens, queue_time_s=update.queue_time_s, miss_reason=reason)
    if update.logprobs:
        message.logprobs.add(row=row, values=_encode_logprobs(update.logprobs))
    if update.prompt_logprobs:
        message.prompt_logprobs.add(row=row, values=_encode_logprobs(update.prompt_logprobs))


_LOGPROB_FIELDS = ("token_ids", "logprobs", "ranks", "top_counts", "top_ids", "top_logprobs")

Entry = TypeVar("Entry", pb.RowFinish, pb.RowFirst, pb.RowLogprobs)


def _by_row(name: str, entries: Iterable[Entry], num_rows: int) -> dict[int, Entry]:
    by_row: dict[int, Entry] = {}
    for entry in entries:
        if entry.row >= num_rows or entry.row in by_row:
            raise MalformedFrame(f"updates: {name} names row {entry.row} of {num_rows} twice or outside")
        by_row[entry.row] = entry
    return by_row


def _encode_logprobs(positions: Sequence[TokenLogprobs]) -> pb.Logprobs:
    if isinstance(positions, LogprobColumns):
        return pb.Logprobs(**dict(zip(_LOGPROB_FIELDS, positions.columns(), strict=True)))
    return pb.Logprobs(
        token_ids=[p.token_id for p in positions],
        logprobs=[p.logprob for p in positions],
        ranks=[p.rank for p in positions],
        top_counts=[len(p.top_ids) for p in positions],
        top_ids=[token_id for p in positions for token_id in p.top_ids],
        top_logprobs=[logprob for p in positions for logprob in p.top_logprobs],
    )


def _decode_logprobs(message: pb.Logprobs) -> LogprobColumns:
    """Gives columns: an answer may have a million alternatives."""
    count = len(message.token_ids)
    if not len(message.logprobs) == len(message.ranks) == len(message.top_counts) == count:
        raise MalformedFrame("logprobs: columns differ in length")
    if not sum(message.top_counts) == len(message.top_ids) == len(message.top_logprobs):
        raise MalformedFrame("logprobs: top columns differ in length")
    try:
        token_ids, top_counts, top_ids = [int_column(column[:]) for column in (message.token_ids, message.top_counts, message.top_ids)]
    except OverflowError:
        raise MalformedFrame("logprobs: a token id beyond 31 bits") from None
    logprobs, ranks, top_logprobs = array("d", message.logprobs[:]), array("q", message.ranks[:]), array("d", message.top_logprobs[:])
    return LogprobColumns(token_ids, logprobs, ranks, top_counts, top_ids, top_logprobs)


NO_VALUE = "null"


def encode_rejected(handle: Handle, error: Exception) -> pb.Rejected:
    """The gateway gets an error of the same class, with the same fields and message.

    An error that is not a HeadraceError arrives as SequenceFailed with a general text: its own may say more than a client should read.
    """
    message = pb.Rejected(handle=handle, kind=_kind(error), message=printable(str(error)))
    if isinstance(error, InvalidRequest):
        message.field, message.limit = printable(error.field), printable(error.limit)
        message.value, message.remedy = printable(error.value), printable(error.remedy)
    if isinstance(error, ModelNotFound):
        message.served.extend(error.served)
    if isinstance(error, Overloaded | Unavailable):
        message.retry_after_s = error.retry_after_s
    if not isinstance(error, HeadraceError):
        message.message = "the engine could not take this request"
    return message


def decode_rejected(message: pb.Rejected) -> tuple[Handle, Exception]:
    """Raises MalformedFrame."""
    return Handle(message.handle), _error(message)


def _kind(error: Exception) -> pb.RejectKind:
    match error:
        case ModelNotFound():
            return pb.REJECT_MODEL_NOT_FOUND
        case RequestTooLarge():
            return pb.REJECT_TOO_LARGE
        case InvalidRequest():
            return pb.REJECT_INVALID
        case Overloaded():
            return pb.REJECT_OVERLOADED
        case Unavailable():
            return pb.REJECT_UNAVAILABLE
        case _:
            return pb.REJECT_FAILED


def _error(message: pb.Rejected) -> Exception:
    value = None if message.value == NO_VALUE else ShownValue(message.value)
    match message.kind:
        case pb.REJECT_INVALID:
            return InvalidRequest(message.field, message.limit, value, message.remedy)
        case pb.REJECT_TOO_LARGE:
            return RequestTooLarge(message.field, message.limit, value, message.remedy)
        case pb.REJECT_MODEL_NOT_FOUND:
            return ModelNotFound(ShownValue(message.value), list(message.served))
        case pb.REJECT_OVERLOADED:
            return Overloaded(message.message, retry_after_s=message.retry_after_s)
        case pb.REJECT_UNAVAILABLE:
            return Unavailable(message.message, retry_after_s=message.retry_after_s)
        case pb.REJECT_FAILED:
            return SequenceFailed(message.message)
    raise MalformedFrame(f"rejected: unknown kind {message.kind}")
