"""The two enums of core that cross the wire, both ways. Numbers on the wire are fixed for ever; zero is never a value."""

from __future__ import annotations

from headrace.core.finish import FinishReason
from headrace.core.request import PriorityClass
from headrace.wire import headrace_pb2 as pb

FINISH_KIND: dict[FinishReason, pb.FinishKind] = {
    FinishReason.STOP: pb.FINISH_STOP,
    FinishReason.LENGTH: pb.FINISH_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_CANCELLED,
    FinishReason.DEADLINE: pb.FINISH_DEADLINE,
    FinishReason.ERROR: pb.FINISH_ERROR,
}
FINISH_REASON: dict[int, FinishReason] = {kind: reason for reason, kind in FINISH_KIND.items()}

PRIORITY: dict[PriorityClass, pb.Priority] = {
    PriorityClass.PREMIUM: pb.PRIORITY_PREMIUM,
    PriorityClass.STANDARD: pb.PRIORITY_STANDARD,
    PriorityClass.BATCH: pb.PRIORITY_BATCH,
}
PRIORITY_CLASS: dict[int, PriorityClass] = {number: cls for cls, number in PRIORITY.items()}
