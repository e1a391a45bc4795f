"""/openapi.json: OpenAPI 3.1, made from the endpoint table, the field table and the wire types, so that it agrees with the code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

import headrace
from headrace.gateway.http.config import Limits
from headrace.gateway.http.errors import TABLE, ErrorBody
from headrace.gateway.surfaces.dialect.field_rule import Inside
from headrace.gateway.surfaces.dialect.request_schemas import messages_schema, object_schema
from headrace.gateway.surfaces.endpoint import Endpoint

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_ERRORS = sorted({str(row.status) for _, row in TABLE if row.status != 499})


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
}
"""Wire type of an object in a body -> the place of its rows in the field table."""


def document(endpoints: Sequence[Endpoint[object]], limits: Limits) -> bytes:
    """The whole document as JSON. limits: this server's, which become bounds in the schemas"""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.shown_path, {})[endpoint.method.lower()] = _operation(endpoint)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Headrace", "version": headrace.__version__, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
            "paths": paths,
            "components": {"schemas": _schemas(endpoints, limits), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        }
    )


def _operation(endpoint: Endpoint[object]) -> dict[str, Any]:
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
        operation["security"] = [{"key": []}, {}]
    return operation


def _responses(endpoint: Endpoint[object]) -> dict[str, Any]:
    if endpoint.reply is None:
        kind = {} if endpoint.media_type == _JSON else {"type": "string"}
        return {"200": {"description": "OK", "content": {endpoint.media_type: {"schema": kind}}}}
    content = {_JSON: {"schema": _ref(endpoint.reply)}}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": dict(content)}}
    if endpoint.chunk is not None:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    for status in _ERRORS:
        responses[status] = {"description": "Error", "content": {_JSON: {"schema": _ref(ErrorBody)}}}
    if endpoint.may_be_503:
        responses["503"] = {"description": "Not now; the body says why.", "content": content}
    return responses


def _schemas(endpoints: Sequence[Endpoint[object]], limits: Limits) -> dict[str, Any]:
    kinds = [kind for row in endpoints for kind in (row.request, row.reply, row.chunk) if kind is not None]
    _, components = msgspec.json.schema_components([*dict.fromkeys([ErrorBody, *kinds])], ref_template=_REF)
    for row in endpoints:
        if row.request is not None and row.fields is not None:
            name = row.request.__name__
            components[name] = object_schema(components[name], row.fields, limits)
    for name, place in _INSIDE.items():
        components[name] = object_schema(components[name], place, limits)
    components["TokenizeRequest"]["properties"]["messages"] = {"anyOf": [messages_schema(limits), {"type": "null"}]}
    return dict(components)


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
