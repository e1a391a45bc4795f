"""Simplifies the keywords of one JSON schema, without its subschemas."""

from __future__ import annotations

from typing import Any

from headrace.core.grammar import FORMATS
from headrace.engine.grammar.ecma_pattern import PatternRefused
from headrace.engine.grammar.json_values import DECIDED, SIZES, TYPES, refutes, type_names, value_key, values_of
from headrace.engine.grammar.limits import check_string_counts
from headrace.engine.grammar.number_bounds import check_multiple, check_values, move_bounds, read_bounds
from headrace.engine.grammar.pattern_text import translated
from headrace.engine.grammar.places import Place, refused, unsupported

Keywords = dict[str, Any]
Types = frozenset[str]

TYPE_TO_KEYWORDS = {
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset(
        {
            *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
            *("contains", "minContains", "maxContains", "unevaluatedItems"),
        }
    ),
    "object": frozenset(
        {
            *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties", "propertyNames"),
            *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
        }
    ),
}
KEYWORD_TO_TYPE = {keyword: name for name, keywords in TYPE_TO_KEYWORDS.items() for keyword in keywords}
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
LOGIC = frozenset({"allOf", "anyOf", "oneOf", "if", "then", "else"})
OF_ANY_TYPE = frozenset({"type", "nullable", "const", "enum", "not", *LOGIC, *REFERENCES})

DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")
UNSUPPORTED = frozenset({"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", *DEPENDENCIES})

ENFORCED_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})

NO_BOUND = (1 << 31) - 1
"""A size from here on binds no answer: generators write it for "no bound"."""


def simplified(schema: Any, place: Place) -> Keywords | bool:
    """True: nothing binds the answer. False: no value satisfies the schema."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise refused(place, "a schema: an object, true or false", schema)
    node = {keyword: value for keyword, value in schema.items() if is_keyword(keyword)}
    _check_branches(node, place)
    _read_draft_3_required(node, place)
    types = _not_excluded(node, _types(node, place), place)
    _drop_other_types(node, types)
    for name, rule in READ_FIRST.items():
        if not TYPE_TO_KEYWORDS[name].isdisjoint(node):
            rule(node, place)
    types = _types_of_values(node, types, place)
    if types is not None and not types:
        return False
    if not TYPE_TO_KEYWORDS["number"].isdisjoint(node):
        move_bounds(node, place, is_integer=types is not None and "number" not in types)
    if "format" in node:
        _read_format(node, place)
    if not LOGIC.isdisjoint(node):
        _logic_rules(node, place)
    if unenforced := [keyword for keyword in node if keyword in UNSUPPORTED]:
        raise unsupported(place, unenforced)
    return node or True


def is_keyword(name: str) -> bool:
    return name in KEYWORD_TO_TYPE or name in OF_ANY_TYPE


def allows_all(schema: Any, place: Place) -> bool:
    return simplified(schema, place) is True


def _read_draft_3_required(node: Keywords, place: Place) -> None:
    if node.get("required") is True:
        raise refused((place, "required"), "a list of names in required", True, "List the property's name in required of its object.")
    if node.get("required") is False:
        del node["required"]


def _types(node: Keywords, place: Place) -> Types | None:
    """OpenAPI's `nullable` adds "null"."""
    is_nullable = node.pop("nullable", False) is True
    if "type" not in node:
        return None
    given = node["type"]
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) and name in TYPES for name in names):
        raise refused((place, "type"), "a type of JSON Schema, or a list of them: " + ", ".join(TYPES), given, "Leave it out for any type.")
    _set_types(node, [*names, *(["null"] if is_nullable else [])])
    return _names(node)


def _set_types(node: Keywords, names: list[str]) -> None:
    types = list(dict.fromkeys(names))
    if {*types, "integer"} == set(TYPES) and "number" in types:
        node.pop("type", None)
    else:
        node["type"] = types[0] if len(types) == 1 else types


def _names(node: Keywords) -> Types | None:
    if "type" not in node:
        return None
    return frozenset([node["type"]] if isinstance(node["type"], str) else node["type"])


