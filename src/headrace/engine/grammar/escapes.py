"""Decides which escapes the strings of a normalized schema may have.

llguidance compares property names as they are spelled: where an object lists names and allows others too, `"\\u0061"` would be another name
than "a", and escape the rule for it. In such a document a string has one spelling: the short escapes, and no `\\u`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.engine.grammar.char_sets import has_only_short_escapes

SHORT_ESCAPES: Mapping[str, object] = {"json_allowed_escapes": 'nrbtf"\\'}
"""llguidance's option for a schema in which each string has one spelling."""


def escape_options(schema: dict[str, Any]) -> Mapping[str, object]:
    """llguidance's options for the escapes in a normalized schema's strings.

    Raises InvalidRequest for a listed text that has no spelling under them.
    """
    nodes = [value for value in _values(schema) if isinstance(value, dict)]  # some are no schemas, and may cost an escape for nothing
    if not any(_tells_names_apart(node) for node in nodes):
        return {}
    for text in (text for node in nodes for keyword in ("const", "enum") for text in _values(node.get(keyword))):
        if isinstance(text, str) and not has_only_short_escapes(text):
            limit = "const and enum without control characters where an object lists some of its properties and allows others"
            raise InvalidRequest("grammar", limit, text, 'Set "additionalProperties": false.')
    return SHORT_ESCAPES


def _tells_names_apart(node: dict[str, Any]) -> bool:
    """Whether a schema has different rules for listed names, for names that match an expression, and for other names."""
    is_listed, is_matched = "properties" in node or "required" in node, "patternProperties" in node
    return is_listed + is_matched + (node.get("additionalProperties") is not False) > 1


def _values(value: Any) -> Iterator[Any]:
    """A JSON value and all values in it, without the names of properties: they have one spelling."""
    unseen = [value]
    while unseen:
        found = unseen.pop()
        yield found
        if isinstance(found, dict | list):
            unseen += found.values() if isinstance(found, dict) else found
