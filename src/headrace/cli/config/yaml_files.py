"""Reads YAML as plain data, without anchors and without a key given twice. Nothing is evaluated.

Words and numbers are read by the core schema of YAML 1.2, and a key is always text. PyYAML's YAML 1.1 reads the country code no as false,
the port 010000 as 4096, 1:30 as 90 and 1e-3 as text.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.reader import Reader

from headrace.core.errors import ConfigError
from headrace.core.regular_files import MAX_FILE_BYTES, read_file

Raw = dict[str, object]
MAX_INT_CHARS = 100


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A section may have a key twice. Lines count from 1.

    value     plain data; the last value of a key wins
    lines     path of each value, as in errors -> line of its key
    repeated  (path, line, line of the first one) of each key that its section has already
    """

    value: object
    lines: dict[str, int] = field(default_factory=dict)
    repeated: list[tuple[str, int, int]] = field(default_factory=list)


_TAG = "tag:yaml.org,2002:"
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_RESOLVERS = (  # the first that matches; what begins otherwise is text
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("merge", re.compile(r"<<\Z"), "<"),
)


class _PlainLoader(Composer, yaml.CSafeLoader):
    """The safe loader without aliases and dates, with the scalars of YAML 1.2.

    With aliases, a file of a few lines could expand to gigabytes. A name may look like a date. libyaml parses, ten times as fast as
    PyYAML; nodes are made in Python, where nesting is bounded.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012  # as the base class declares it; filled below
    yaml_constructors = {tag: made for tag, made in yaml.SafeLoader.yaml_constructors.items() if tag != f"{_TAG}timestamp"}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases (*name) are not allowed", self._mark())
        try:
            return super().compose_node(parent, index)
        except RecursionError:
            raise yaml.constructor.ConstructorError(None, None, "it is nested too deeply", self._mark()) from None

    def _mark(self) -> Any:
        event = self.peek_event()
        return None if event is None else event.start_mark

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # e.g. "!!bool x"
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(None, None, f"this is no valid {kind}", node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
                key.tag = f"{_TAG}str"
        return super().construct_mapping(node, deep)


class _PlainDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type."""


def _construct_bool(loader: _PlainLoader, node: yaml.ScalarNode) -> bool:
    return _text(loader, node, _BOOL).lower() == "true"


def _construct_int(loader: _PlainLoader, node: yaml.ScalarNode) -> int:
    text = _text(loader, node, _INT)
    if len(text) > MAX_INT_CHARS:
        reason = f"an integer has at most {MAX_INT_CHARS} characters, and this one has {len(text)}; write a smaller one, or text in quotes"
        raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark)
    return int(text, 0) if text[1:2] in ("o", "x") else int(text)


def _construct_float(loader: _PlainLoader, node: yaml.ScalarNode) -> float:
    return float(_text(loader, node, _FLOAT).lower().replace(".inf", "inf").replace(".nan", "nan"))


def _text(loader: _PlainLoader, node: yaml.ScalarNode, pattern: re.Pattern[str]) -> str:
    text = str(loader.construct_scalar(node))
    if pattern.match(text) is None:
        raise ValueError
    return text


for _name, _pattern, _first in _RESOLVERS:
    for _class in (_PlainLoader, _PlainDumper):
        _class.add_implicit_resolver(_TAG + _name, _pattern, list(_first))
_PlainDumper.add_implicit_resolver(f"{_TAG}bool", re.compile(r"[yYnN]\Z"), list("yYnN"))  # of YAML 1.1, though PyYAML has it not
for _name, _construct in (("bool", _construct_bool), ("int", _construct_int), ("float", _construct_float)):
    _PlainLoader.add_constructor(_TAG + _name, _construct)


def read_text(file: Path) -> str:
    try:
        return read_file(file, MAX_FILE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), f"cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from error


def dump_yaml(value: object) -> str:
    """Plain data as YAML that `parse_yaml` and other parsers read back as the same data."""
    return yaml.dump(value, Dumper=_PlainDumper, sort_keys=False, allow_unicode=False)


def read_yaml(file: Path) -> Raw:
    """An empty file is an empty mapping. Raises ConfigError."""
    return mapping_of(parse_yaml(read_text(file), str(file)), file)


def mapping_of(value: object, file: Path) -> Raw:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(str(file), "is not a mapping of names to values")
    return value


def parse_yaml(text: str, where: str) -> object:
    document = parse_document(text, where)
    for path, line, first_line in document.repeated:
        raise ConfigError(f"{where}:{line}", f"is not valid YAML: {path} is given twice, first on line {first_line}")
    return document.value


def parse_document(text: str, where: str) -> YamlDocument:
    """Raises ConfigError with line and column."""
    if (odd := Reader.NON_PRINTABLE.search(text)) is not None:
        line = text.count("\n", 0, odd.start()) + 1
        raise ConfigError(f"{where}:{line}", f"is not valid YAML: the character U+{ord(odd.group()):04X} is not allowed")
    loader = _PlainLoader(text)
    try:
        node = loader.get_single_node()
        document = YamlDocument(None)
        _note_lines(node, [], document)  # first, since constructing merges "<<" into the nodes
        return document if node is None else replace(document, value=loader.construct_document(node))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = where if mark is None else f"{where}:{_place(text, mark)}"
        raise ConfigError(place, f"is not valid YAML: {error.problem}") from error
    finally:
        loader.dispose()


def _place(text: str, mark: yaml.Mark) -> str:
    """LINE:COLUMN. libyaml puts what is missing at the end onto a line behind the last one."""
    last_line = text.count("\n")
    line, column = (mark.line, mark.column) if mark.line <= last_line else (last_line, len(text) - text.rfind("\n") - 1)
    return f"{line + 1}:{column + 1}"


def _note_lines(node: yaml.Node | None, steps: list[str], document: YamlDocument) -> None:
    if isinstance(node, yaml.MappingNode):
        first_lines: dict[str, int] = {}
        for key, value in node.value:
            inside = [*steps, str(key.value)]
            path, line = shown_path(inside), key.start_mark.line + 1
            if path in first_lines:
                document.repeated.append((path, line, first_lines[path]))
            first_lines.setdefault(path, line)
            document.lines[path] = line
            _note_lines(value, inside, document)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            inside = [*steps, str(number)]
            document.lines[shown_path(inside)] = item.start_mark.line + 1
            _note_lines(item, inside, document)


def shown_path(steps: Sequence[str]) -> str:
    """As errors show it: "models[0].name" for ["models", "0", "name"]."""
    return "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in steps).removeprefix(".")