def _not_excluded(node: Keywords, types: Types | None, place: Place) -> Types | None:
    if "not" not in node:
        return types
    excluded, below = node["not"], (place, "not")
    if isinstance(excluded, dict) and [keyword for keyword in excluded if is_keyword(keyword)] == ["not"]:
        del node["not"]
        node["allOf"] = [*node.get("allOf", ()), excluded["not"]]
        return types
    inner = simplified(excluded, below)
    if inner is False:
        del node["not"]
        return types
    if inner is True:
        return frozenset()
    if inner.keys() != {"type"}:
        return types
    names = _names(inner) or frozenset()
    if "integer" in names and "number" not in names and (types is None or "number" in types):
        return types  # fractions alone would be left
    gone = names | ({"integer"} if "number" in names else set())
    left = [name for name in TYPES if name not in gone and (name in types if types is not None else name != "integer")]
    del node["not"]
    _set_types(node, left)
    return frozenset(left)


def _drop_other_types(node: Keywords, types: Types | None) -> None:
    if types is None:
        return
    for keyword in [keyword for keyword in node if keyword in KEYWORD_TO_TYPE]:
        name = KEYWORD_TO_TYPE[keyword]
        if name not in types and not (name == "number" and "integer" in types):
            del node[keyword]


def _types_of_values(node: Keywords, types: Types | None, place: Place) -> Types | None:
    """A `format` beside listed values is dropped: llguidance would refuse values whose spelling it does not know."""
    for keyword in ("const", "enum"):
        if keyword not in node:
            continue
        values = [node["const"]] if keyword == "const" else node["enum"]
        if not isinstance(values, list) or not values:
            raise refused((place, keyword), "a list of at least one value in enum", values)
        kept = {value_key(value): value for value in values if not refutes(node, value)}
        check_values(list(kept.values()), keyword, place)
        types = frozenset(name for value in kept.values() for name in type_names(value))
        node[keyword] = list(kept.values()) if keyword == "enum" else node["const"]
        if not kept:
            return frozenset()
    if values_of(node) is None:
        return types
    for keyword in [keyword for keyword in node if keyword in DECIDED or keyword == "format"]:
        del node[keyword]
    _drop_other_types(node, types)
    return types


def _read_sizes(node: Keywords, place: Place, least: str, most: str) -> None:
    for keyword in (least, most):
        _check_whole(node, keyword, place)
    if node.get(least) == 0:
        del node[least]
    if node.get(most, 0) >= NO_BOUND:
        del node[most]


def _check_whole(node: Keywords, keyword: str, place: Place) -> None:
    given = node.get(keyword, 0)
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise refused((place, keyword), f"a whole number of at least 0 in {keyword}", given)


def _number_rules(node: Keywords, place: Place) -> None:
    read_bounds(node, place)
    check_multiple(node, place)


def _string_rules(node: Keywords, place: Place) -> None:
    _read_sizes(node, place, *SIZES[str])
    check_string_counts(node)
    if "pattern" not in node:
        return
    if not isinstance(node["pattern"], str):
        raise refused((place, "pattern"), "a regular expression as a text in pattern", node["pattern"])
    expressions = _translated(node["pattern"], (place, "pattern"))
    node["pattern"] = expressions.pop()
    if expressions:
        node["allOf"] = [*node.get("allOf", ()), *({"pattern": expression} for expression in expressions)]


def _translated(expression: str, place: Place) -> list[str]:
    try:
        return translated(expression)
    except PatternRefused as error:
        raise refused(place, error.limit, error.given or expression, error.remedy) from error


def _read_format(node: Keywords, place: Place) -> None:
    name = node["format"]
    if not isinstance(name, str):
        raise refused((place, "format"), "a text in format", name)
    if name not in FORMATS:
        del node["format"]
    elif name not in ENFORCED_FORMATS:
        raise refused(place, "a format of JSON Schema that is supported", name, "Leave it out, or use pattern.")


def _array_rules(node: Keywords, place: Place) -> None:
    _read_sizes(node, place, *SIZES[list])
    _read_items(node, place)
    _read_contains(node, place)
    unique = node.get("uniqueItems")
    if unique is False or (unique is True and node.get("maxItems", 2) <= 1):
        del node["uniqueItems"]
    if "unevaluatedItems" in node and allows_all(node["unevaluatedItems"], (place, "unevaluatedItems")):
        del node["unevaluatedItems"]


def _read_items(node: Keywords, place: Place) -> None:
    """Drafts up to 2019-09 have `items` as a list, and `additionalItems` for the rest."""
    if isinstance(node.get("items"), list):
        if "prefixItems" in node:
            raise refused((place, "items"), "a schema in items beside prefixItems", node["items"])
        renamed = {"prefixItems": node["items"], **({"items": node["additionalItems"]} if "additionalItems" in node else {})}
        given = list(node.items())
        node.clear()
        for keyword, value in given:
            node.update(renamed if keyword == "items" else {keyword: value})
    node.pop("additionalItems", None)
    if not isinstance(node.get("prefixItems", []), list):
        raise refused((place, "prefixItems"), "a list of schemas in prefixItems", node["prefixItems"])
    if node.get("prefixItems") == []:
        del node["prefixItems"]


