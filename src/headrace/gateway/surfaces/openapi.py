"""Makes the document of /openapi.json (OpenAPI 3.1) from the tables and constants that the handlers use, so that both agree.

Not in the schemas are rules between fields, rules of the model, and the priority class that the API key allows. The schema limits texts by
characters, while the server counts UTF-8 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.core.grammar import MAX_GRAMMAR_BYTES
from headrace.core.sampling import BOUNDS, MAX_LOGIT_BIAS, MAX_STOP, MAX_STOP_BYTES, MAX_STOP_TOKEN_IDS, Bound
from headrace.core.tools import FUNCTION_NAME, MAX_TOOLS
from headrace.gateway.cache.control import MAX_CACHE_S
from headrace.gateway.generation.parsed_request import MAX_MESSAGES
from headrace.gateway.http.errors import TABLE
from headrace.gateway.sessions.history import ContextFitting
from headrace.gateway.sessions.sessions import SESSION_ID
from headrace.gateway.surfaces.completions import MAX_PROMPTS
from headrace.gateway.surfaces.dialect.conversation import MAX_CALLS, MAX_PARTS
from headrace.gateway.surfaces.dialect.field_table import (
    CHAT,
    COMPLETIONS,
    MAX_INERT_CHARS,
    MAX_METADATA,
    RULES,
    FieldRule,
    Inside,
    Treatment,
)
from headrace.gateway.surfaces.dialect.parse import MAX_CACHE_SALT_CHARS, PRIORITIES
from headrace.gateway.surfaces.dialect.routing_fields import MAX_MODEL_CHARS, MAX_SERVER_CHARS, MAX_WISHED_MODELS, MAX_WISHED_SERVERS
from headrace.gateway.surfaces.dialect.schemas import FORMATS
from headrace.gateway.surfaces.endpoint import Endpoint
from headrace.policy.routing.wishes import SortBy

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_ERRORS = sorted({str(row.status) for _, row in TABLE if row.status != 499})

Schema = dict[str, Any]

TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_INERT_TEXT: Schema = {"type": "string", "maxLength": MAX_INERT_CHARS}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES}
_FUNCTION_NAME: Schema = {"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"}
_SESSION_ID: Schema = {"type": "string", "pattern": f"^{SESSION_ID.pattern}$"}
_SCALAR: Schema = {"type": ["string", "number", "boolean", "null"]}
_GRAMMAR: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_BYTES, "pattern": r"\S"}
_CHOICE: Schema = {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}}
_JSON_SCHEMA: Schema = {"anyOf": [{"type": "object"}, {**_GRAMMAR, "contentMediaType": "application/json"}]}
_ONLY_FOREIGN = "No effect at our engines; sent to a foreign server. "
_AMOUNT: Schema = {"type": "number", "minimum": 0}
_CACHE_S: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_CACHE_S}

_INSIDE = {
    "Message": Inside.MESSAGE,
    "TextPart": Inside.PART,
    "EarlierCall": Inside.CALL,
    "CalledFunction": Inside.CALLED_FUNCTION,
    "StreamOptions": Inside.STREAM_OPTIONS,
    "ToolDefinition": Inside.TOOL,
    "FunctionDefinition": Inside.FUNCTION,
    "ChosenTools": Inside.TOOL_CHOICE,
    "AllowedTools": Inside.ALLOWED_TOOLS,
    "NamedTool": Inside.ALLOWED_TOOL,
    "FunctionName": Inside.CHOSEN_FUNCTION,
    "ReasoningOptions": Inside.REASONING,
    "ThinkingOptions": Inside.THINKING,
    "ResponseFormat": Inside.RESPONSE_FORMAT,
    "JsonSchemaFormat": Inside.JSON_SCHEMA,
    "StructuredOutputs": Inside.STRUCTURED_OUTPUTS,
    "CacheControl": Inside.CACHE,
    "ProviderWishes": Inside.PROVIDER,
    "MaxPrice": Inside.MAX_PRICE,
    "MinThroughput": Inside.MIN_THROUGHPUT,
}


def document(endpoints: Sequence[Endpoint]) -> bytes:
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.shown_path, {})[endpoint.method.lower()] = _operation(endpoint)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Headrace", "version": "v1", "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
            "paths": paths,
            "components": {
                "schemas": _schemas(endpoints),
                "securitySchemes": {_key(row): row.framing.security_scheme for row in endpoints},
            },
        }
    )


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": _responses(endpoint)}
    text = {"schema": {"type": "string"}}
    parameters = [
        *({"name": name, "in": "path", "required": True, **text} for name in endpoint.path_params),
        *({"name": row.name, "in": "query", "description": row.summary, **text} for row in endpoint.query),
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.request is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(endpoint.request)}}}
    if not endpoint.is_public:
        operation["security"] = [{_key(endpoint): []}, {}]
    return operation


def _responses(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.reply is None:
        kind = {} if endpoint.media_type == _JSON else {"type": "string"}
        return {"200": {"description": "OK", "content": {endpoint.media_type: {"schema": kind}}}}
    content = {_JSON: {"schema": _ref(endpoint.reply)}}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": dict(content)}}
    if endpoint.chunk is not None:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    for status in _ERRORS:
        responses[status] = {"description": "Error", "content": {_JSON: {"schema": _ref(endpoint.framing.error_type)}}}
    if endpoint.may_be_503:
        responses["503"] = {"description": "Not now; the body says why.", "content": content}
    return responses


def _schemas(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    kinds = [kind for row in endpoints for kind in (row.framing.error_type, row.request, row.reply, row.chunk) if kind is not None]
    _, components = msgspec.json.schema_components(list(dict.fromkeys(kinds)), ref_template=_REF)
    places: dict[str, str] = {row.request.__name__: row.path for row in endpoints if row.request is not None and row.path in RULES}
    for name, place in (places | _INSIDE).items():
        components[name] = _object_schema(components[name], place)
    components["TokenizeRequest"]["properties"]["messages"] = {"anyOf": [_messages(), {"type": "null"}]}
    return dict(components)


def _key(endpoint: Endpoint) -> str:
    return endpoint.framing.key_header.decode()


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


# ------------------------------------------------------------------------------------------------------------------------ requests


def _object_schema(given: Schema, place: str) -> Schema:
    """given: the schema that msgspec makes, with types and defaults of the honoured fields"""
    bounded = {**({} if isinstance(place, Inside) else _bounds()), **_bounds_at().get(place, {})}
    properties = {
        name: _described(_value_schema(rule, given, bounded), rule, is_required=name in given.get("required", ()))
        for name, rule in RULES[place].items()
    }
    return {**given, "properties": properties, "additionalProperties": False}


def _value_schema(rule: FieldRule, given: Schema, bounded: Mapping[str, Schema]) -> Schema:
    if rule.treatment is Treatment.REFUSED:
        return {"enum": list(rule.off)}
    if rule.treatment in (Treatment.INERT, Treatment.PASSED):
        return {} if rule.is_any else _metadata() if rule.name == "metadata" else _INERT_TEXT
    made: Schema = given["properties"][rule.name]
    if rule.name not in bounded:
        return made
    return _or_off(bounded[rule.name], rule) | ({"default": made["default"]} if "default" in made else {})


def _or_off(schema: Schema, rule: FieldRule) -> Schema:
    if not rule.off:
        return schema
    return {"enum": [*rule.off, *schema["enum"]]} if "enum" in schema else {"anyOf": [schema, {"enum": list(rule.off)}]}


def _described(schema: Schema, rule: FieldRule, *, is_required: bool) -> Schema:
    says = {
        Treatment.HONOURED: "",
        Treatment.INERT: "No effect. ",
        Treatment.PASSED: _ONLY_FOREIGN,
        Treatment.REFUSED: f"Not served: only {rule.off_words}. ",
    }
    return {**(schema if is_required else _or_null(schema)), "description": says[rule.treatment] + rule.note}


def _or_null(schema: Schema) -> Schema:
    """null means the same as an absent field."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if isinstance(kind := schema.get("type"), str):
        return {**schema, "type": [kind, "null"]}
    if any(each == {"type": "null"} for each in schema.get("anyOf", ())):
        return schema
    outside = {key: value for key, value in schema.items() if key == "default"}
    inside = {key: value for key, value in schema.items() if key != "default"}
    return {"anyOf": [inside, {"type": "null"}], **outside}


