"""`StructuredOutputsParams` with vLLM's names, for `LLM` alone. An engine never sees them: `grammar` makes a `core.grammar` value."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind

KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""Exactly one is given."""


def given_kind(fields: object, *, field: str) -> str:
    """Raises InvalidRequest naming `field` if none or several are."""
    given = [name for name in KINDS if getattr(fields, name) not in (None, False)]
    if len(given) != 1:
        raise InvalidRequest(field, f"exactly one of {', '.join(KINDS[:-1])} and {KINDS[-1]}", given)
    return given[0]


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """A rule that the whole output must match: exactly one of KINDS.

    regex        in the syntax of Rust's regex crate
    choice       texts, of which the output is one
    grammar      in Lark, or in llama.cpp's GBNF

    The others are refused by name unless left out.
    """

    json: str | Mapping[str, object] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    @property
    def kind(self) -> str:
        """Raises InvalidRequest if none or several are set, and for parameters that are not supported."""
        for name, remedy in _REFUSED.items():
            if getattr(self, name) not in (None, False):
                raise InvalidRequest(f"structured_outputs.{name}", "nothing: it is not supported", getattr(self, name), remedy)
        return given_kind(self, field="structured_outputs")

    @property
    def field(self) -> str:
        """The name in error messages, such as "structured_outputs.json". Raises InvalidRequest where `kind` does."""
        return f"structured_outputs.{self.kind}"

    def as_grammar(self) -> Grammar:
        kind, field = self.kind, self.field
        value = getattr(self, kind)
        if kind == "json":
            return Grammar(GrammarKind.JSON_SCHEMA, _schema_text(field, value)).checked(field=field)
        if kind == "choice":
            return Grammar.choice(_texts(field, value), field=field).checked(field=field)
        if kind == "json_object":
            if value is not True:
                raise InvalidRequest(field, "True", value)
            return Grammar.json_object()
        if not isinstance(value, str):
            raise InvalidRequest(field, "a text", type(value).__name__)
        return Grammar.ebnf(value, field=field) if kind == "grammar" else Grammar(GrammarKind.REGEX, value).checked(field=field)


_REFUSED = {
    "disable_any_whitespace": "",
    "disable_additional_properties": 'Write "additionalProperties": false into the schema.',
    "whitespace_pattern": "",
    "structural_tag": "Give a grammar.",
}


def _schema_text(field: str, schema: object) -> str:
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping):
        raise InvalidRequest(field, "a JSON schema as a mapping or as JSON text", type(schema).__name__)
    try:
        return json_text.dumps(dict(schema), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(field, "a JSON schema that can be written as JSON", remedy=f"{str(error)[:100]}.") from None


def _texts(field: str, choices: object) -> Sequence[str]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest(field, "a list of texts", choices)
    return choices
