"""Writes a grammar in llguidance's language: a short Lark grammar around the client's source, which stays a grammar of its own.

    {"grammars": [{"lark_grammar": "start: ..."}, {"name": "answer", "json_schema" | "lark_grammar": ...}]}

The option no_forcing is always set: else a mask would choose how a text is split into tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NoReturn

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import JSON_OPTIONS, Grammar, GrammarKind, ReasoningSpan
from headrace.engine.grammar.char_sets import has_only_short_escapes
from headrace.engine.grammar.limits import MAX_JSON_DEPTH, check_lark_counts, check_regex_counts
from headrace.engine.grammar.normalize import normalized


def read_schema(text: str) -> Any:
    """The value of one JSON document, at most MAX_JSON_DEPTH levels deep. Raises InvalidRequest."""
    try:
        schema = _DECODER.decode(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise InvalidRequest("grammar", "a JSON schema as JSON text", remedy=f"It is not JSON: {error}") from error
    _check_depth(schema)
    return schema


def read_embedded(text: str, begin: int) -> tuple[Any, int] | None:
    """(value, end offset); None where no JSON value begins there. Raises InvalidRequest."""
    try:
        schema, end = _DECODER.raw_decode(text, begin)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        return None
    _check_depth(schema)
    return schema, end


def _check_depth(schema: Any) -> None:
    if sum(1 for _ in _levels(schema)) > MAX_JSON_DEPTH:
        raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest("grammar", f"a JSON schema of at most {MAX_JSON_DEPTH} levels", remedy="Move parts of it to $defs.")


def _levels(value: Any) -> Iterator[list[dict[str, Any] | list[Any]]]:
    level = [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        yield level
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]


def _number(digits: str) -> int | float:
    value = float(digits)
    if not math.isfinite(value):
        raise InvalidRequest("grammar", "numbers that a 64-bit float can hold", digits)
    if not value or not value.is_integer():
        return value or 0
    exact = Decimal(digits)
    return int(exact) if exact == exact.to_integral_value() else value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_refuse_constant)


SHORT_ESCAPES: Mapping[str, object] = {"json_allowed_escapes": 'nrbtf"\\'}


def escape_options(schema: dict[str, Any]) -> Mapping[str, object]:
    """llguidance compares property names as they are spelled: `"\\u0061"` would be another name than "a", and escape the rule for it.
    Where that matters a string has one spelling. Raises InvalidRequest for a text that has none.
    """
    nodes = [value for value in _values(schema) if isinstance(value, dict)]  # some are no schemas, and may cost an escape for nothing
    if not any(_tells_names_apart(node) for node in nodes):
        return {}
    for text in (text for node in nodes for keyword in ("const", "enum") for text in _values(node.get(keyword))):
        if isinstance(text, str) and not has_only_short_escapes(text):
            limit = "const and enum without control characters where an object lists some of its properties and allows others"
            raise InvalidRequest("grammar", limit, text, 'Set "additionalProperties": false.')
    return SHORT_ESCAPES


def _tells_names_apart(node: dict[str, Any]) -> bool:
    is_listed, is_matched = "properties" in node or "required" in node, "patternProperties" in node
    return is_listed + is_matched + (node.get("additionalProperties") is not False) > 1


def _values(value: Any) -> Iterator[Any]:
    unseen = [value]
    while unseen:
        inner = unseen.pop()
        yield inner
        if isinstance(inner, dict | list):
            unseen += inner.values() if isinstance(inner, dict) else inner


_BEGIN = '%llguidance {"no_forcing": true}\n'
_ANY_TEXT = "/(?s:.*)/"
_NEWLINES_BEFORE_JSON = "/\\n{0,2}/"

_OPTIONS = "x-guidance"
"""This keyword stands at the end: llguidance puts the last keyword in its place, which anywhere else would change the keywords' order."""

_EMBEDDED = re.compile(r"""//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(%json\s*)(?=\{)""")


def llguidance_source(grammar: Grammar, control_ids: Mapping[str, int]) -> str:
    """control_ids  id of each control token, by its text. Raises InvalidRequest"""
    main = _BEGIN + _main(grammar, control_ids)
    return f'{{"grammars":[{{"lark_grammar":{json.dumps(main)}}},{{"name":"answer",{_answer(grammar)}}}]}}'


def _answer(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f'"json_schema":{_schema(grammar.source)}'
        case GrammarKind.REGEX:
            check_regex_counts(grammar.source)
            return f'"lark_grammar":{json.dumps("start: " + _regex_literal(grammar.source))}'
        case GrammarKind.LARK:
            check_lark_counts(grammar.source)
            return f'"lark_grammar":{json.dumps(_with_normalized_schemas(grammar.source))}'


def _schema(source: str) -> str:
    schema = read_schema(source)
    if not isinstance(schema, dict) and schema is not True:
        raise InvalidRequest("grammar", "a JSON schema that a value can satisfy: an object, or true", schema)
    if isinstance(schema, dict) and _OPTIONS in schema:
        raise InvalidRequest("grammar", "the keywords of JSON Schema", _OPTIONS, "Leave it out.")
    return _with_options(schema, JSON_OPTIONS)


def _with_options(schema: Any, options: Mapping[str, object]) -> str:
    normal = normalized(schema)
    options = {**options, **escape_options(normal)}
    return json.dumps({**normal, **({_OPTIONS: options} if options else {})})


def _with_normalized_schemas(source: str) -> str:
    written: list[str] = []
    end = begin = 0
    while (match := _EMBEDDED.search(source, begin)) is not None:
        begin = match.end()
        read = read_embedded(source, begin) if match[1] else None
        if read is not None:
            schema: dict[str, Any] = read[0]
            options = schema.get(_OPTIONS, {})
            if not isinstance(options, dict):
                raise InvalidRequest("grammar", f"an object in {_OPTIONS}", options)
            written += [source[end:begin], _with_options(schema, options)]
            end = begin = read[1]
    return "".join([*written, source[end:]])


def _regex_literal(expression: str) -> str:
    escaped = re.sub(r"\\.|/|\n|\r", _escape, expression, flags=re.DOTALL)
    return f"/{escaped}/"


def _escape(match: re.Match[str]) -> str:
    text = match[0]
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
    if span.end in control_ids:
        return f"thought: {_ANY_TEXT} {_marker(span.end, control_ids)}"
    return f"thought[lazy]: {_ANY_TEXT} {json.dumps(span.end)}"


def _marker(text: str, control_ids: Mapping[str, int]) -> str:
    return f"<[{control_ids[text]}]>" if text in control_ids else json.dumps(text)
