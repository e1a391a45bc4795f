"""Decides whether the branches of a `oneOf` exclude each other, so that it means the same as `anyOf`.

What is not proved within MAX_COMPARISONS is not exclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

from headrace.engine.grammar.json_values import TYPES, allowed_values, value_key, values_of

Conjuncts = Sequence[dict[str, Any]]
ConjunctsOf = Callable[[Any], Conjuncts | None]

MAX_COMPARISONS = 4_000
"""Comparisons for one document's `oneOf`: about 40 ms."""

MAX_DEPTH = 8

MAX_TAGS = 16


class Exclusion:
    """A "no" may mean that no proof was found within the limits."""

    def __init__(self, conjuncts_of: ConjunctsOf) -> None:
        self._conjuncts_of = conjuncts_of
        self._num_left = MAX_COMPARISONS

    def is_exclusive(self, branches: Sequence[Any], context: Conjuncts) -> bool:
        """context: further conjuncts that the value satisfies"""
        possible = [[*conjuncts, *context] for conjuncts in map(self._conjuncts_of, branches) if conjuncts is not None]
        return self._are_told_apart(possible) or all(self._disjoint(one, other, 0) for one, other in combinations(possible, 2))

    def _are_told_apart(self, branches: Sequence[Conjuncts]) -> bool:
        if _are_distinct([_listed(branch) for branch in branches]):
            return True
        names = [name for node in branches[0] for name in node.get("required", ())] if branches else []
        return any(self._is_tag(name, branches) for name in dict.fromkeys(names[:MAX_TAGS]))

    def _is_tag(self, name: str, branches: Sequence[Conjuncts]) -> bool:
        listed: list[Sequence[Any] | None] = []
        for branch in branches:
            if _types(branch) != {"object"} or not any(name in node.get("required", ()) for node in branch):
                return False
            conjuncts = self._of_property(name, branch)
            listed.append([] if conjuncts is None else _listed(conjuncts))
            if listed[-1] is None:
                return False
        return _are_distinct(listed)

    def _of_property(self, name: str, branch: Conjuncts) -> Conjuncts | None:
        nodes: list[dict[str, Any]] = []
        for node in branch:
            schema = _property(name, node)
            conjuncts = () if schema is True else self._conjuncts_of(schema)
            if conjuncts is None:
                return None
            nodes += conjuncts
        return nodes

    def _disjoint(self, one: Conjuncts, other: Conjuncts, depth: int) -> bool:
        self._num_left -= 1
        both = [*one, *other]
        if self._num_left < 0 or depth > MAX_DEPTH or not both:
            return False
        for few, rest in ((one, other), (other, one)):
            listed = _listed(few)
            if listed is not None and not allowed_values(listed, rest):
                return True
        if all(self._no_value_of(name, one, other, both, depth) for name in _types(both)):
            return True
        return self._no_branch_meets(one, other, depth) or self._no_branch_meets(other, one, depth)

    def _no_value_of(self, name: str, one: Conjuncts, other: Conjuncts, both: Conjuncts, depth: int) -> bool:
        match name:
            case "integer" | "number":
                return _is_empty_range(both)
            case "string":
                return _exceeds(both, "minLength", "maxLength")
            case "array":
                return _exceeds(both, "minItems", "maxItems") or any(
                    self._of_pair(one_item, other_item, depth) for one_item, other_item in _items(one, other)
                )
            case "object":
                required = dict.fromkeys(name for node in both for name in node.get("required", ()))
                return len(required) > min([node.get("maxProperties", len(required)) for node in both]) or any(
                    self._property_differs(name, one, other, depth) for name in required
                )
        return False

    def _property_differs(self, name: str, one: Conjuncts, other: Conjuncts, depth: int) -> bool:
        first, second = self._of_property(name, one), self._of_property(name, other)
        return first is None or second is None or (bool(first and second) and self._disjoint(first, second, depth + 1))

    def _of_pair(self, one: Sequence[Any], other: Sequence[Any], depth: int) -> bool:
        sides: list[list[dict[str, Any]]] = []
        for schemas in (one, other):
            conjuncts = [self._conjuncts_of(schema) for schema in schemas]
            if None in conjuncts:
                return True
            sides.append([node for nodes in conjuncts if nodes for node in nodes])
        return bool(sides[0] and sides[1]) and self._disjoint(sides[0], sides[1], depth + 1)

    def _no_branch_meets(self, one: Conjuncts, other: Conjuncts, depth: int) -> bool:
        for node in one:
            for keyword in ("anyOf", "oneOf"):
                if keyword not in node:
                    continue
                rest = [each for each in one if each is not node]
                inner = [self._conjuncts_of(branch) for branch in node[keyword]]
                if all(branch is None or self._disjoint([*branch, *rest], other, depth + 1) for branch in inner):
                    return True
        return False


def _listed(conjuncts: Conjuncts) -> list[Any] | None:
    for node in conjuncts:
        values = values_of(node)
        if values is not None:
            return allowed_values(values, conjuncts)
    return None


def _are_distinct(listed: Sequence[Sequence[Any] | None]) -> bool:
    seen: set[object] = set()
    for values in listed:
        if values is None:
            return False
        keys = {value_key(value) for value in values}
        if not seen.isdisjoint(keys):
            return False
        seen |= keys
    return True


def _types(conjuncts: Conjuncts) -> set[str]:
    allowed = set(TYPES)
    for node in conjuncts:
        given = node.get("type")
        if given is not None:
            names = {given} if isinstance(given, str) else set(given)
            allowed &= names | ({"integer"} if "number" in names else set())
    return allowed


def _property(name: str, node: dict[str, Any]) -> Any:
    properties = node.get("properties", {})
    if name in properties:
        return properties[name]
    return True if "patternProperties" in node else node.get("additionalProperties", True)


def _items(one: Conjuncts, other: Conjuncts) -> Iterator[tuple[list[Any], list[Any]]]:
    num_items = max([node.get("minItems", 0) for node in (*one, *other)])
    longest = max([len(node.get("prefixItems", ())) for node in (*one, *other)])
    for index in range(min(num_items, longest + 1)):
        yield _item(index, one), _item(index, other)


def _item(index: int, conjuncts: Conjuncts) -> list[Any]:
    schemas = []
    for node in conjuncts:
        prefix = node.get("prefixItems", ())
        schemas.append(prefix[index] if index < len(prefix) else node.get("items", True))
    return schemas


def _exceeds(conjuncts: Conjuncts, least: str, most: str) -> bool:
    limits = [node[most] for node in conjuncts if most in node]
    return bool(limits) and max([node.get(least, 0) for node in conjuncts]) > min(limits)


def _is_empty_range(conjuncts: Conjuncts) -> bool:
    lower = [(node[key], key == "exclusiveMinimum") for node in conjuncts for key in ("minimum", "exclusiveMinimum") if key in node]
    upper = [(node[key], key == "maximum") for node in conjuncts for key in ("maximum", "exclusiveMaximum") if key in node]
    if not lower or not upper:
        return False
    (least, is_above), (most, is_included) = max(lower), min(upper)
    return bool(least > most or (least == most and (is_above or not is_included)))
