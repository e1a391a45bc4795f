"""Maps the enums of core to their numbers on the wire, and back. A number never changes its meaning, and zero is never a value."""

from __future__ import annotations

from headrace.core.finish import FinishReason
from headrace.core.grammar import GrammarKind
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

GRAMMAR_KIND: dict[GrammarKind, pb.GrammarKind] = {
    GrammarKind.JSON_SCHEMA: pb.GRAMMAR_JSON_SCHEMA,
    GrammarKind.REGEX: pb.GRAMMAR_REGEX,
    GrammarKind.LARK: pb.GRAMMAR_LARK,
}
GRAMMAR_KIND_NAME: dict[int, GrammarKind] = {number: kind for kind, number in GRAMMAR_KIND.items()}
