"""JSON Schemas of requests, as strict as the checks of each field alone: made from the field table, `core.sampling`'s bounds and the
limits of this server.

A schema has no rules between fields, none that depend on the model (vocabulary, context, template), and not the class of the key. It bounds
the characters of `stop`, whose bytes the check counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.grammar import MAX_GRAMMAR_BYTES
from headrace.core.sampling import BOUNDS, MAX_LOGIT_BIAS, MAX_STOP, MAX_STOP_BYTES, MAX_STOP_TOKEN_IDS, Bound
from headrace.core.tools import FUNCTION_NAME, MAX_TOOLS
from headrace.gateway.cache.control import MAX_CACHE_S
from headrace.gateway.http.config import Limits
from headrace.gateway.sessions.names import SESSION_ID
from headrace.gateway.sessions.window import ContextFitting
from headrace.gateway.surfaces.dialect.field_rule import FieldRule, Inside, Place, Surface, Treatment
from headrace.gateway.surfaces.dialect.field_table import MAX_INERT_CHARS, MAX_METADATA
from headrace.gateway.surfaces.dialect.fields import RULES
from headrace.gateway.surfaces.dialect.parse import MAX_CACHE_SALT_CHARS, MAX_PARTS, PRIORITIES
from headrace.gateway.surfaces.dialect.structured import FORMATS
from headrace.gateway.surfaces.dialect.tools import MAX_CALLS

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
_CACHE_S: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_CACHE_S}
_STRUCTURED: Mapping[Inside, Mapping[str, Schema]] = {
    Inside.RESPONSE_FORMAT: {"type": {"enum": list(FORMATS)}, "schema": _JSON_SCHEMA},
    Inside.JSON_SCHEMA: {"schema": _JSON_SCHEMA},
    Inside.CACHE: {"ttl": _CACHE_S, "s-maxage": _CACHE_S},
    Inside.STRUCTURED_OUTPUTS: {"json": _JSON_SCHEMA, "regex": _GRAMMAR, "choice": _CHOICE, "grammar": _GRAMMAR},
}
"""What an answer must match, and times of the cache. The schemas say the size in characters; the check counts the bytes."""


def object_schema(given: Schema, place: Place, limits: Limits) -> Schema:
    """The schema of an object whose fields are the rows of `place`.

    given  the schema of its wire type: types and defaults of the honoured fields
    """
    bounded = _bounded(place, limits)
    properties = {
        name: _described(_value_schema(rule, given, bounded), rule, is_required=name in given.get("required", ()))
        for name, rule in RULES[place].items()
    }
    return {**given, "properties": properties, "additionalProperties": False}


def _value_schema(rule: FieldRule, given: Schema, bounded: Mapping[str, Schema]) -> Schema:
    if rule.treatment is Treatment.REFUSED:
        return {"enum": list(rule.off)}
    if rule.treatment is Treatment.INERT:
        return {} if rule.is_any else _metadata() if rule.name == "metadata" else _INERT_TEXT
    made: Schema = given["properties"][rule.name]
    if rule.name not in bounded:
        return made
    return _or_off(bounded[rule.name], rule) | ({"default": made["default"]} if "default" in made else {})


def _or_off(schema: Schema, rule: FieldRule) -> Schema:
    """`schema`, or one of the values that ask for nothing."""
    if not rule.off:
        return schema
    return {"enum": [*rule.off, *schema["enum"]]} if "enum" in schema else {"anyOf": [schema, {"enum": list(rule.off)}]}


def _described(schema: Schema, rule: FieldRule, *, is_required: bool) -> Schema:
    says = {Treatment.HONOURED: "", Treatment.INERT: "No effect. ", Treatment.REFUSED: f"Not served: only {rule.off_words}. "}
    return {**(schema if is_required else _or_null(schema)), "description": says[rule.treatment] + rule.note}


def _or_null(schema: Schema) -> Schema:
    """null means absent."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if isinstance(kind := schema.get("type"), str):
        return {**schema, "type": [kind, "null"]}
    if any(each == {"type": "null"} for each in schema.get("anyOf", ())):
        return schema
    outside = {key: value for key, value in schema.items() if key == "default"}
    inside = {key: value for key, value in schema.items() if key != "default"}
    return {"anyOf": [inside, {"type": "null"}], **outside}


def _bounded(place: Place, limits: Limits) -> dict[str, Schema]:
    """Schemas of the honoured fields that have bounds beyond their types."""
    if place is Inside.MESSAGE:
        content = {"anyOf": [{"type": "string"}, _list_of("TextPart", MAX_PARTS)]}
        return {"content": content, "tool_calls": _list_of("EarlierCall", MAX_CALLS)}
    if place is Inside.FUNCTION:
        return {"name": _FUNCTION_NAME, "parameters": {"type": "object", "properties": {"type": {"enum": ["object"]}}}}
    if place is Inside.CHOSEN_FUNCTION:
        return {"name": _FUNCTION_NAME}
    if isinstance(place, Inside):
        return dict(_STRUCTURED.get(place, {}))
    made = {name: _number(bound) for name, bound in BOUNDS.items()} | {
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
        "messages": messages_schema(limits),
        **dict.fromkeys(("guided_json", "json_schema"), _JSON_SCHEMA),
        **dict.fromkeys(("guided_regex", "guided_grammar", "regex", "ebnf", "grammar"), _GRAMMAR),
        "guided_choice": _CHOICE,
        "format": {"anyOf": [{"enum": ["json"]}, {"type": "object"}]},
    }
    if place is Surface.CHAT:
        own = {"max_completion_tokens": made["max_tokens"], "top_logprobs": made["logprobs"], "logprobs": {"type": "boolean"}}
        own |= {"context_fitting": {"enum": list(ContextFitting)}, "metadata": _metadata(session_id=_SESSION_ID)}
        kwargs = {"type": "object", "additionalProperties": _SCALAR}
        return made | own | {"chat_template_kwargs": kwargs, "tools": _list_of("ToolDefinition", MAX_TOOLS)}
    return made | {"max_tokens": made["max_tokens"] | {"minimum": 0}, "best_of": made["n"], "prompt": _prompt(limits)}


def messages_schema(limits: Limits) -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": limits.max_messages, "items": {"$ref": "#/components/schemas/Message"}}


def _list_of(name: str, most: int) -> Schema:
    return {"type": "array", "maxItems": most, "items": {"$ref": f"#/components/schemas/{name}"}}


def _prompt(limits: Limits) -> Schema:
    several = {"type": "array", "minItems": 1, "maxItems": limits.max_prompts}
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
