"""Makes one `Grammar` of the fields that say what an answer must match, in the words of OpenAI, vLLM, SGLang, llama.cpp and Ollama.

A request has at most one such field. Nothing is compiled here: the engine compiles, and refuses what it cannot enforce. The surface then
names the client's field in the refusal (`parse.error_as_written`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.structured import given_kind
from headrace.gateway.http.json_border import decode_object
from headrace.gateway.surfaces.dialect.schemas import ResponseFormat, SamplingFields, StructuredOutputs
from headrace.gateway.upstream.generation_request import RequestedGrammar

FORMATS = ("text", "json_object", "json_schema")
"""Values of `response_format.type`."""

Read = Callable[[Any, str], tuple[Grammar, str] | None]
"""A field's value and its name -> the grammar and the dotted name of the part that says it; None where it asks for nothing."""


def requested_grammar(request: SamplingFields, body: Mapping[str, object]) -> RequestedGrammar | None:
    """The grammar of the output. The request's grammar fields are set to None, so that no schema is sent twice.

    Raises InvalidRequest for two grammar fields at once, and for a value that is no grammar.
    """
    values = _values_of(request)
    if values == _NOTHING:
        return None
    given = [name for name, value in zip(READERS, values, strict=True) if value is not None]
    if len(given) > 1:
        raise InvalidRequest(given[1], f"absent beside {given[0]}", remedy="One field says what the answer must match.")
    for name in given:
        found = READERS[name](getattr(request, name), name)
        setattr(request, name, None)
        if found is not None:
            grammar, field = found
            return RequestedGrammar(grammar=grammar.checked(field=field), field=field, name=name, value_json=_json_text(body[name]))
    return None


def _json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _schema(value: dict[str, Any] | str, field: str) -> tuple[Grammar, str]:
    """A JSON schema as an object, or as the text of one."""
    if isinstance(value, str):
        try:
            decode_object(value.encode())
        except InvalidRequest as error:
            raise InvalidRequest(field, "a JSON schema, as an object or as its JSON text", value, f"Read as JSON: {error}") from None
    return Grammar(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else _json_text(value)), field


def _regex(value: str, field: str) -> tuple[Grammar, str]:
    return Grammar(GrammarKind.REGEX, value), field


def _choice(value: list[str], field: str) -> tuple[Grammar, str]:
    return Grammar.choice(value, field=field), field


def _ebnf(value: str, field: str) -> tuple[Grammar, str]:
    return Grammar.ebnf(value, field=field), field


def _ollama_format(value: dict[str, Any] | str, field: str) -> tuple[Grammar, str]:
    if isinstance(value, dict):
        return _schema(value, field)
    if value != "json":
        raise InvalidRequest(field, '"json" or a JSON schema, which is an object', value)
    return Grammar.json_object(), field


def _response_format(value: ResponseFormat, field: str) -> tuple[Grammar, str] | None:
    if value.type not in FORMATS:
        raise InvalidRequest(f"{field}.type", "one of " + ", ".join(FORMATS), value.type, "structured_outputs has other kinds.")
    parts = {"json_schema.schema": None if value.json_schema is None else value.json_schema.schema, "schema": value.schema}
    given = {part: schema for part, schema in parts.items() if schema is not None}
    if value.type == "text" and given:
        raise InvalidRequest(f"{field}.type", "json_schema or json_object beside a schema", value.type)
    if len(given) > 1:
        raise InvalidRequest(f"{field}.schema", f"absent beside {field}.json_schema")
    for part, schema in given.items():
        return _schema(schema, f"{field}.{part}")
    if value.type == "json_schema":
        raise InvalidRequest(f"{field}.json_schema", "an object with a schema (it is required)")
    return (Grammar.json_object(), field) if value.type == "json_object" else None


def _structured_outputs(value: StructuredOutputs, field: str) -> tuple[Grammar, str]:
    name = given_kind(value, field=field)
    if name == "json_object":
        return Grammar.json_object(), f"{field}.json_object"
    found = VLLM_KINDS[name](getattr(value, name), f"{field}.{name}")
    assert found is not None, "every kind says something"
    return found


VLLM_KINDS: Mapping[str, Read] = {"json": _schema, "regex": _regex, "choice": _choice, "grammar": _ebnf}
"""Fields of vLLM's `structured_outputs`; with `guided_` before them they are fields of a body in earlier versions of vLLM."""

READERS: Mapping[str, Read] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **{f"guided_{name}": read for name, read in VLLM_KINDS.items()},
    "regex": _regex,
    "ebnf": _ebnf,
    "json_schema": _schema,
    "format": _ollama_format,
    "grammar": _ebnf,
}
"""Every field of a body that says what its answer must match."""

_values_of = attrgetter(*READERS)
_NOTHING = (None,) * len(READERS)
