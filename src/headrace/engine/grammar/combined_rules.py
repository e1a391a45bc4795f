"""Simplifies keywords of a JSON schema together with their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.engine.grammar.json_values import DECIDED, allowed_values, values_of
from headrace.engine.grammar.keyword_rules import KEYWORD_TO_TYPE, Keywords
from headrace.engine.grammar.number_bounds import MAX_MULTIPLE, multiple_parts
from headrace.engine.grammar.places import Place, refused, unsupported

UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")

EVALUATING = frozenset({"anyOf", "oneOf", "not", "if", "contains", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"})

NAME_FORMATS = {
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": "^[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-9])|(0[13-9]|1[0-2])-30|(0[13578]|1[02])-31)$",
}
"""Formats as expressions: llguidance has formats of values alone."""


def close_unevaluated(node: Keywords, combined: Sequence[Any], conjuncts: Sequence[Keywords], place: Place) -> None:
    """combined: the conjuncts' schemas as sent, the node's own first. Raises InvalidRequest where the rules would depend on the value."""
    as_sent = [schema for schema in combined if isinstance(schema, dict)]
    if any(not EVALUATING.isdisjoint(schema) for schema in as_sent):
        raise unsupported(place, [keyword for keyword in UNEVALUATED if keyword in node])
    properties, items = (node.pop(keyword, None) for keyword in UNEVALUATED)
    if properties is not None and not _has(as_sent, "additionalProperties") and not _has(as_sent[1:], "unevaluatedProperties"):
        for keyword in ("properties", "patternProperties"):
            own = node.get(keyword, {})
            if named := {name: True for each in conjuncts for name in each.get(keyword, ()) if name not in own}:
                node[keyword] = {**own, **named}
        node["additionalProperties"] = properties
    if items is not None and not _has(conjuncts, "items") and not _has(as_sent[1:], "unevaluatedItems"):
        prefix = node.get("prefixItems", [])
        longest = max(len(each.get("prefixItems", ())) for each in conjuncts)
        if longest:
            node["prefixItems"] = [*prefix, *[True] * (longest - len(prefix))]
        node["items"] = items


def name_properties(node: Keywords, names: Sequence[Keywords] | None, link: Callable[[Any, str], Any], place: Place) -> None:
    """names  the conjuncts of its schema; None where it allows no name
    link   makes a reference to a schema that several properties share
    """
    del node["propertyNames"]
    allowed = {} if names is None else _names_allowed(names, place)
    if allowed is None:
        return
    properties = node.get("properties", {})
    if "patternProperties" in node or (isinstance(allowed, str) and properties):
        raise unsupported(place, ["propertyNames"])
    others = node.pop("additionalProperties", True)
    if isinstance(allowed, str):
        node["patternProperties"] = {allowed: others}
    else:
        shared = link(others, "values") if isinstance(others, dict) and len(allowed) > 1 else others
        node["properties"] = {name: rule if name in allowed else False for name, rule in properties.items()}
        node["properties"] |= {name: shared for name in allowed if name not in properties}
    node["additionalProperties"] = False


def _names_allowed(conjuncts: Sequence[Keywords], place: Place) -> dict[str, None] | str | None:
    rules: list[Keywords] = []
    for node in conjuncts:
        types = node.get("type", "string")
        if "string" not in ([types] if isinstance(types, str) else types):
            return {}
        if rule := {key: value for key, value in node.items() if key != "type" and KEYWORD_TO_TYPE.get(key, "string") == "string"}:
            rules.append(rule)
    if not rules:
        return None
    listed = [values for rule in rules if (values := values_of(rule)) is not None]
    if listed and all(rule.keys() <= DECIDED | {"const", "enum"} for rule in rules):
        return {value: None for value in allowed_values(listed[0], rules) if isinstance(value, str)}
    expression = _name_expression(rules[0]) if len(rules) == 1 else None
    if expression is None:
        raise unsupported(place, ["propertyNames"])
    return expression


def _name_expression(rule: Keywords) -> str | None:
    if rule.keys() == {"pattern"}:
        expression: str = rule["pattern"]
        return expression
    if rule.keys() == {"format"}:
        return NAME_FORMATS.get(rule["format"])
    if rule.keys() <= {"minLength", "maxLength"}:
        return f"^(?s:.{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}})$"
    return None


def check_multiples(conjuncts: Sequence[Keywords], place: Place) -> None:
    """Raises InvalidRequest for several `multipleOf` whose least common multiple exceeds llguidance's 32 bits."""
    parts = {part for each in conjuncts if "multipleOf" in each and (part := multiple_parts(each["multipleOf"]))}
    most_decimals = max([num_decimals for _, num_decimals in parts], default=0)
    product = 1
    for coefficient, num_decimals in parts:
        product *= coefficient * 10 ** (most_decimals - num_decimals)
    if len(parts) > 1 and product > MAX_MULTIPLE:
        raise refused(place, f"values of multipleOf whose product is at most {MAX_MULTIPLE}", remedy="Leave one out.")


def _has(nodes: Sequence[Keywords], keyword: str) -> bool:
    return any(keyword in node for node in nodes)