def _read_contains(node: Keywords, place: Place) -> None:
    for keyword in ("minContains", "maxContains"):
        _check_whole(node, keyword, place)
    least, most = node.get("minContains", 1), node.get("maxContains")
    counts_all = "contains" in node and allows_all(node["contains"], (place, "contains"))
    if "contains" in node and not counts_all and (least > 0 or most is not None):
        return
    if counts_all:
        node["minItems"] = max(least, node.get("minItems", 0))
        if most is not None:
            node["maxItems"] = min(most, node.get("maxItems", most))
    for keyword in ("contains", "minContains", "maxContains"):
        node.pop(keyword, None)
    if node.get("minItems") == 0:
        del node["minItems"]


def _object_rules(node: Keywords, place: Place) -> None:
    _read_sizes(node, place, *SIZES[dict])
    _check_objects(node, place)
    for keyword in DEPENDENCIES:
        if keyword in node:
            below = (place, keyword)
            node[keyword] = {name: rule for name, rule in node[keyword].items() if rule != [] and not _is_idle(rule, (below, name))}
    _translate_names(node, (place, "patternProperties"))
    for keyword in ("required", "properties", "patternProperties", *DEPENDENCIES):
        if node.get(keyword) in ([], {}):
            del node[keyword]
    if "unevaluatedProperties" in node and allows_all(node["unevaluatedProperties"], (place, "unevaluatedProperties")):
        del node["unevaluatedProperties"]
    if "required" in node:
        node["required"] = list(dict.fromkeys(node["required"]))
    if 0 < node.get("minProperties", 0) <= len(node.get("required", ())):
        del node["minProperties"]
    is_closed = node.get("additionalProperties") is False and "patternProperties" not in node
    num_certain = len(node.get("required", ())) + 1
    if not is_closed and node.get("minProperties", 0) > num_certain:  # llguidance counts a name twice that stands there twice
        limit = f"minProperties of at most {num_certain}, one more than required lists, where other names are free"
        raise refused((place, "minProperties"), limit, node["minProperties"], "List the names in required beside it, or leave it out.")
    if is_closed and len(node.get("properties", ())) <= node.get("maxProperties", -1):
        del node["maxProperties"]


def _check_objects(node: Keywords, place: Place) -> None:
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise refused((place, "required"), "a list of names in required", required)
    for keyword in ("properties", "patternProperties", *DEPENDENCIES):
        if not isinstance(node.get(keyword, {}), dict):
            raise refused((place, keyword), f"an object in {keyword}", node[keyword])


def _translate_names(node: Keywords, place: Place) -> None:
    translated: Keywords = {}
    for expression, rule in node.pop("patternProperties", {}).items():
        translation, *others = _translated(expression, (place, expression))
        if others:
            raise refused(place, "expressions without look-around", expression, "Write the names that it lets pass, as in ^[b-z].")
        if translation in translated:
            raise refused(place, "expressions that no name matches two of", expression, "Leave one out.")
        translated[translation] = rule
    if translated:
        node["patternProperties"] = translated


def _is_idle(rule: object, place: Place) -> bool:
    return isinstance(rule, dict | bool) and allows_all(rule, place)


def _check_branches(node: Keywords, place: Place) -> None:
    for keyword in ("allOf", "anyOf", "oneOf"):
        branches = node.get(keyword, [True])
        if not isinstance(branches, list) or (not branches and keyword != "allOf"):
            raise refused((place, keyword), f"a list of at least one schema in {keyword}", branches)


def _logic_rules(node: Keywords, place: Place) -> None:
    _read_condition(node, place)
    if node.get("allOf") == []:
        del node["allOf"]


def _read_condition(node: Keywords, place: Place) -> None:
    branches = {name: node[name] for name in ("then", "else") if name in node and not allows_all(node[name], (place, name))}
    condition = simplified(node["if"], (place, "if")) if "if" in node and branches else None
    if isinstance(condition, dict):
        return
    for name in ("if", "then", "else"):
        node.pop(name, None)
    chosen = {True: "then", False: "else"}.get(condition) if condition is not None else None
    if chosen in branches:
        node["allOf"] = [*node.get("allOf", ()), branches[chosen]]


READ_FIRST = {"number": _number_rules, "string": _string_rules, "array": _array_rules, "object": _object_rules}