def _bounds() -> dict[str, Schema]:
    numbers = {name: _number(bound) for name, bound in BOUNDS.items()}
    return numbers | {
        "max_completion_tokens": numbers["max_tokens"],
        "top_logprobs": numbers["logprobs"],
        "best_of": numbers["n"],
        "stop": {"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOP, "items": _STOP}]},
        "stop_token_ids": {"type": "array", "maxItems": MAX_STOP_TOKEN_IDS, "items": TOKEN_ID},
        "logit_bias": {
            "type": "object",
            "maxProperties": MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        "priority": {"enum": list(PRIORITIES)},
        "cache_salt": {"type": "string", "maxLength": MAX_CACHE_SALT_CHARS},
        "messages": _messages(),
        "prompt": _prompt(),
        "tools": _list_of("ToolDefinition", MAX_TOOLS),
        "chat_template_kwargs": {"type": "object", "additionalProperties": _SCALAR},
        "context_fitting": {"enum": list(ContextFitting)},
        "metadata": _metadata(session_id=_SESSION_ID),
        **dict.fromkeys(("guided_json", "json_schema"), _JSON_SCHEMA),
        **dict.fromkeys(("guided_regex", "guided_grammar", "regex", "ebnf", "grammar"), _GRAMMAR),
        "guided_choice": _CHOICE,
        "format": {"anyOf": [{"enum": ["json"]}, {"type": "object"}]},
        **dict.fromkeys(("models", "fallbacks"), _names(MAX_WISHED_MODELS, MAX_MODEL_CHARS)),
    }


def _bounds_at() -> dict[str, dict[str, Schema]]:
    """By place: bounds of objects inside a body, and of fields that one endpoint limits otherwise than the others."""
    function = {"name": _FUNCTION_NAME, "parameters": {"type": "object", "properties": {"type": {"enum": ["object"]}}}}
    content = {"anyOf": [{"type": "string"}, _list_of("TextPart", MAX_PARTS)]}
    return {
        CHAT: {"logprobs": {"type": "boolean"}},
        COMPLETIONS: {"max_tokens": _number(BOUNDS["max_tokens"]) | {"minimum": 0}},
        Inside.MESSAGE: {"content": content, "tool_calls": _list_of("EarlierCall", MAX_CALLS)},
        Inside.FUNCTION: function,
        Inside.CHOSEN_FUNCTION: {"name": _FUNCTION_NAME},
        Inside.RESPONSE_FORMAT: {"type": {"enum": list(FORMATS)}, "schema": _JSON_SCHEMA},
        Inside.JSON_SCHEMA: {"schema": _JSON_SCHEMA},
        Inside.CACHE: {"ttl": _CACHE_S, "s-maxage": _CACHE_S},
        Inside.PROVIDER: {
            **dict.fromkeys(("order", "only", "ignore"), _names(MAX_WISHED_SERVERS, MAX_SERVER_CHARS)),
            "sort": {"enum": list(SortBy)},
            "preferred_min_throughput": {"anyOf": [_AMOUNT, {"$ref": _REF.format(name="MinThroughput")}]},
        },
        Inside.MAX_PRICE: {"prompt": _AMOUNT, "completion": _AMOUNT},
        Inside.MIN_THROUGHPUT: {"p50": _AMOUNT},
        Inside.STRUCTURED_OUTPUTS: {"json": _JSON_SCHEMA, "regex": _GRAMMAR, "choice": _CHOICE, "grammar": _GRAMMAR},
    }


def _names(most: int, most_chars: int) -> Schema:
    return {"type": "array", "maxItems": most, "items": {"type": "string", "minLength": 1, "maxLength": most_chars}}


def _messages() -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": {"$ref": "#/components/schemas/Message"}}


def _list_of(name: str, most: int) -> Schema:
    return {"type": "array", "maxItems": most, "items": {"$ref": f"#/components/schemas/{name}"}}


def _prompt() -> Schema:
    several = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
    ids = {"type": "array", "minItems": 1, "items": TOKEN_ID}
    return {"anyOf": [{"type": "string"}, {**several, "items": {"type": "string"}}, ids, {**several, "items": ids}]}


def _number(bound: Bound) -> Schema:
    low = "exclusiveMinimum" if bound.is_low_outside else "minimum"
    return {"type": "integer" if bound.kind is int else "number", low: bound.low, "maximum": bound.high}


def _metadata(**properties: Schema) -> Schema:
    return {
        "type": "object",
        **({"properties": properties} if properties else {}),
        "maxProperties": MAX_METADATA,
        "propertyNames": {"maxLength": MAX_INERT_CHARS},
        "additionalProperties": _INERT_TEXT,
    }
