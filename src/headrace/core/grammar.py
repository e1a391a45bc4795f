"""The grammar of a request: a JSON schema, a regular expression or a Lark grammar, and where in an output it begins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.core.gbnf import is_gbnf, lark_of_gbnf

MAX_GRAMMAR_BYTES = 256 << 10
"""UTF-8. A longer one never travels to an engine."""

MAX_MARKER_CHARS = 64
CANNOT_CONTINUE = "grammar: the output cannot be continued within its limits: "
"""Begins the error of a sequence that its own grammar ended. The rest may be shown to the client."""

JSON_OPTIONS: Mapping[str, object] = MappingProxyType(
    {"whitespace_pattern": r"[ ]|\r?\n([ ]{0,40}|\t{0,10})", "json_allow_general_unicode_escapes": True}
)
"""llguidance's option `x-guidance` of a schema: between two tokens one space, or one line break with an indentation, so that a model cannot
wander in white space. A Lark source with `%json` gives the option itself."""


FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex"),
    }
)
"""All that JSON Schema defines. Any other `format` is an annotation."""


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """Syntax: Rust's regex crate, without look-around and back-references."""
    LARK = "lark"
    """llguidance's dialect; the rule `start` is the whole output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningSpan:
    """Free text that may precede the part of the output that a grammar describes.

    start    text that opens it, e.g. "<think>"
    is_open  the prompt has already opened it
    """

    start: str
    end: str
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Grammar:
    """
    source     JSON text of the schema, the expression, or the Lark source
    reasoning  None: the grammar binds from the first output token
    """

    kind: GrammarKind
    source: str
    reasoning: ReasoningSpan | None = None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Grammar:
        """Fields as `asdict` of dataclasses gives them. Raises KeyError, TypeError, ValueError."""
        span = fields["reasoning"]
        return cls(GrammarKind(fields["kind"]), str(fields["source"]), None if span is None else ReasoningSpan(**span))

    @classmethod
    def json_object(cls) -> Grammar:
        return cls(GrammarKind.JSON_SCHEMA, '{"type":"object"}')

    @classmethod
    def choice(cls, choices: Sequence[str], *, field: str = "choice") -> Grammar:
        """Raises InvalidRequest naming `field` if there are no texts, or an empty one.

        The texts become one terminal: as alternatives of a rule, more than 2,000 would be too many for the parser.
        """
        if not choices or not all(choices):
            raise InvalidRequest(field, "a list of at least one text, none of them empty", list(choices))
        return cls(GrammarKind.LARK, "start: CHOICE\nCHOICE: " + " | ".join([json.dumps(choice) for choice in choices]))

    @classmethod
    def ebnf(cls, source: str, *, field: str = "grammar") -> Grammar:
        """Raises InvalidRequest naming `field`."""
        given = cls(GrammarKind.LARK, source).checked(field=field)
        return cls(GrammarKind.LARK, lark_of_gbnf(source, name=field)).checked(field=field) if is_gbnf(source) else given

    def checked(self, *, field: str = "grammar") -> Grammar:
        """Raises InvalidRequest naming `field`."""
        if not isinstance(self.source, str) or not self.source.strip():
            raise InvalidRequest(field, "a non-empty text", self.source)
        num_bytes = len(self.source.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(field, f"at most {MAX_GRAMMAR_BYTES} bytes", num_bytes, "Send a smaller schema or grammar.")
        for marker in (self.reasoning.start, self.reasoning.end) if self.reasoning else ():
            if not 0 < len(marker) <= MAX_MARKER_CHARS:
                raise InvalidRequest(field, f"reasoning markers of 1..{MAX_MARKER_CHARS} characters", marker)
        return self
