"""YAML, environment variables and flags -> one plain mapping -> typed values, strictly.

Nothing is evaluated: YAML is read by the safe loader without duplicate keys, environment values are taken as strings where a string is
wanted and as YAML scalars elsewhere. Unknown keys are errors that name the path and the nearest known key. What the values mean is said
in `cli.config`.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from headrace.core.errors import ConfigError

Value = TypeVar("Value")
Raw = dict[str, object]
MAX_FILE_BYTES = 1 << 20
TOP_LEVEL = ("drain_timeout_s", "run_dir", "allow_open", "block_key", "log_format", "experimental")
"""Keys without a section: HEADRACE_DRAIN_TIMEOUT_S."""

ELSEWHERE = {"gateway.models": "Declare models at the top level.", "gateway.timeouts.drain_s": "Set drain_timeout_s at the top level."}
"""Keys of the packages' own configs that are made from others: refused in a file, and never suggested."""

_PLACE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?\Z", re.DOTALL)


class UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader, except that a key given twice is an error instead of the last one winning, and there are no anchors."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases (*name) are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_yaml(file: Path) -> Raw:
    """The mapping in a YAML (or JSON) file; an empty file is an empty mapping. Raises ConfigError."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(str(file), f"is larger than {MAX_FILE_BYTES} bytes")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), f"cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from error
    value = parse_yaml(text, str(file))
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(str(file), "is not a mapping of names to values")
    return value


def parse_yaml(text: str, where: str) -> object:
    """One YAML document. Raises ConfigError with line and column."""
    loader = UniqueKeyLoader(text)
    try:
        return loader.get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise ConfigError(place, f"is not valid YAML: {getattr(error, 'problem', None) or type(error).__name__}") from error
    finally:
        loader.dispose()


def decode(kind: type[Value], raw: object) -> Value:
    """`raw` as a value of the dataclass `kind`. Raises ConfigError with the path of what does not fit."""
    check_known(kind, raw, "")
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        found = _PLACE.fullmatch(str(error))
        what, path = (found["what"], found["path"]) if found else (str(error), "")
        raise ConfigError(path or "configuration", what[:1].lower() + what[1:].replace("`", "")) from error


def check_known(hint: object, raw: object, where: str) -> None:
    """Raise ConfigError for the first key that `hint` has no field for. Values of the wrong shape are left to `decode`."""
    kind = inner(hint)
    if isinstance(raw, list) and get_origin(kind) is tuple:
        for index, item in enumerate(raw):
            check_known(get_args(kind)[0], item, f"{where}[{index}]")
    elif isinstance(raw, dict) and isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        for key, value in raw.items():
            path = f"{where}.{key}" if where else str(key)
            if key not in hints:
                raise unknown_key(path, str(key), hints, where)
            check_known(hints[key], value, path)


def unknown_key(path: str, key: str, known: Iterable[str], where: str = "") -> ConfigError:
    """The error, with the nearest of `known`, which are the keys at `where`; of those set elsewhere it says where."""
    elsewhere = {name: ELSEWHERE[f"{where}.{name}"] for name in known if f"{where}.{name}" in ELSEWHERE}
    close = get_close_matches(key, known, n=1)
    if close and close[0] in elsewhere:
        return ConfigError(path, "is not a known key", elsewhere[close[0]])
    listed = ", ".join(name for name in known if name not in elsewhere)
    return ConfigError(path, "is not a known key", f"Did you mean {close[0]}?" if close else f"Known: {listed}.")


def inner(hint: object) -> object:
    """The type in an optional one: X of `X | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        rest = [choice for choice in get_args(hint) if choice is not type(None)]
        return rest[0] if len(rest) == 1 else hint
    return hint


def apply_environment(kind: type, raw: Raw, environment: Mapping[str, str], prefix: str) -> None:
    """Set `PREFIX_SECTION__KEY=value` in `raw`, in place: levels are joined by two underscores, list places are numbers.

    A variable without `__` after the prefix is configuration only as one of TOP_LEVEL. Raises ConfigError for an unknown path.
    """
    for name, steps in variables(environment, prefix):
        apply_variable(kind, raw, name, steps, environment[name], prefix)


def apply_variable(kind: type, raw: Raw, name: str, steps: Sequence[str], text: str, prefix: str) -> None:
    """Set what one variable says in `raw`, in place. Raises ConfigError naming the variable, with the nearest one."""
    hint = _hint_at(kind, steps, name, prefix)
    set_at(raw, steps, text if inner(hint) is str else parse_yaml(text, name), name)


def variables(environment: Mapping[str, str], prefix: str) -> Iterator[tuple[str, list[str]]]:
    """(name, the steps of its path) of each variable that is configuration, in the order in which they are applied."""
    for name in sorted(environment):
        rest = name.removeprefix(prefix).lower()
        if name.startswith(prefix) and ("__" in rest or rest in TOP_LEVEL):
            yield name, rest.split("__")


def known_variables(kind: object, prefix: str, number: str = "0") -> Iterator[str]:
    """Names of variables for every value that can be set; `number` stands for places in lists."""
    hint = inner(kind)
    if get_origin(hint) is tuple and is_dataclass(get_args(hint)[0]):
        yield from known_variables(get_args(hint)[0], f"{prefix}{number}__", number)
    elif isinstance(hint, type) and is_dataclass(hint):
        for name, each in get_type_hints(hint).items():
            yield from known_variables(each, f"{prefix}{name.upper()}__", number)
    else:
        yield prefix.removesuffix("__")


def nearest_variable(kind: type, name: str, prefix: str) -> str | None:
    """The variable that was probably meant: the only one that ends alike, else the nearest by letters."""
    elsewhere = {prefix + path.upper().replace(".", "__") for path in ELSEWHERE}
    number = next((step for step in name.split("__") if step.isdecimal()), "0")
    known = [each for each in known_variables(kind, prefix, number) if each not in elsewhere]
    last = name.removeprefix(prefix).rpartition("__")[2]
    alike = [each for each in known if each.endswith(f"__{last}")]
    return alike[0] if len(alike) == 1 else next(iter(get_close_matches(name, known, n=1, cutoff=0.7)), None)


def _hint_at(kind: type, steps: Sequence[str], name: str, prefix: str) -> object:
    hint: object = kind
    for step in steps:
        hint = inner(hint)
        if get_origin(hint) is tuple and step.isdecimal():
            hint = get_args(hint)[0]
        elif isinstance(hint, type) and is_dataclass(hint):
            hints = get_type_hints(hint)
            if step not in hints:
                nearest = nearest_variable(kind, name, prefix)
                raise ConfigError(name, "is not a known key", f"Did you mean {nearest}?") if nearest else unknown_key(name, step, hints)
            hint = hints[step]
        else:
            raise ConfigError(name, f"nothing can be set at {step!r}", "Levels are joined by two underscores; list places are numbers.")
    return hint


def set_at(raw: Raw, steps: Sequence[str], value: object, name: str) -> None:
    """Set one value deep in `raw`, in place, making the mappings and the next list place on the way. Raises ConfigError."""
    place: object = raw
    for index, step in enumerate(steps):
        last = index == len(steps) - 1
        fresh: object = value if last else ([] if steps[index + 1].isdecimal() else {})
        if isinstance(place, dict):
            if last:
                place[step] = value
            place = place.setdefault(step, fresh)
        elif isinstance(place, list) and step.isdecimal() and int(step) <= len(place):
            if int(step) == len(place):
                place.append(fresh)
            elif last:
                place[int(step)] = value
            place = place[int(step)]
        else:
            raise ConfigError(name, f"nothing can be set at {step!r}", "List places are filled in order, from 0.")
