"""Lists the differences between two configurations, path by path, as text for people.

Items of a sequence are compared by name where all items have a name. A field with `repr=False`, and a key of a mapping in SECRET_KEYS,
is a secret: its value is not shown.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any

from headrace.core.errors import shorten

HIDDEN = "(not shown)"
SECRET_KEYS = frozenset({"api_key", "block_key", "key", "salt_key", "sha256", "site_key", "token"})


class DifferenceKind(StrEnum):
    ADDED = "+"
    REMOVED = "-"
    CHANGED = "~"


@dataclass(frozen=True, slots=True)
class Difference:
    """path: dotted, item names in brackets. text: both values, or the one added or removed; may be empty."""

    kind: DifferenceKind
    path: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.path}{': ' if self.text else ''}{self.text}"


def differences(before: object, after: object, path: str = "") -> Iterator[Difference]:
    return _differences(before, after, path, is_secret=False)


def _differences(before: object, after: object, path: str, *, is_secret: bool) -> Iterator[Difference]:
    if before == after:
        return
    if is_dataclass(before) and type(before) is type(after):
        for item in fields(before):
            pair = getattr(before, item.name), getattr(after, item.name)
            yield from _differences(*pair, _joined(path, item.name), is_secret=is_secret or not item.repr)
    elif isinstance(before, Mapping) and isinstance(after, Mapping):
        yield from _of_items(before, after, lambda key: _joined(path, str(key)), is_secret=is_secret)
    elif (old := _by_name(before)) is not None and (new := _by_name(after)) is not None:
        yield from _of_items(old, new, lambda name: f"{path}[{name}]", is_secret=is_secret)
        if set(old) == set(new) and list(old) != list(new):
            yield Difference(DifferenceKind.CHANGED, path, f"order {', '.join(new)}")
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        yield from _of_sequences(before, after, path, is_secret=is_secret)
    else:
        yield Difference(DifferenceKind.CHANGED, path, HIDDEN if is_secret else f"{_shown(before)} -> {_shown(after)}")


def _of_items(before: Mapping[Any, object], after: Mapping[Any, object], path: Any, *, is_secret: bool) -> Iterator[Difference]:
    for key in before:
        if key in after:
            yield from _differences(before[key], after[key], path(key), is_secret=is_secret or key in SECRET_KEYS)
        else:
            yield Difference(DifferenceKind.REMOVED, path(key))
    for key in after:
        if key not in before:
            yield Difference(DifferenceKind.ADDED, path(key))


def _of_sequences(before: Sequence[object], after: Sequence[object], path: str, *, is_secret: bool) -> Iterator[Difference]:
    old, new = [_hashable(item) for item in before], [_hashable(item) for item in after]
    in_old, in_new = set(old), set(new)  # of 20,000 keys, each would be compared with each
    for key, item in zip(old, before, strict=True):
        if key not in in_new:
            yield Difference(DifferenceKind.REMOVED, path, _item(item, is_secret=is_secret))
    for key, item in zip(new, after, strict=True):
        if key not in in_old:
            yield Difference(DifferenceKind.ADDED, path, _item(item, is_secret=is_secret))
    if len(old) == len(new) and in_old <= in_new:
        yield Difference(DifferenceKind.CHANGED, path, "order")


def _hashable(value: object) -> Hashable:
    if is_dataclass(value):
        return type(value), tuple(_hashable(getattr(value, item.name)) for item in fields(value))
    if isinstance(value, Mapping):
        return Mapping, frozenset((key, _hashable(item)) for key, item in value.items())
    return (Sequence, *map(_hashable, value)) if isinstance(value, list | tuple) else value


def _item(item: object, *, is_secret: bool) -> str:
    return HIDDEN if is_secret and not isinstance(item, Mapping) and not is_dataclass(item) else _shown(item)


def _by_name(value: object) -> dict[str, object] | None:
    if not isinstance(value, list | tuple):
        return None
    names = [item.get("name") if isinstance(item, Mapping) else getattr(item, "name", None) for item in value]
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
        return None
    return dict(zip(names, value, strict=True))  # type: ignore[arg-type]  # each name is a string


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: object) -> str:
    return repr(value) if is_dataclass(value) else shorten(_masked(value))


def _masked(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: HIDDEN if key in SECRET_KEYS else _masked(item) for key, item in value.items()}
    return [_masked(item) for item in value] if isinstance(value, list | tuple) else value
