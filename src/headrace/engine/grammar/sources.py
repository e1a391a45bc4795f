"""A grammar in llguidance's language: a short Lark grammar around the client's source, which stays a grammar of its own.

    {"grammars": [{"lark_grammar": "start: ..."}, {"name": "answer", "json_schema" | "lark_grammar": ...}]}

Its option no_forcing is always set: a mask then allows every token that keeps the output within the grammar, and does not choose how a
text is split into tokens; its cost does not grow with the length of a constant text either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import JSON_OPTIONS, Grammar, GrammarKind, ReasoningSpan
from headrace.engine.grammar.counted import check_lark_counts, check_regex_counts, check_schema_counts
from headrace.engine.grammar.limits import MAX_JSON_DEPTH

_BEGIN = '%llguidance {"no_forcing": true}\n'
_ANY_TEXT = "/(?s:.*)/"
_NEWLINES_BEFORE_JSON = "/\\n{0,2}/"
"""Models write an empty line between their reasoning and a document. White space before a document does not change it."""

_EMBEDDED = re.compile(r"%json\s*(?=\{)")

_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
"""Keywords of JSON Schema whose values are data, not schemas."""


def check_source(grammar: Grammar) -> None:
    """Raises InvalidRequest for what llguidance would not refuse itself. Everything else is refused when it is compiled."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            _check_schema(grammar)
        case GrammarKind.REGEX:
            check_regex_counts(grammar.source)
        case GrammarKind.LARK:
            check_lark_counts(grammar.source)
            for schema in _embedded_schemas(grammar.source):
                _check_keywords(schema)


def _check_schema(grammar: Grammar) -> None:
    try:
        schema = json.loads(grammar.source, parse_constant=_refuse_constant)
    except RecursionError:
        schema = None
    except ValueError as error:
        raise InvalidRequest("grammar", "a JSON schema as JSON text", remedy=f"It is not JSON: {error}") from error
    levels = list(_levels(schema))
    if schema is None or len(levels) > MAX_JSON_DEPTH:
        raise InvalidRequest("grammar", f"a JSON schema of at most {MAX_JSON_DEPTH} levels", remedy="Move parts of it to $defs.")
    if not isinstance(schema, dict) and schema is not True:
        raise InvalidRequest("grammar", "a JSON schema that a value can satisfy: an object, or true", schema)
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise InvalidRequest("grammar", "the keywords of JSON Schema", "x-guidance", "Leave it out.")
    _check_keywords(schema)


def _check_keywords(schema: Any) -> None:
    for node in _schemas(schema):
        check_schema_counts(node)
        if "additionalItems" in node and "allOf" in node:  # llguidance enforces the first by the place of the second among the keywords
            raise InvalidRequest("grammar", "additionalItems in a schema without allOf", remedy="Move it into one of allOf's schemas.")


def llguidance_source(grammar: Grammar, control_ids: Mapping[str, int]) -> str:
    """The grammar as llguidance reads it, in linear time. `check_source` has let it pass.

    control_ids  id of each control token, by its text: a marker of reasoning may be one
    """
    main = _BEGIN + _main(grammar, control_ids)
    return f'{{"grammars":[{{"lark_grammar":{json.dumps(main)}}},{{"name":"answer",{_answer(grammar)}}}]}}'


def _answer(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f'"json_schema":{_with_options(grammar.source.strip())}'
        case GrammarKind.REGEX:
            return f'"lark_grammar":{json.dumps("start: " + _regex_literal(grammar.source))}'
        case GrammarKind.LARK:
            return f'"lark_grammar":{json.dumps(grammar.source)}'


def _with_options(schema: str) -> str:
    """The schema's text with the options at its end. They are spliced in, so that no number is read and written again.

    llguidance takes them out and moves the last keyword to where they stood: anywhere else, that would change the order of the keywords.
    """
    options = f'"x-guidance":{json.dumps(dict(JSON_OPTIONS))}'
    keywords = "" if schema == "true" else schema[1:-1].strip()
    return f"{{{keywords}{',' if keywords else ''}{options}}}"


def _regex_literal(expression: str) -> str:
    """The expression between slashes. Lark ends a literal at a slash or a line break, so both are escaped."""
    escaped = re.sub(r"\\.|/|\n|\r", _escape, expression, flags=re.DOTALL)
    return f"/{escaped}/"


def _escape(found: re.Match[str]) -> str:
    text = found[0]
    return {"/": "\\/", "\n": "\\n", "\r": "\\r", "\\\n": "\\n", "\\\r": "\\r"}.get(text, text)


def _main(grammar: Grammar, control_ids: Mapping[str, int]) -> str:
    span = grammar.reasoning
    if span is None:
        return "start: @answer"
    answer = f"{_NEWLINES_BEFORE_JSON} @answer" if grammar.kind is GrammarKind.JSON_SCHEMA else "@answer"
    opened = f"thought {answer}"
    start = opened if span.is_open else f"@answer | {_marker(span.start, control_ids)} {opened}"
    return f"start: {start}\n{_thought(span, control_ids)}"


def _thought(span: ReasoningSpan, control_ids: Mapping[str, int]) -> str:
    """Any text up to and with the first end marker."""
    if span.end in control_ids:
        return f"thought: {_ANY_TEXT} {_marker(span.end, control_ids)}"
    return f"thought[lazy]: {_ANY_TEXT} {json.dumps(span.end)}"


def _marker(text: str, control_ids: Mapping[str, int]) -> str:
    return f"<[{control_ids[text]}]>" if text in control_ids else json.dumps(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _embedded_schemas(source: str) -> Iterator[Any]:
    """The schemas after `%json` in a Lark source, which the grammars of function calls have. llguidance refuses what is no JSON."""
    decoder = json.JSONDecoder()
    for found in _EMBEDDED.finditer(source):
        with suppress(ValueError, RecursionError):
            yield decoder.raw_decode(source, found.end())[0]


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The objects of a schema, without what its keywords give as data."""
    unseen = [schema]
    while unseen:
        node = unseen.pop()
        if isinstance(node, dict):
            yield node
            unseen += [child for keyword, child in node.items() if keyword not in _DATA_KEYWORDS]
        elif isinstance(node, list):
            unseen += node


def _levels(value: Any) -> Iterator[list[dict[str, Any] | list[Any]]]:
    """The objects and arrays of each level, outermost first."""
    level = [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        yield level
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
