"""Finds the JSON types of a function's parameters, which tell 5 from "5" where values have no quotes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from urllib.parse import unquote

from headrace.core.tools import FunctionTool
from headrace.text.output.literals import json_of_literal

TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})

TEXT = frozenset({"string"})

MAX_DEPTH = 64
"""Longest chain of references; types beyond it are unknown."""


class FunctionTypes:
    """A function's types are worked out when its first call is read."""

    def __init__(self, functions: Sequence[FunctionTool]) -> None:
        self._functions = functions
        self._found: dict[str, Mapping[str, frozenset[str]]] = {}

    def of(self, name: str) -> Mapping[str, frozenset[str]]:
        if name not in self._found:
            tool = next((tool for tool in self._functions if tool.name == name), None)
            self._found[name] = _parameter_types(tool.parameters) if tool is not None and tool.parameters is not None else {}
        return self._found[name]


def _parameter_types(root: Mapping[str, object]) -> Mapping[str, frozenset[str]]:
    properties, types = root.get("properties"), SchemaTypes(root)
    return {name: types.of(schema) for name, schema in properties.items()} if isinstance(properties, Mapping) else {}


class SchemaTypes:
    """Takes time linear in the schema: the target of a reference is visited once."""

    def __init__(self, root: Mapping[str, object]) -> None:
        self._root = root
        self._referenced: dict[str, frozenset[str]] = {}
        self._depth = 0

    def of(self, schema: object) -> frozenset[str]:
        """Any type for a schema with an `$id` of its own."""
        if not isinstance(schema, Mapping) or (schema is not self._root and "$id" in schema):
            return TYPES
        types = TYPES
        if isinstance(reference := schema.get("$ref"), str):
            types &= self._of_reference(reference)
        given = schema.get("type")
        if given is not None:
            types &= frozenset([given] if isinstance(given, str) else map(str, given) if isinstance(given, list) else TYPES)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            types &= _union(map(_types_of_value, values))
        for name in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(name), list) and branches:
                types &= _union(map(self.of, branches))
        if isinstance(branches := schema.get("allOf"), list):
            for branch in branches:
                types &= self.of(branch)
        return types

    def _of_reference(self, reference: str) -> frozenset[str]:
        if reference not in self._referenced:
            self._referenced[reference] = TYPES  # of a reference to itself
            if self._depth == MAX_DEPTH:
                return TYPES
            self._depth += 1
            self._referenced[reference] = self.of(referenced(reference, self._root))
            self._depth -= 1
        return self._referenced[reference]


def _union(types: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset(chain.from_iterable(types))


def referenced(reference: str, root: Mapping[str, object]) -> object:
    """The schema that a JSON pointer names; None where there is none, and for references by name or address."""
    begin, *names = unquote(reference).split("/")
    at: object = root if begin == "#" else None
    for name in names:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list):
            at = at[int(key)] if key.isascii() and key.isdigit() and len(key) < 9 and int(key) < len(at) else None
        else:
            at = at.get(key) if isinstance(at, Mapping) else None
    return at


def written_value(text: str, types: frozenset[str]) -> str:
    """The JSON of an unquoted value: the text itself if its type is allowed, else a string."""
    bare = text.strip()
    for written in (bare, json_of_literal(bare)):
        if written is not None and _is_one_of(written, types):
            return written
    return json.dumps(text, ensure_ascii=False)


def _is_one_of(written: str, types: frozenset[str]) -> bool:
    try:
        value: object = json.loads(written, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return not isinstance(value, str) and bool(_types_of_value(value) & types)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _types_of_value(value: object) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value == int(value) else {"number"}) if abs(value) < 2**53 else frozenset({"number"})
        case str():
            return TEXT
        case list():
            return frozenset({"array"})
    return frozenset({"object"})
