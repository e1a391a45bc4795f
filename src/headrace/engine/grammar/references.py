"""Resolves the references of a JSON schema, all within the document.

A document may be several resources, each begun by an `$id`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urljoin

from headrace.engine.grammar.places import ROOT, Place, refused, unsupported

DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples", "example"})
"""Keywords whose values are data, not schemas."""

NAMES_TO_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})

IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")


_LEADING_ON = frozenset({*IN_PLACE, "$ref", "$dynamicRef", "$recursiveRef"})
_NAMING = frozenset({"$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"})

Step = tuple[str, Any]

OLD_DRAFTS = frozenset({f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)})
"""Drafts in which keywords beside a `$ref` are ignored."""


@dataclass(slots=True, eq=False)
class Resource:
    uri: str
    root: Any
    anchors: dict[str, Any] = field(default_factory=dict)


class References:
    """Time and memory are linear in the document."""

    def __init__(self, document: Any) -> None:
        self._document = Resource("", document)
        self._is_old = isinstance(document, dict) and str(document.get("$schema")).rstrip("#") in OLD_DRAFTS
        self._resources = {"": self._document}
        self._resource_of: dict[int, Resource] = {}
        self._places: dict[int, Place] = {}
        self._dynamic: dict[str, list[Any]] = {}
        self._recursive: list[Any] = []
        self._links: dict[int, Any] = {}
        self._kept: list[dict[str, str]] = []
        self._ended: set[int] = set()
        self._index(document)
        self._is_recursive: bool | None = None

    def link(self, schema: Any, name: str) -> dict[str, str]:
        made = {"$ref": f"#/{name}"}
        self._kept.append(made)  # an id belongs to one object as long as it lives
        self._links[id(made)] = schema
        return made

    def target(self, node: dict[str, Any], keyword: str, place: Place) -> Any:
        if id(node) in self._links:
            return self._links[id(node)]
        text = node[keyword]
        if not isinstance(text, str):
            raise refused((place, keyword), f"a text in {keyword}", text)
        schema = self._found(text, self._resource_of.get(id(node), self._document))
        if keyword != "$ref":
            self._check_dynamic(schema, text, keyword, place)
        if not isinstance(schema, dict | bool):
            raise refused((place, keyword), f"a {keyword} to a part of the same schema", text, "Put what it refers to under $defs.")
        return schema

    def place(self, schema: Any) -> Place:
        return self._places.get(id(schema), ROOT)

    def check_ends(self, schema: Any) -> None:
        """Raises InvalidRequest if a schema leads back to itself for the same value."""
        if isinstance(schema, dict) and not _LEADING_ON.isdisjoint(schema):
            step = _circle(schema, self._in_place, self._ended)
            if step is not None:
                limit = "references that end at a schema with other keywords"
                raise refused(self.place(schema), limit, step, "They lead in a circle, so that no value is described.")

    def is_recursive(self) -> bool:
        if self._is_recursive is None:
            self._is_recursive = _circle(self._document.root, self._below, set()) is not None
        return self._is_recursive

    def _in_place(self, node: Any) -> Iterator[Step]:
        if isinstance(node, list):
            return  # no schema, which is said elsewhere
        for keyword in IN_PLACE:
            given = node.get(keyword)
            for schema in given if isinstance(given, list) else [given]:
                yield keyword, schema
        yield from self._targets(node)

    def _below(self, node: Any) -> Iterator[Step]:
        if isinstance(node, list):
            yield from (("", child) for child in node)
        else:
            yield from node.items()
            yield from self._targets(node)

    def _targets(self, node: dict[str, Any]) -> Iterator[Step]:
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(text := node.get(keyword), str):
                yield text, self._links.get(id(node)) or self._found(text, self._resource_of.get(id(node), self._document))

    def _check_dynamic(self, target: Any, text: str, keyword: str, place: Place) -> None:
        """Raises InvalidRequest if several schemas have the name."""
        named = self._recursive if keyword == "$recursiveRef" else self._dynamic.get(text.rpartition("#")[2], [])
        if len(named) > 1 and any(target is each for each in named):
            raise refused((place, keyword), f"a {keyword} that means one schema alone", text, "Use $ref.")

    def _found(self, text: str, resource: Resource) -> Any:
        """Some generators write a bare fragment for the document."""
        uri, _, fragment = text.partition("#")
        try:
            begun = self._resources.get(urljoin(resource.uri, uri)) if uri else resource
        except ValueError:
            return None
        if begun is None:
            return None
        part = _part(begun, fragment)
        return _part(self._document, fragment) if part is None and not uri else part

    def _index(self, document: Any) -> None:
        unseen: list[tuple[Any, Resource, Place]] = [(document, self._document, ROOT)]
        while unseen:
            node, resource, place = unseen.pop()
            if isinstance(node, list):
                unseen += [(child, resource, (place, index)) for index, child in enumerate(node)]
            if not isinstance(node, dict):
                continue
            self._places[id(node)] = place
            if self._is_old and node.get("minContains") == 0 and "contains" in node:
                raise unsupported(place, ["contains"])  # those drafts have no minContains
            if not _NAMING.isdisjoint(node):
                resource = self._begun(node, resource)
            if resource is not self._document:
                self._resource_of[id(node)] = resource
            for keyword, child in node.items():
                below = (place, keyword)
                if keyword in NAMES_TO_SCHEMAS and isinstance(child, dict):
                    unseen += [(schema, resource, (below, name)) for name, schema in child.items()]
                elif keyword not in DATA_KEYWORDS and isinstance(child, dict | list):
                    unseen.append((child, resource, below))

    def _begun(self, node: dict[str, Any], resource: Resource) -> Resource:
        for keyword in ("$id", "id"):
            if not isinstance(text := node.get(keyword), str) or ("$ref" in node and self._is_old):
                continue
            uri, _, anchor = text.partition("#")
            if uri and (joined := _joined(resource.uri, uri)) is not None:
                if node is self._document.root:
                    self._document.uri = joined
                    self._resources[joined] = self._document
                else:
                    resource = self._resources.setdefault(joined, Resource(joined, node))
            if anchor:  # drafts 4 to 7
                resource.anchors[anchor] = node
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(text := node.get(keyword), str):
                resource.anchors[text] = node
        if isinstance(text := node.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(text, []).append(node)
        if node.get("$recursiveAnchor") is True:
            self._recursive.append(node)
        return resource


def _circle(start: Any, steps_of: Callable[[Any], Iterator[Step]], ended: set[int]) -> str | None:
    under_way: set[int] = set()
    path: list[tuple[Any, Iterator[Step]]] = []
    step: Step | None = ("#", start)
    while step is not None or path:
        if step is None:
            node, _ = path.pop()
            under_way.discard(id(node))
            ended.add(id(node))
        elif isinstance(step[1], dict | list) and id(step[1]) not in ended:
            text, node = step
            if id(node) in under_way:
                return text
            under_way.add(id(node))
            path.append((node, steps_of(node)))
        step = next(path[-1][1], None) if path else None
    return None


def _joined(base: str, uri: str) -> str | None:
    try:
        return urljoin(base, uri)
    except ValueError:
        return None


def _part(resource: Resource, fragment: str) -> Any:
    if not fragment:
        return resource.root
    for text in (unquote(fragment), fragment):
        target = _at(resource.root, text) if text.startswith("/") else resource.anchors.get(text)
        if target is not None:
            return target
    return None


def _at(node: Any, pointer: str) -> Any:
    for token in pointer.split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isascii() and key.isdigit() and len(key) < 9 and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node
