"""Writes the grammar rules of a forced call whose parameters stand between tags.

Strings stand there without quotes, so `%json` cannot enforce their schemas. A free string becomes any text up to the closing tag, an
enumeration its texts; other rules of strings are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import FORMATS, MAX_GRAMMAR_BYTES
from headrace.text.output.format_types import CallTags
from headrace.text.output.value_types import TEXT, SchemaTypes, referenced

SEPARATORS = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""llguidance's options, set whatever the client wrote: others could switch checks off or let white space run on."""

MAX_BRANCHES = 256

_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "x-guidance"})
_OF_TEXTS = frozenset(
    {"type", "const", "enum", "minLength", "maxLength", "pattern", "format", "$ref", "allOf", "anyOf", "oneOf", "not", "if", "nullable"}
)
_OF_OBJECTS = frozenset(
    {
        *("patternProperties", "minProperties", "maxProperties", "propertyNames", "unevaluatedProperties", "const", "enum"),
        *("dependentRequired", "dependentSchemas", "dependencies", "$ref", "allOf", "anyOf", "oneOf", "not", "if"),
    }
)
"""Keywords about an object as a whole, which cannot be enforced between tags."""
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)"')
_ADDRESS = "urn:headrace:parameters"
_KEY = re.compile(r'[^<>"\s]([^<>"\n]{0,62}[^<>"\s])?')

TERMINALS = ("ANY_TEXT: /(?s:.*)/", f"ANY_KEY: /{_KEY.pattern}/")
"""Lines that a source with TaggedArguments needs."""


def lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_idle(name: str, rule: object) -> bool:
    match name:
        case "format":
            return isinstance(rule, str) and rule not in FORMATS
        case "minLength" | "minProperties":
            return rule == 0 and rule is not False
        case "not" | "nullable":
            return rule is False
        case "unevaluatedProperties":
            return rule is True or rule == {}
        case "propertyNames":
            return rule is True or rule in ({}, {"type": "string"})
    return name in ("allOf", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies") and rule in ([], {})


@dataclass(frozen=True, slots=True)
class MarkerTexts:
    token_ids: Mapping[str, int]

    def spelled(self, text: str) -> str:
        markers = sorted(filter(text.__contains__, self.token_ids), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text) if markers else [text]
        return " ".join([self._piece(piece) for piece in pieces if piece])

    def _piece(self, piece: str) -> str:
        written = lark_text(piece)
        return f"(<[{self.token_ids[piece]}]> | {written})" if piece in self.token_ids else written


@dataclass(slots=True)
class TaggedArguments:
    """path: field of the schema within the request, for refusals"""

    name: str
    tags: CallTags
    texts: MarkerTexts
    rule: str
    schema: Mapping[str, object]
    path: str
    lines: list[str] = field(default_factory=list)
    num_branches: int = 0
    _types: SchemaTypes = field(init=False)

    def __post_init__(self) -> None:
        self._types = SchemaTypes(self.schema)

    def body(self) -> str:
        """The text between a function's name and the end of its call. Raises InvalidRequest."""
        if refused := next((name for name, rule in self.schema.items() if name in _OF_OBJECTS and not _is_idle(name, rule)), None):
            raise self._refused(refused, self.schema[refused])
        given, needed = self.schema.get("properties"), self.schema.get("required")
        required = [name for name in needed if isinstance(name, str)] if isinstance(needed, list) else []
        properties: dict[str, object] = dict(given) if isinstance(given, Mapping) else {}
        properties |= {name: True for name in required if name not in properties}
        if not properties:
            return "" if self.schema.get("additionalProperties") is False else self._any_arguments()
        parts: list[str] = []
        num_chars = 0
        for number, (name, schema) in enumerate(properties.items()):
            rule = f"{self.rule}_{number}"
            self.lines.append(f"{rule}: {self._argument(name, schema, rule)}")
            num_chars += len(self.lines[-1])
            if num_chars > MAX_GRAMMAR_BYTES:  # definitions are repeated for each parameter that refers to one
                raise InvalidRequest(self.path, f"at most {MAX_GRAMMAR_BYTES} bytes of grammar", None, "Shorten the schema.")
            parts.append(rule if name in required else f"{rule}?")
        return " ".join(parts)

    def _any_arguments(self) -> str:
        rule = f"{self.rule}_any"
        self.lines.append(f"{rule}: {self._before_value('ANY_KEY')} {self._free_text(rule)}")
        return f"{rule}*"

    def _argument(self, name: str, schema: object, rule: str) -> str:
        if _KEY.fullmatch(name) is None:
            raise InvalidRequest(f"{self.path}.properties", f"names of 1..64 characters without < > and quotes: {self._why}", name)
        types = self._types.of(schema)
        if not types or schema is False:
            raise InvalidRequest(f"{self.path}.properties.{name}", "a schema that some value has", schema)
        before = self._before_value(lark_text(name))
        if "string" not in types:
            value = f"%json {json.dumps(self._document(name, schema))}"
        elif (choices := self._choices(schema, f"properties.{name}")) is not None:
            value = "(" + " | ".join([lark_text(choice) for choice in choices]) + ")"
        else:
            return f"{before} {self._free_text(rule)}"
        return f"{before} {value} {self.texts.spelled(self.tags.value_end)}"

    def _document(self, name: str, schema: object) -> dict[str, object]:
        """A schema with references is embedded with an address of its own, so that `#` stays its root."""
        if not isinstance(schema, Mapping) or _REFERENCE.search(json.dumps(schema)) is None:
            return {**(schema if isinstance(schema, Mapping) else {}), **SEPARATORS}
        given = self.schema.get("$id")
        address = given.partition("#")[0] if isinstance(given, str) else ""
        root = {**self.schema, "$id": given if address else _ADDRESS}
        draft = {"$schema": self.schema["$schema"]} if "$schema" in self.schema else {}
        pointer = quote(name.replace("~", "~0").replace("/", "~1"), safe="~")
        return {**draft, "$ref": f"{address or _ADDRESS}#/properties/{pointer}", "$defs": {"parameters": root}, **SEPARATORS}

    def _before_value(self, key: str) -> str:
        return f"{self.texts.spelled(self.tags.key_start)} {key} {self.texts.spelled(self.tags.key_end + self.tags.value_start)}"

    def _free_text(self, rule: str) -> str:
        end = self.tags.value_end.strip()
        self.lines.append(f"{rule}_text[lazy]: ANY_TEXT {lark_text(end)}")
        token = f" | ANY_TEXT <[{self.texts.token_ids[end]}]>" if end in self.texts.token_ids else ""
        after = self.tags.value_end[len(self.tags.value_end.rstrip()) :]
        return f"({rule}_text{token}) {self.texts.spelled(after)}".strip()

    def _choices(self, schema: object, path: str) -> list[str] | None:
        if not isinstance(schema, Mapping):
            return None
        self.num_branches += 1
        if self.num_branches > MAX_BRANCHES:
            raise InvalidRequest(f"{self.path}.{path}", f"at most {MAX_BRANCHES} references and branches to follow for strings")
        is_text = self._types.of(schema) == TEXT
        rules = {
            name: value
            for name, value in schema.items()
            if (name in _OF_TEXTS if is_text else name not in _NOTES) and not _is_idle(name, value)
        }
        match rules:
            case {"$ref": str(reference), **rest} if not rest and (target := referenced(reference, self.schema)) is not None:
                return self._choices(target, path)
            case {"enum": values, **rest} | {"const": values, **rest} if not rest.keys() - {"type"}:
                return self._texts(values if "enum" in rules and isinstance(values, list) else [values], path)
            case {"anyOf": list(branches), **rest} | {"oneOf": list(branches), **rest} if not rest:
                return self._joined(branches, path)
        if refused := next((name for name in rules if name != "type"), None):
            raise self._refused(f"{path}.{refused}", rules[refused])
        return None

    def _joined(self, branches: list[object], path: str) -> list[str] | None:
        null = {"type": "null"}
        if other := next((branch for branch in branches if branch != null and self._types.of(branch) != TEXT), None):
            raise self._refused(path, other)
        choices = [["null"] if branch == null else self._choices(branch, path) for branch in branches]
        return None if None in choices else [text for texts in choices if texts for text in texts]

    def _texts(self, values: list[object], path: str) -> list[str]:
        for value in values:
            if value is not None and (not isinstance(value, str) or self.tags.value_end.strip() in value):
                raise self._refused(path, values)
        return ["null" if value is None else str(value) for value in values]

    @property
    def _why(self) -> str:
        return f"calls of the format {self.name} write strings without quotes"

    def _refused(self, name: str, given: object) -> InvalidRequest:
        rule = f"a schema without this rule where calls are bound to it: {self._why}"
        return InvalidRequest(f"{self.path}.{name}", rule, given, 'Leave it out, or use tool_choice "auto" without strict.')
