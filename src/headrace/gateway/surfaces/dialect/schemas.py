"""Defines the wire types of the HTTP API: what msgspec decodes and encodes, and the source of /openapi.json's schemas.

Request types have honoured fields alone, since `dialect.parse` takes out all other ones before.

A request has at most one field that says what an answer must match, in the words of OpenAI, vLLM, SGLang, llama.cpp or Ollama. The engine
compiles the `Grammar` and refuses what it cannot enforce.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.structured import given_kind
from headrace.gateway.cache.control import CacheControl
from headrace.gateway.http.json_border import decode_object
from headrace.gateway.surfaces.dialect.routing_fields import ProviderWishes
from headrace.gateway.upstream.generation_request import RequestedGrammar

# ----------------------------------------------------------------------------------------------------------------------- requests


class StreamOptions(Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(Struct):
    schema: str | dict[str, Any]


class ResponseFormat(Struct):
    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: str | dict[str, Any] | None = None


class StructuredOutputs(Struct):
    """vLLM's `structured_outputs`. Its fields are the `guided_` fields of READERS, without that prefix."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False


class SamplingFields(Struct, kw_only=True):
    """The last fields say what the answer must match."""

    model: str | None = None
    models: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    provider: ProviderWishes | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    priority: int | str | None = None
    cache_salt: str = ""
    cache: bool | CacheControl | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    grammar: str | None = None
    format: str | dict[str, Any] | None = None


# ------------------------------------------------------------------------------------------------------------------------ answers


class AnswerBody(Struct):
    id: str
    object: str
    created: int
    model: str


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class ContextUsage(Struct):
    """How a conversation was shortened to fit its context (docs/sessions.md). The summary's tokens are counted for the tenant beside
    those of the answer."""

    fitting: str
    dropped_messages: int
    summary_prompt_tokens: int
    summary_completion_tokens: int


class CompletionUsage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    """Not in the chunks of a stream but the last: cached tokens are known at its end."""
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Only where tokens of the output were reasoning."""
    context: ContextUsage | UnsetType = UNSET
    """Only where the conversation was shortened."""


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(Struct):
    """vLLM's entry of `prompt_logprobs`, keyed by token id."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


FORMATS = ("text", "json_object", "json_schema")

Read = Callable[[Any, str], tuple[Grammar, str] | None]
"""(value, name) -> the grammar and the dotted name of the part that says it; None where it asks for nothing."""


def requested_grammar(request: SamplingFields, body: Mapping[str, object]) -> RequestedGrammar | None:
    """The request's grammar fields are set to None, so that no schema is sent twice. Raises InvalidRequest."""
    values = _values_of(request)
    if values == _NOTHING:
        return None
    given = [name for name, value in zip(READERS, values, strict=True) if value is not None]
    if len(given) > 1:
        raise InvalidRequest(given[1], f"absent beside {given[0]}", remedy="One field says what the answer must match.")
    for name in given:
        stated = READERS[name](getattr(request, name), name)
        setattr(request, name, None)
        if stated is not None:
            grammar, field = stated
            return RequestedGrammar(grammar=grammar.checked(field=field), field=field, name=name, value_json=_json_text(body[name]))
    return None


def _json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _schema(value: dict[str, Any] | str, field: str) -> tuple[Grammar, str]:
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
    stated = VLLM_KINDS[name](getattr(value, name), f"{field}.{name}")
    assert stated is not None, "every kind says something"
    return stated


VLLM_KINDS: Mapping[str, Read] = {"json": _schema, "regex": _regex, "choice": _choice, "grammar": _ebnf}
"""With `guided_` before them they are fields of a body in earlier versions of vLLM."""

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

_values_of = attrgetter(*READERS)
_NOTHING = (None,) * len(READERS)
