"""Decides what the plain keywords of a JSON schema say of a value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")

SIZES = {str: ("minLength", "maxLength"), list: ("minItems", "maxItems"), dict: ("minProperties", "maxProperties")}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
DECIDED = frozenset({"type", "required", *BOUNDS, *(keyword for keywords in SIZES.values() for keyword in keywords)})


def type_names(value: object) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number",)
        case str():
            return ("string",)
    return ("array",) if isinstance(value, list) else ("object",)


def value_key(value: object) -> object:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else (isinstance(value, bool), value)


def values_of(node: Mapping[str, Any]) -> list[Any] | None:
    """The values that are in both `const` and `enum`; None where neither is given."""
    values: list[Any] | None = node.get("enum")
    if "const" not in node:
        return values
    key = value_key(node["const"])
    return [node["const"]] if values is None or any(value_key(value) == key for value in values) else []


def refutes(node: Mapping[str, Any], value: object) -> bool:
    given = node.get("type")
    if given is not None and set([given] if isinstance(given, str) else given).isdisjoint(type_names(value)):
        return True
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_below = value < node.get("minimum", value) or value <= node.get("exclusiveMinimum", value - 1)
        return bool(is_below or value > node.get("maximum", value) or value >= node.get("exclusiveMaximum", value + 1))
    if not isinstance(value, str | list | dict):
        return False
    least, most = (node.get(keyword) for keyword in SIZES[type(value)])
    if (least is not None and len(value) < least) or (most is not None and len(value) > most):
        return True
    return isinstance(value, dict) and not value.keys() >= set(node.get("required", ()))


def allowed_values(values: Sequence[Any], nodes: Sequence[Mapping[str, Any]]) -> list[Any]:
    keys = [{value_key(value) for value in listed} for node in nodes if (listed := values_of(node)) is not None]
    kept = [value for value in values if all(value_key(value) in each for each in keys)]
    return [value for value in kept if not any(refutes(node, value) for node in nodes)]
