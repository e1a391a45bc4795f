"""YAML as a configuration file may use it: plain data, without anchors and without a key given twice. Nothing is evaluated.

`read_yaml` refuses the first thing that is wrong; `config_faults` takes the whole document, with the line of every value, and goes on.
Values get their types in `config_decode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from headrace.core.errors import ConfigError

Raw = dict[str, object]
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RepeatedKey:
    """A key that its section has already. Lines and columns count from 1."""

    path: str
    key: str
    line: int
    column: int
    first_line: int


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """value     plain data; where a key is given twice, its last value
    lines     path of each value, as errors write it -> line of its key, from 1
    repeated  in the order of the file
    """

    value: object
    lines: dict[str, int]
    repeated: list[RepeatedKey]


class _PlainLoader(yaml.SafeLoader):
    """The safe loader without anchors: a file of a few lines could otherwise stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases (*name) are not allowed")
        return super().compose_node(parent, index)


def read_text(file: Path) -> str:
    """The file's text. Raises ConfigError."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(str(file), f"is larger than {MAX_FILE_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), f"cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from error


def read_yaml(file: Path) -> Raw:
    """The mapping in a YAML (or JSON) file; an empty file is an empty mapping. Raises ConfigError."""
    return mapping_of(parse_yaml(read_text(file), str(file)), file)


def mapping_of(value: object, file: Path) -> Raw:
    """What a file holds, as a mapping. Raises ConfigError."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(str(file), "is not a mapping of names to values")
    return value


def parse_yaml(text: str, where: str) -> object:
    """One YAML document as plain data. Raises ConfigError with line and column."""
    document = parse_document(text, where)
    for each in document.repeated:
        raise ConfigError(f"{where}:{each.line}:{each.column}", f"is not valid YAML: the key {each.key!r} is given twice")
    return document.value


def parse_document(text: str, where: str) -> YamlDocument:
    """One YAML document, in which keys may be given twice. Raises ConfigError with line and column."""
    loader = _PlainLoader(text)
    found = YamlDocument(None, {}, [])
    try:
        node = loader.get_single_node()
        _note_lines(node, [], found)
        return found if node is None else YamlDocument(loader.construct_document(node), found.lines, found.repeated)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise ConfigError(place, f"is not valid YAML: {getattr(error, 'problem', None) or type(error).__name__}") from error
    finally:
        loader.dispose()


def _note_lines(node: yaml.Node | None, steps: list[str], found: YamlDocument) -> None:
    """Add the lines, and the keys given twice, of what is in `node` to `found`."""
    if isinstance(node, yaml.MappingNode):
        first_lines: dict[str, int] = {}
        for key, value in node.value:
            name, mark = str(key.value), key.start_mark
            path, line = shown_path([*steps, name]), mark.line + 1
            if name in first_lines:
                found.repeated.append(RepeatedKey(path, name, line, mark.column + 1, first_lines[name]))
            first_lines.setdefault(name, line)
            found.lines[path] = line
            _note_lines(value, [*steps, name], found)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            found.lines[shown_path([*steps, str(number)])] = item.start_mark.line + 1
            _note_lines(item, [*steps, str(number)], found)


def shown_path(steps: list[str]) -> str:
    """The steps as errors write them: "models[0].name" for ["models", "0", "name"]."""
    return "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in steps).removeprefix(".")
