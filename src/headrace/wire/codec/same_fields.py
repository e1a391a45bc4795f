"""Converts the fields that a core value and its message have under the same names. A new such field needs no line of code in the codec."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, MutableSequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

V = TypeVar("V")
M = TypeVar("M", bound=Message)


class SameFields(Generic[V, M]):
    """Converts a dataclass from and to its message. A repeated field becomes a tuple, a map a dict, and a missing optional field None."""

    def __init__(self, value: type[V], message: type[M], *, but: Collection[str] = ()) -> None:
        """but: fields that only one side has, or that need a conversion. Raises TypeError where any other field is on one side only."""
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
        """others: the fields that are not the same"""
        others.update(zip(self._names, self._get(value), strict=True))
        return self._message(**others)

    def decode(self, message: M, **others: Any) -> V:
        """others: the fields that are not the same"""
        others.update(zip(self._names, self._get(message), strict=True))
        for name in self._repeated:
            others[name] = tuple(others[name])
        for name in self._maps:
            others[name] = dict(others[name])
        for name in self._optional:
            if not message.HasField(name):
                others[name] = None
        return self._value(**others)
