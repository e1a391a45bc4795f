"""Which JSON types a function's parameters may have, by its schema. Formats that write values without quotes need it to tell 5 from "5"."""

from __future__ import annotations

import json
from collections.abc import Mapping

from headrace.core.tools import FunctionTool
from headrace.text.output.python_literals import json_of_literal

TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
"""Every type: that of a parameter of which the schema says nothing."""

TEXT = frozenset({"string"})
MAX_REFERENCES = 16
"""References and branches followed within one schema; beyond them its type counts as unknown."""


def parameter_types(tool: FunctionTool) -> Mapping[str, frozenset[str]]:
    """The types of each declared parameter."""
    root: Mapping[str, object] = tool.parameters or {}
    properties = root.get("properties")
    return {name: schema_types(schema, root) for name, schema in properties.items()} if isinstance(properties, Mapping) else {}


def schema_types(schema: object, root: Mapping[str, object], depth: int = 0) -> frozenset[str]:
    """The types that a schema's values may have. root: the schema in which its references are looked up"""
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return TYPES
    found = TYPES
    if "$ref" in schema:
        found &= schema_types(referenced(schema, root), root, depth + 1)
    given = schema.get("type")
    if given is not None:
        found &= frozenset([given] if isinstance(given, str) else given if isinstance(given, list) else TYPES)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        found &= frozenset().union(*map(_types_of_value, values))
    for name in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(name), list) and branches:
            found &= frozenset().union(*[schema_types(branch, root, depth + 1) for branch in branches])
    for branch in _branches(schema.get("allOf")):
        found &= schema_types(branch, root, depth + 1)
    return found


def referenced(schema: Mapping[str, object], root: Mapping[str, object]) -> object:
    """What a schema's `$ref` names within the root; None where it names nothing there."""
    at: object = root
    for name in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
        at = at.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    return at if str(schema["$ref"]).startswith("#") else None


def written_value(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that stands without quotes around strings: itself where its type is allowed, else a string.

    JSON is passed on as the model wrote it. Python's spelling of a value is taken where JSON's is not there (True, None, {'a': 1}).
    """
    bare = text.strip()
    for written in (bare, json_of_literal(bare)):
        if written is not None and _is_one_of(written, types):
            return written
    return json.dumps(text, ensure_ascii=False)


def _is_one_of(written: str, types: frozenset[str]) -> bool:
    try:
        value: object = json.loads(written)
    except (ValueError, RecursionError):
        return False
    return not isinstance(value, str) and bool(_types_of_value(value) & types)


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


def _branches(given: object) -> list[object]:
    return given if isinstance(given, list) else []
