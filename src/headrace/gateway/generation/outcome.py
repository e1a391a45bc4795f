"""How a stream ended: the error of a sequence that failed, and what the request's record keeps of it."""

from __future__ import annotations

from headrace.core.errors import DeadlineExceeded, InvalidRequest, SequenceFailed, Unavailable
from headrace.core.finish import FinishReason
from headrace.core.grammar import CANNOT_CONTINUE
from headrace.gateway.generation.progress import RequestProgress
from headrace.gateway.upstream.output_events import TokenUsage
from headrace.gateway.upstream.seam import EventStream
from headrace.observe.request_log import MAX_DETAIL_CHARS, RequestLogRecord

DEADLINE_PASSED = "The request's deadline passed before it was complete."


def raise_if_failed(finish: FinishReason, detail: str | None, record: RequestLogRecord) -> None:
    """Raises the error of a sequence that ended otherwise than with an answer. detail: the engine's message, which `record` gets"""
    if finish.is_answer:
        return
    if finish is FinishReason.DEADLINE:
        raise DeadlineExceeded(DEADLINE_PASSED)
    if finish is FinishReason.CANCELLED:
        raise Unavailable("The engine cancelled this request; it can be sent again.")
    record.detail = detail and detail[:MAX_DETAIL_CHARS]  # the engine's message is for the operator
    if detail is not None and detail.startswith(CANNOT_CONTINUE):  # sending it again would end the same way
        reason = detail.removeprefix(CANNOT_CONTINUE)[:MAX_DETAIL_CHARS]
        raise InvalidRequest("grammar", "one whose output can be continued within its limits", remedy=f"This output ended: {reason}")
    raise SequenceFailed("The engine could not continue this request. Other requests are not affected; it can be sent again.")


def record_end(record: RequestLogRecord, stream: EventStream, progress: RequestProgress, usage: TokenUsage) -> None:
    """Write usage, times and finish reasons to the request's record. usage: of the stream and of the requests beside it"""
    record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
    record.completion_tokens = usage.charged.completion_tokens  # earlier ones are in the line of the request that produced them
    record.ttft_s, record.tpot_s = progress.ttft_s, progress.tpot_s
    record.finish_reasons = progress.finish_reasons or None
    record.queue_time_s = stream.queue_time_s(0)
    if (stages := stream.stages(0)) is not None:
        record.prefill_s, record.decode_s = stages.prefill, stages.decode
        record.preempted_s, record.stalled_s = stages.preempted, stages.stalled
    record.replica = stream.replica(0) or record.replica
    if stream.num_resumes:
        record.num_resumes = stream.num_resumes
