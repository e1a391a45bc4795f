"""A JSON schema as llguidance enforces it: the one pass between what a client sends and the grammar library.

What has no effect goes, annotations go, references are followed within the document, and what the library cannot hold is rewritten where
that says the same. Everything else that binds an answer is refused by its keyword and its place in the schema. The order of properties and
of keywords is kept, since it is the order of the answer.

`keyword_rules` simplifies the keywords of one schema, `references` finds what a reference points to, `exclusive` judges `oneOf`. A schema
that is referred to is written once, under `$defs`. The library cannot combine a definition that it is still reading with other keywords:
in a schema that recurs such a definition is written out, as far as MAX_WRITTEN allows. All else is linear in the document.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.engine.grammar.exclusive import Exclusion
from headrace.engine.grammar.json_values import DECIDED, refutes, values_of
from headrace.engine.grammar.keyword_rules import KEYWORD_TO_TYPE, REFERENCES, Keywords, is_keyword, simplified
from headrace.engine.grammar.number_bounds import MAX_MULTIPLE, multiple_parts
from headrace.engine.grammar.places import Place, refused, unsupported
from headrace.engine.grammar.references import References

MAX_WRITTEN = 4_000
"""Schemas that are written, each time counted, before definitions are no longer written out."""

MAX_WRITTEN_OUT = 6
"""Definitions that are written out within each other."""

NAME_FORMATS = {
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": "^[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-9])|(0[13-9]|1[0-2])-30|(0[13578]|1[02])-31)$",
}
"""Formats of the names of properties, as expressions: the library has formats of values alone."""

MAX_NAME_CHARS = 40

BRANCHES = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
"""Keywords whose schemas judge the same value as the schema that has them."""

Schema = dict[str, Any] | bool
Around = tuple["Around", Any] | None
"""Schemas within each other, the innermost last."""


EVALUATING = frozenset({"anyOf", "oneOf", "not", "if", "contains", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"})
"""Keywords by which it depends on the value which of its parts are evaluated."""


class Target(NamedTuple):
    """What a reference points to. name: what its definition may be called"""

    schema: Any
    name: str


def normalized(schema: Any) -> dict[str, Any]:
    """The schema that says the same to llguidance. Raises InvalidRequest where there is none."""
    return _Document(schema).written()


class _Document:
    """One schema, with the definitions that its references need."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._references = References(root)
        self._exclusion = Exclusion(self._conjuncts)
        self._read: dict[int, tuple[Any, Keywords]] = {}
        self._conjunct_lists: dict[int, tuple[Any, list[Keywords] | None]] = {}
        self._pointers: dict[int, str] = {}
        self._num_named: Counter[str] = Counter()
        self._definitions: dict[str, Any] = {}
        self._unwritten: list[tuple[str, Any]] = []
        self._combining: list[tuple[Any, Place]] = []
        self._num_written = self._num_open = self._num_multiples = 0

    def written(self) -> dict[str, Any]:
        self._references.check_ends(self._root)
        root = self._followed(self._root)
        self._pointers[id(root)] = "#"
        found = self._written(root, self._references.place(root))
        if found is False:
            given = ", ".join(filter(is_keyword, root)) if isinstance(root, dict) else root
            raise refused(
                self._references.place(root), "a JSON schema that a value can satisfy", given, "Together they exclude every value."
            )
        while self._unwritten:
            name, schema = self._unwritten.pop()
            self._definitions[name] = self._written(schema, self._references.place(schema))
        if self._num_multiples > 1:
            for schema, place in self._combining:
                self._check_multiples(schema, place)
        written = {} if isinstance(found, bool) else found
        return {**written, "$defs": self._definitions} if self._definitions else written

    # reading

    def _simplified(self, schema: Any, place: Place) -> Keywords | bool:
        """`keyword_rules.simplified`, with the targets of all references under `$ref`. What is given back is shared."""
        if id(schema) in self._read:
            return self._read[id(schema)][1]
        found = simplified(schema, place)
        node = self._with_targets(found, schema, place) if isinstance(found, dict) else found
        if isinstance(node, dict):
            self._read[id(schema)] = schema, node  # an id belongs to one object as long as it lives
        return node

    def _with_targets(self, node: Keywords, schema: dict[str, Any], place: Place) -> Keywords | bool:
        found: Keywords = {}
        for keyword, value in node.items():
            if keyword not in REFERENCES:
                found[keyword] = value
                continue
            target = self._references.target(schema, keyword, place)
            if target is False:
                return False
            if target is not True:
                found.setdefault("$ref", []).append(Target(target, value.rpartition("/")[2]))
        return found or True

    def _followed(self, schema: Any) -> Any:
        """The schema that a chain of references alone ends at."""
        while True:
            node = self._simplified(schema, self._references.place(schema))
            if not isinstance(node, dict) or node.keys() != {"$ref"} or len(node["$ref"]) > 1:
                return schema
            schema = node["$ref"][0].schema

    def _conjuncts(self, schema: Any) -> list[Keywords] | None:
        """The keywords of a schema and of what its `allOf` and `$ref` name, its own first; None where no value satisfies them."""
        if id(schema) not in self._conjunct_lists:
            found = [self._simplified(each, self._references.place(each)) for each in self._combined(schema)]
            nodes = [
                {key: value for key, value in node.items() if key not in ("allOf", "$ref")} for node in found if isinstance(node, dict)
            ]
            self._conjunct_lists[id(schema)] = schema, None if False in found else nodes
        return self._conjunct_lists[id(schema)][1]

    def _combined(self, schema: Any) -> list[Any]:
        """A schema and all that its `allOf` and `$ref` name, each once."""
        found: dict[int, Any] = {}
        unseen = [schema]
        while unseen:
            schema = unseen.pop()
            if id(schema) in found:
                continue
            found[id(schema)] = schema
            node = self._simplified(schema, self._references.place(schema))
            if isinstance(node, dict):
                unseen += [*node.get("allOf", ()), *(target.schema for target in node.get("$ref", ()))][::-1]
        return list(found.values())

    # rewriting

    def _rewritten(self, schema: Any, place: Place) -> Keywords | bool:
        """The keywords of a schema, with what they say together written as llguidance has it."""
        found = self._simplified(schema, place)
        if isinstance(found, bool):
            return found
        node = dict(found)
        if "unevaluatedProperties" in node or "unevaluatedItems" in node:
            self._close(node, schema, place)
        if "propertyNames" in node:
            self._name_properties(node, place)
        if "allOf" in node or "$ref" in node:
            self._combining.append((schema, place))
        self._num_multiples += "multipleOf" in node
        return node or True

    def _close(self, node: Keywords, schema: dict[str, Any], place: Place) -> None:
        """Where `allOf` and `$ref` alone add to a schema, what is left unevaluated is what they do not name."""
        as_sent = [each for each in self._combined(schema) if isinstance(each, dict)]
        if any(not EVALUATING.isdisjoint(each) for each in as_sent):
            raise unsupported(place, [keyword for keyword in ("unevaluatedProperties", "unevaluatedItems") if keyword in node])
        conjuncts = self._conjuncts(schema) or [node]
        others = as_sent[1:]
        properties, items = node.pop("unevaluatedProperties", None), node.pop("unevaluatedItems", None)
        if properties is not None and not _has(as_sent, "additionalProperties") and not _has(others, "unevaluatedProperties"):
            for keyword in ("properties", "patternProperties"):
                own = node.get(keyword, {})
                if named := {name: True for each in conjuncts for name in each.get(keyword, ()) if name not in own}:
                    node[keyword] = {**own, **named}
            node["additionalProperties"] = properties
        if items is not None and not _has(conjuncts, "items") and not _has(others, "unevaluatedItems"):
            prefix = node.get("prefixItems", [])
            longest = max(len(each.get("prefixItems", ())) for each in conjuncts)
            if longest:
                node["prefixItems"] = [*prefix, *[True] * (longest - len(prefix))]
            node["items"] = items

    def _name_properties(self, node: Keywords, place: Place) -> None:
        """Write `propertyNames` as the properties that it allows, or as an expression of their names."""
        names = self._names_allowed(node["propertyNames"], place)
        del node["propertyNames"]
        if names is None:
            return
        properties = node.get("properties", {})
        if "patternProperties" in node or (isinstance(names, str) and properties):
            raise unsupported(place, ["propertyNames"])
        others = node.pop("additionalProperties", True)
        if isinstance(names, str):
            node["patternProperties"] = {names: others}
        else:
            shared = self._references.link(others, "values") if isinstance(others, dict) and len(names) > 1 else others
            node["properties"] = {name: rule if name in names else False for name, rule in properties.items()}
            node["properties"] |= {name: shared for name in names if name not in properties}
        node["additionalProperties"] = False

    def _names_allowed(self, schema: Any, place: Place) -> dict[str, None] | str | None:
        """The names that a schema of names allows, or an expression for them; None for every name."""
        rules: list[Keywords] = []
        conjuncts = self._conjuncts(schema)
        if conjuncts is None:
            return {}
        for node in conjuncts:
            types = node.get("type", "string")
            if "string" not in ([types] if isinstance(types, str) else types):
                return {}
            if rule := {key: value for key, value in node.items() if key != "type" and KEYWORD_TO_TYPE.get(key, "string") == "string"}:
                rules.append(rule)
        if not rules:
            return None
        for rule in rules:
            values = values_of(rule)
            if values is not None and all(other is rule or other.keys() <= DECIDED for other in rules):
                return {value: None for value in values if isinstance(value, str) and not any(refutes(each, value) for each in rules)}
        expression = _name_expression(rules[0]) if len(rules) == 1 else None
        if expression is None:
            raise unsupported(place, ["propertyNames"])
        return expression

    def _check_multiples(self, schema: Any, place: Place) -> None:
        """llguidance combines several `multipleOf` to their least common multiple, and loses what 32 bits do not hold of their product."""
        parts = [multiple_parts(each["multipleOf"]) for each in self._conjuncts(schema) or () if "multipleOf" in each]
        most_decimals = max([part[1] for part in parts if part], default=0)
        product = 1
        for part in dict.fromkeys(parts):
            product *= part[0] * 10 ** (most_decimals - part[1]) if part else 1
        if len(parts) > 1 and product > MAX_MULTIPLE:
            raise refused(place, f"values of multipleOf whose product is at most {MAX_MULTIPLE}", remedy="Leave one out.")

    # writing

    def _written(self, schema: Any, place: Place, *, around: Around = None, is_combined: bool = False) -> Schema:
        """The schema for llguidance.

        around       the schemas around it that judge the same value
        is_combined  whether other schemas judge the same value
        """
        self._num_written += 1
        node = self._rewritten(schema, place)
        if isinstance(node, bool):
            return node
        written: dict[str, Any] = {}
        for keyword, value in node.items():
            below = (place, keyword)
            match keyword:
                case "properties" | "patternProperties":
                    written[keyword] = {name: self._child(child, (below, name)) for name, child in value.items()}
                case "items" | "additionalProperties":
                    written[keyword] = self._child(value, below)
                case "prefixItems":
                    written[keyword] = [self._child(child, (below, index)) for index, child in enumerate(value)]
                case "allOf" | "anyOf" | "oneOf" | "$ref":
                    beside = is_combined or len(node) > 1 or (keyword in ("allOf", "$ref") and len(value) > 1)
                    if not self._write_branches(written, keyword, value, below, (around, schema), beside):
                        return False
                case _:
                    written[keyword] = value
        return written or True

    def _write_branches(
        self, written: dict[str, Any], keyword: str, value: list[Any], place: Place, around: tuple[Around, Any], is_combined: bool
    ) -> bool:
        """Add the schemas of a keyword that judge the same value. False: no value satisfies them."""
        tag = self._tag(value, place, around) if keyword == "oneOf" else None
        if tag is not None:
            written["allOf"] = [*written.get("allOf", ()), {"required": [tag]}]
            is_combined = True
        if keyword == "$ref":
            found = [self._referred(target, around, is_combined) for target in value]
        else:
            found = [self._written(branch, (place, index), around=around, is_combined=is_combined) for index, branch in enumerate(value)]
        if keyword in ("allOf", "$ref"):
            if not is_combined and isinstance(found[0], dict) and found[0].keys() == {"$ref"}:
                written |= found[0]
            elif kept := [branch for branch in found if branch is not True]:
                written["allOf"] = [*written.get("allOf", ()), *kept]
            return False not in found
        if True in found:
            return True
        possible = [branch for branch in found if branch is not False]
        if "anyOf" in written:
            written["allOf"] = [*written.get("allOf", ()), {"anyOf": possible}]
        else:
            written["anyOf"] = possible
        return bool(possible)

    def _tag(self, branches: list[Any], place: Place, around: tuple[Around, Any]) -> str | None:
        """The property that has to be there for the branches of a `oneOf` to exclude each other: that of OpenAPI's `discriminator`, which
        pydantic does not list in `required` where it has a default. None where they do without it. Raises InvalidRequest where they do not.
        """
        context = self._context(around)
        if self._exclusion.is_exclusive(branches, context):
            return None
        discriminator = around[1].get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if isinstance(name, str) and self._exclusion.is_exclusive(branches, [*context, {"required": [name]}]):
            return name
        raise refused(place, "a oneOf whose branches visibly exclude each other", remedy="Use anyOf.")

    def _context(self, around: Around) -> list[Keywords]:
        """What schemas say of a value besides their branches."""
        found: dict[int, Keywords] = {}
        while around is not None:
            around, schema = around
            for node in self._conjuncts(schema) or ():
                found[id(node)] = {keyword: value for keyword, value in node.items() if keyword not in BRANCHES}
        return [node for node in found.values() if node]

    def _child(self, schema: Any, place: Place) -> Schema:
        """A schema that judges another value than the one around it. One that combines others is a definition, so that it may recur."""
        self._references.check_ends(schema)
        node = self._simplified(schema, place)
        if isinstance(node, dict):
            num_combined = max(len(node), len(node.get("allOf", ())), len(node.get("$ref", ())))
            if num_combined > 1 and not BRANCHES.isdisjoint(node) and self._references.is_recursive():
                return {"$ref": self._pointer(schema, str(place[1]) if isinstance(place, tuple) else "")}
        return self._written(schema, place)

    def _referred(self, target: Target, around: Around, is_combined: bool) -> Schema:
        """What a reference points to, written out where it is combined with other keywords and may not be read to its end before."""
        schema = self._followed(target.schema)
        place = self._references.place(schema)
        node = self._simplified(schema, place)
        if isinstance(node, bool):
            return node
        is_room = self._num_written < MAX_WRITTEN and self._num_open < MAX_WRITTEN_OUT
        if not (is_combined and is_room and self._references.is_recursive()):
            return {"$ref": self._pointer(schema, target.name)}
        self._num_open += 1
        found = self._written(schema, place, around=around, is_combined=True)
        self._num_open -= 1
        return found

    def _pointer(self, schema: Any, name: str) -> str:
        """The reference to a schema's definition, which is written later."""
        if id(schema) not in self._pointers:
            base = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:MAX_NAME_CHARS] or "schema"
            name = base
            while name in self._definitions:
                self._num_named[base] += 1
                name = f"{base}_{self._num_named[base] + 1}"
            self._definitions[name] = True
            self._unwritten.append((name, schema))
            self._pointers[id(schema)] = f"#/$defs/{name}"
        return self._pointers[id(schema)]


def _has(nodes: Sequence[Keywords], keyword: str) -> bool:
    return any(keyword in node for node in nodes)


def _name_expression(rule: Keywords) -> str | None:
    """A rule of names as an expression; None where it is none."""
    if rule.keys() == {"pattern"}:
        expression: str = rule["pattern"]
        return expression
    if rule.keys() == {"format"}:
        return NAME_FORMATS.get(rule["format"])
    if rule.keys() <= {"minLength", "maxLength"}:
        return f"^(?s:.{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}})$"
    return None
