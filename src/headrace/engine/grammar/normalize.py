"""Rewrites a JSON schema into the form that llguidance enforces.

The order of properties is kept, since it is the order of the answer.

The library cannot combine a definition that it is still reading with other keywords, so it is written out in place, up to MAX_WRITTEN.
All else that is written is linear in the size of the document.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

from headrace.engine.grammar.combined_rules import check_multiples, close_unevaluated, name_properties
from headrace.engine.grammar.exclusive import Exclusion
from headrace.engine.grammar.keyword_rules import REFERENCES, Keywords, is_keyword, simplified
from headrace.engine.grammar.places import Place, refused
from headrace.engine.grammar.references import References

MAX_WRITTEN = 4_000

MAX_WRITTEN_OUT = 6

MAX_NAME_CHARS = 40

BRANCHES = frozenset({"allOf", "anyOf", "oneOf", "$ref"})

Schema = dict[str, Any] | bool
Enclosing = tuple["Enclosing", Any] | None


class Target(NamedTuple):
    schema: Any
    name: str


def normalized(schema: Any) -> dict[str, Any]:
    """Raises InvalidRequest where there is no equivalent schema that llguidance reads."""
    return _Document(schema).written()


class _Document:
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
        rewritten = self._written(root, self._references.place(root))
        if rewritten is False:
            given = ", ".join(filter(is_keyword, root)) if isinstance(root, dict) else root
            raise refused(
                self._references.place(root), "a JSON schema that a value can satisfy", given, "Together they exclude every value."
            )
        while self._unwritten:
            name, schema = self._unwritten.pop()
            self._definitions[name] = self._written(schema, self._references.place(schema))
        if self._num_multiples > 1:
            for schema, place in self._combining:
                check_multiples(self._conjuncts(schema) or (), place)
        written = {} if isinstance(rewritten, bool) else rewritten
        return {**written, "$defs": self._definitions} if self._definitions else written

    # reading

    def _simplified(self, schema: Any, place: Place) -> Keywords | bool:
        """The result is cached: callers must not change it."""
        if id(schema) in self._read:
            return self._read[id(schema)][1]
        keywords = simplified(schema, place)
        node = self._with_targets(keywords, schema, place) if isinstance(keywords, dict) else keywords
        if isinstance(node, dict):
            self._read[id(schema)] = schema, node  # an id belongs to one object as long as it lives
        return node

    def _with_targets(self, node: Keywords, schema: dict[str, Any], place: Place) -> Keywords | bool:
        linked: Keywords = {}
        for keyword, value in node.items():
            if keyword not in REFERENCES:
                linked[keyword] = value
                continue
            target = self._references.target(schema, keyword, place)
            if target is False:
                return False
            if target is not True:
                linked.setdefault("$ref", []).append(Target(target, value.rpartition("/")[2]))
        return linked or True

    def _followed(self, schema: Any) -> Any:
        while True:
            node = self._simplified(schema, self._references.place(schema))
            if not isinstance(node, dict) or node.keys() != {"$ref"} or len(node["$ref"]) > 1:
                return schema
            schema = node["$ref"][0].schema

    def _conjuncts(self, schema: Any) -> list[Keywords] | None:
        """The schema's own keywords first. None: no value satisfies all."""
        if id(schema) not in self._conjunct_lists:
            parts = [self._simplified(each, self._references.place(each)) for each in self._combined(schema)]
            nodes = [
                {key: value for key, value in node.items() if key not in ("allOf", "$ref")} for node in parts if isinstance(node, dict)
            ]
            self._conjunct_lists[id(schema)] = schema, None if False in parts else nodes
        return self._conjunct_lists[id(schema)][1]

    def _combined(self, schema: Any) -> list[Any]:
        schemas: dict[int, Any] = {}
        unseen = [schema]
        while unseen:
            schema = unseen.pop()
            if id(schema) in schemas:
                continue
            schemas[id(schema)] = schema
            node = self._simplified(schema, self._references.place(schema))
            if isinstance(node, dict):
                unseen += [*node.get("allOf", ()), *(target.schema for target in node.get("$ref", ()))][::-1]
        return list(schemas.values())

    # rewriting

    def _rewritten(self, schema: Any, place: Place) -> Keywords | bool:
        simple = self._simplified(schema, place)
        if isinstance(simple, bool):
            return simple
        node = dict(simple)
        if "unevaluatedProperties" in node or "unevaluatedItems" in node:
            close_unevaluated(node, self._combined(schema), self._conjuncts(schema) or [node], place)
        if "propertyNames" in node:
            name_properties(node, self._conjuncts(node["propertyNames"]), self._references.link, place)
        if "allOf" in node or "$ref" in node:
            self._combining.append((schema, place))
        self._num_multiples += "multipleOf" in node
        return node or True

    # writing

    def _written(self, schema: Any, place: Place, *, around: Enclosing = None, is_combined: bool = False) -> Schema:
        """around: schemas that judge the same value; is_combined: whether other schemas do"""
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
        self, written: dict[str, Any], keyword: str, value: list[Any], place: Place, around: tuple[Enclosing, Any], is_combined: bool
    ) -> bool:
        """False: no value satisfies the branches."""
        tag = self._tag(value, place, around) if keyword == "oneOf" else None
        if tag is not None:
            written["allOf"] = [*written.get("allOf", ()), {"required": [tag]}]
            is_combined = True
        if keyword == "$ref":
            branches = [self._referred(target, around, is_combined) for target in value]
        else:
            branches = [self._written(branch, (place, index), around=around, is_combined=is_combined) for index, branch in enumerate(value)]
        if keyword in ("allOf", "$ref"):
            if not is_combined and isinstance(branches[0], dict) and branches[0].keys() == {"$ref"}:
                written |= branches[0]
            elif kept := [branch for branch in branches if branch is not True]:
                written["allOf"] = [*written.get("allOf", ()), *kept]
            return False not in branches
        if True in branches:
            return True
        possible = [branch for branch in branches if branch is not False]
        if "anyOf" in written:
            written["allOf"] = [*written.get("allOf", ()), {"anyOf": possible}]
        else:
            written["anyOf"] = possible
        return bool(possible)

    def _tag(self, branches: list[Any], place: Place, around: tuple[Enclosing, Any]) -> str | None:
        """OpenAPI's `discriminator`, which pydantic leaves out of `required` where it has a default."""
        context = self._context(around)
        if self._exclusion.is_exclusive(branches, context):
            return None
        discriminator = around[1].get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if isinstance(name, str) and self._exclusion.is_exclusive(branches, [*context, {"required": [name]}]):
            return name
        raise refused(place, "a oneOf whose branches visibly exclude each other", remedy="Use anyOf.")

    def _context(self, around: Enclosing) -> list[Keywords]:
        nodes: dict[int, Keywords] = {}
        while around is not None:
            around, schema = around
            for node in self._conjuncts(schema) or ():
                nodes[id(node)] = {keyword: value for keyword, value in node.items() if keyword not in BRANCHES}
        return [node for node in nodes.values() if node]

    def _child(self, schema: Any, place: Place) -> Schema:
        self._references.check_ends(schema)
        node = self._simplified(schema, place)
        if isinstance(node, dict):
            num_combined = max(len(node), len(node.get("allOf", ())), len(node.get("$ref", ())))
            if num_combined > 1 and not BRANCHES.isdisjoint(node) and self._references.is_recursive():
                return {"$ref": self._pointer(schema, str(place[1]) if isinstance(place, tuple) else "")}
        return self._written(schema, place)

    def _referred(self, target: Target, around: Enclosing, is_combined: bool) -> Schema:
        schema = self._followed(target.schema)
        place = self._references.place(schema)
        node = self._simplified(schema, place)
        if isinstance(node, bool):
            return node
        is_room = self._num_written < MAX_WRITTEN and self._num_open < MAX_WRITTEN_OUT
        if not (is_combined and is_room and self._references.is_recursive()):
            return {"$ref": self._pointer(schema, target.name)}
        self._num_open += 1
        made = self._written(schema, place, around=around, is_combined=True)
        self._num_open -= 1
        return made

    def _pointer(self, schema: Any, name: str) -> str:
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
