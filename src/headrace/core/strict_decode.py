"""Plain data (parsed JSON or YAML) -> a frozen dataclass: the decoder of every configuration. `plain` is the way back.

Nothing is converted except a list to a tuple, a mapping to a nested dataclass, and an integer where a float is wanted. A key that is a
word of Python's (class) is the field with an underscore behind it. A class may say in `INSTEAD` why it lacks keys of other programs,
and in `IF_MISSING` what to give for a field that is missing. Errors
show no value, because it may be a secret.
"""

from __future__ import annotations

import json
import keyword
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from headrace.core.errors import ConfigError
from headrace.core.regular_files import MAX_FILE_BYTES, read_file

Value = TypeVar("Value")
MAX_JSON_BYTES = 4 * MAX_FILE_BYTES
"""A supervisor writes every key with its default, so that its file is larger than the one it has read."""

_KINDS = {"list": "array", "tuple": "array", "dict": "object", "NoneType": "null"}
_AS_DIGITS = "Write it in digits alone, without quotes."
_REMEDIES: dict[tuple[object, object], str] = {
    **{(str, given): "Write it in quotes." for given in (bool, int, float)},
    (bool, str): "Write true or false, without quotes.",
    (int, str): _AS_DIGITS,
    (float, str): _AS_DIGITS,
}
"""By (wanted type, given type): a file may have 1_000, yes or "8000" for a number or a switch, and 007 or true for text."""


class UnknownKey(ConfigError):
    """nearest: the known key of the same mapping that was probably meant; None where none is similar."""

    def __init__(self, where: str, known: Iterable[str], refused: Mapping[str, str]) -> None:
        """refused: key of the mapping -> what to write in its place"""
        key, known = where.rpartition(".")[2], [name for name in known if name not in refused]
        close = key if key in refused else next(iter(get_close_matches(key, [*known, *refused], n=1)), None)
        self.nearest = None if close in refused else close
        suggestion = f"Did you mean {close}?" if close else f"Known: {', '.join(known)}."
        super().__init__(where, f"is not a {'' if key in refused else 'known '}key", refused.get(close or "", suggestion))


class MissingKey(ConfigError):
    def __init__(self, where: str, remedy: str = "") -> None:
        super().__init__(where, "is missing", remedy)


class NeedsExactlyOne(ConfigError):
    def __init__(self, where: str, first: str, second: str, remedy: str = "") -> None:
        self.keys = first, second
        super().__init__(where, f"needs exactly one of {first} and {second}", remedy)


def read_json_object(path: str | Path) -> dict[str, object]:
    """Raises ConfigError if the file cannot be read, or holds no JSON object."""
    try:
        data = json.loads(read_file(path, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(str(path), f"cannot be read as JSON: {reason}") from None
    if not isinstance(data, dict):
        raise ConfigError(str(path), "is not a JSON object")
    return data


def decode(kind: type[Value], data: object, where: str = "", *, refused: Mapping[str, str] | None = None) -> Value:
    """Raises ConfigError, UnknownKey or MissingKey, with the path of the first key that does not fit.

    refused: paths of keys that must not be given, fields or not, with [N] and [NAME] as in `core.option.Leaf` -> what to write instead
    """
    return cast(Value, _decoded(kind, data, where, refused or {}))


def plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {key_of(item.name): plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def key_of(field: str) -> str:
    """The key in a file: without the "_" after a Python keyword."""
    word = field.removesuffix("_")
    return word if keyword.iskeyword(word) else field


def inner(hint: object) -> object:
    rest = [choice for choice in _choices(hint) if choice is not type(None)]
    return rest[0] if len(rest) == 1 else hint


def joined(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _choices(hint: object) -> tuple[object, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _below(refused: Mapping[str, str], step: str) -> Mapping[str, str]:
    """The paths below a key, without it."""
    inside = {path.removeprefix(step): remedy for path, remedy in refused.items() if path.startswith((f"{step}.", f"{step}["))}
    return {path.removeprefix("."): remedy for path, remedy in inside.items()}


def _decoded(hint: object, data: object, where: str, refused: Mapping[str, str]) -> object:
    if data is None and type(None) in _choices(hint):
        return None
    kind = inner(hint)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(data, Mapping):
        return _object(kind, data, where, refused)
    if get_origin(kind) is tuple and isinstance(data, list | tuple):
        below = _below(refused, "[N]")
        return tuple(_decoded(get_args(kind)[0], item, f"{where}[{index}]", below) for index, item in enumerate(data))
    if get_origin(kind) is dict and isinstance(data, Mapping):
        below = _below(refused, "[NAME]")
        return {str(key): _decoded(get_args(kind)[1], value, joined(where, str(key)), below) for key, value in data.items()}
    if kind is float and type(data) is int:
        return float(data)
    if not any(type(data) is choice for choice in _choices(kind)):  # exactly: true is no integer
        wanted = " or ".join(_name(choice) for choice in _choices(hint))
        remedy = _REMEDIES.get((kind, type(data)), "")
        raise ConfigError(where or "configuration", f"expected {wanted}, got {_name(type(data))}", remedy)
    return data


def _object(kind: type, data: Mapping[object, object], where: str, refused: Mapping[str, str]) -> object:
    hints, names = _fields_of(kind)
    for key in data:
        if key not in names or key in refused:
            if (why := getattr(kind, "INSTEAD", {}).get(key)) is not None:
                raise ConfigError(joined(where, str(key)), "is not supported", why)
            raise UnknownKey(joined(where, str(key)), names, {path: way for path, way in refused.items() if path.isidentifier()})
    # Unknown keys are reported before missing ones: a misspelt key may be why another is missing.
    given = {str(key): value for key, value in data.items()}
    values = {names[key]: _decoded(hints[names[key]], value, joined(where, key), _below(refused, key)) for key, value in given.items()}
    for item in fields(kind):
        if item.default is MISSING and item.default_factory is MISSING and item.name not in values:
            raise MissingKey(joined(where, key_of(item.name)), getattr(kind, "IF_MISSING", {}).get(item.name, ""))
    return kind(**values)


@cache
def _fields_of(kind: type) -> tuple[Mapping[str, object], Mapping[str, str]]:
    """The type of each field of a dataclass, and the field of each key. Cached: Python evaluates the types anew each time."""
    hints = get_type_hints(kind)
    return hints, {key_of(item.name): item.name for item in fields(kind)}


def _name(hint: object) -> str:
    kind = get_origin(hint) or hint
    name = "dict" if is_dataclass(kind) else getattr(kind, "__name__", str(kind))
    return _KINDS.get(name, name)
