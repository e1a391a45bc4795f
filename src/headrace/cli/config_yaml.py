"""YAML as a configuration file may use it: plain data, without anchors and without a key given twice. Nothing is evaluated.

`read_yaml` refuses the first thing that is wrong; `config_faults` takes the whole document, with the line of every value, and goes on.
Values get their types in `core.strict_decode`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from headrace.core.errors import ConfigError

Raw = dict[str, object]
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A document, in which keys may be given twice. Lines count from 1.

    value     plain data; where a key is given twice, its last value
    lines     path of each value, as errors write it -> line of its key
    repeated  (path, line, line of the first one) of each key that its section has already
    """

    value: object
    lines: dict[str, int] = field(default_factory=dict)
    repeated: list[tuple[str, int, int]] = field(default_factory=list)


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
    """One YAML document as plain data. Raises ConfigError with the line."""
    document = parse_document(text, where)
    for path, line, first_line in document.repeated:
        raise ConfigError(f"{where}:{line}", f"is not valid YAML: {path} is given twice, first on line {first_line}")
    return document.value


def parse_document(text: str, where: str) -> YamlDocument:
    """One YAML document, and where its values stand. Raises ConfigError with line and column."""
    loader = _PlainLoader(text)
    try:
        node = loader.get_single_node()
        document = YamlDocument(None)
        _note_lines(node, [], document)  # first, since constructing merges "<<" into the nodes
        return document if node is None else replace(document, value=loader.construct_document(node))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise ConfigError(place, f"is not valid YAML: {getattr(error, 'problem', None) or type(error).__name__}") from error
    finally:
        loader.dispose()


def _note_lines(node: yaml.Node | None, steps: list[str], document: YamlDocument) -> None:
    """Add the lines, and the keys given twice, of what is in `node` to `document`."""
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


def shown_path(steps: list[str]) -> str:
    """The steps as errors write them: "models[0].name" for ["models", "0", "name"]."""
    return "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in steps).removeprefix(".")
