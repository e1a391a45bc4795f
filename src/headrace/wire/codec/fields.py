"""What all codecs use: fields that value and message share by name, the numbers of enums, text that a message can carry."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, MutableSequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from headrace.core.grammar import GrammarKind
from headrace.core.request import PriorityClass
from headrace.core.update import FinishReason, MissReason
from headrace.wire import headrace_pb2 as pb

V = TypeVar("V")
M = TypeVar("M", bound=Message)


class SameFields(Generic[V, M]):
    def __init__(self, value: type[V], message: type[M], *, but: Collection[str] = ()) -> None:
        """but: fields that only one side has, or that need a conversion. Raises TypeError for other fields on one side only"""
        same = [field for field in message.DESCRIPTOR.fields if field.name not in but]
        names = [field.name for field in same]
        if different := {field.name for field in fields(value)}.difference(but) ^ {*names}:  # type: ignore[arg-type]
            raise TypeError(f"{value.__name__} and its message differ in {', '.join(sorted(different))}")
        self._value, self._message = value, message
        self._names, self._get = names, attrgetter(*names)
        empty = message()
        self._repeated = [name for name in names if isinstance(getattr(empty, name), MutableSequence)]
        self._maps = [name for name in names if isinstance(getattr(empty, name), MutableMapping)]
        self._optional = [field.name for field in same if field.has_presence]

    def encode(self, value: V, **others: Any) -> M:
        others.update(zip(self._names, self._get(value), strict=True))
        return self._message(**others)

    def decode(self, message: M, **others: Any) -> V:
        others.update(zip(self._names, self._get(message), strict=True))
        for name in self._repeated:
            others[name] = tuple(others[name])
        for name in self._maps:
            others[name] = dict(others[name])
        for name in self._optional:
            if not message.HasField(name):
                others[name] = None
        return self._value(**others)


MAX_MESSAGE_CHARS = 2000


def printable(text: str) -> str:
    """Valid Unicode, shortened: an error message may quote a broken request."""
    return text[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode("utf-8")


FINISH_KIND: dict[FinishReason, pb.FinishKind] = {
    FinishReason.STOP: pb.FINISH_STOP,
    FinishReason.LENGTH: pb.FINISH_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_CANCELLED,
    FinishReason.DEADLINE: pb.FINISH_DEADLINE,
    FinishReason.ERROR: pb.FINISH_ERROR,
}
"""A number never changes its meaning, and zero is never a value."""
FINISH_REASON: dict[int, FinishReason] = {kind: reason for reason, kind in FINISH_KIND.items()}

MISS_REASON: dict[MissReason, pb.MissReason] = {
    MissReason.NEVER_SEEN: pb.MISS_NEVER_SEEN,
    MissReason.EVICTED: pb.MISS_EVICTED,
    MissReason.ANOTHER_SALT: pb.MISS_ANOTHER_SALT,
    MissReason.LESS_THAN_A_BLOCK: pb.MISS_LESS_THAN_A_BLOCK,
    MissReason.NOT_USED: pb.MISS_NOT_USED,
}
MISS_REASON_OF: dict[int, MissReason] = {number: reason for reason, number in MISS_REASON.items()}

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
