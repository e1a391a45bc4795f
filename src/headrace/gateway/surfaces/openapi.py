"""/openapi.json: OpenAPI 3.1 made from the wire types themselves, so it cannot say anything else than the code decodes."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

import headrace
from headrace.gateway.http.errors import TABLE, ErrorBody
from headrace.gateway.surfaces.dialect import schemas
from headrace.gateway.surfaces.dialect.fields import TABLE as FIELDS
from headrace.gateway.surfaces.dialect.fields import Surface, Treatment

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_GET = (
    ("/v1/models", schemas.ModelList, "The models this server answers for.", True),
    ("/v1/models/{model}", schemas.ModelCard, "One of them.", True),
    ("/health", schemas.ProbeReply, "200 while every model has a living engine, else 503.", False),
    ("/live", schemas.ProbeReply, "200 while this process answers.", False),
    ("/ready", schemas.ProbeReply, "200 while every replica answers and its loop turns, else 503 and why.", False),
    ("/version", schemas.VersionReply, "The version of Headrace.", True),
    ("/load", schemas.LoadReply, "Generating requests in this server now.", True),
)
_POST = (
    ("/v1/chat/completions", schemas.ChatRequest, schemas.ChatCompletion, "Answer a conversation; server-sent events with stream."),
    ("/v1/completions", schemas.CompletionRequest, schemas.Completion, "Continue text or token ids; server-sent events with stream."),
    ("/v1/tokenize", schemas.TokenizeRequest, schemas.TokenizeReply, "Token ids of a prompt or a conversation."),
    ("/v1/detokenize", schemas.DetokenizeRequest, schemas.DetokenizeReply, "Text of token ids."),
    ("/tokenize", schemas.TokenizeRequest, schemas.TokenizeReply, "vLLM's path of /v1/tokenize."),
    ("/detokenize", schemas.DetokenizeRequest, schemas.DetokenizeReply, "vLLM's path of /v1/detokenize."),
)
_NOTES = {schemas.ChatRequest: Surface.CHAT, schemas.CompletionRequest: Surface.COMPLETIONS}


@cache
def document() -> bytes:
    """The whole document as JSON."""
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Headrace", "version": headrace.__version__, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
            "paths": _paths(),
            "components": {"schemas": _schemas(), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        }
    )


def _types() -> list[type]:
    kinds: list[type] = [ErrorBody, *(kind for _, kind, _, _ in _GET)]
    for _, request, reply, _ in _POST:
        kinds += [request, reply]
    return [*dict.fromkeys([*kinds, schemas.ChatChunk])]


def _schemas() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_types(), ref_template=_REF)
    for kind, surface in _NOTES.items():
        properties = components[kind.__name__]["properties"]
        for rule in FIELDS:
            if surface in rule.surfaces and rule.name in properties:
                properties[rule.name]["description"] = rule.note
            elif surface in rule.surfaces and rule.treatment is Treatment.INERT:
                properties[rule.name] = {"description": f"No effect. {rule.note}"}
        components[kind.__name__]["additionalProperties"] = False
    return dict(components)


def _paths() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for path, reply, text, needs_key in _GET:
        operation = _operation(path, reply, text, needs_key=needs_key)
        if "{model}" in path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {"get": operation}
    for path, request, answer, text in _POST:
        operation = _operation(path, answer, text, needs_key=True)
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(request)}}}
        if request in _NOTES:
            operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        paths[path] = {"post": operation}
    paths["/metrics"] = {"get": _text_operation("Prometheus metrics.", "text/plain")}
    return paths


def _operation(path: str, reply: type, text: str, *, needs_key: bool) -> dict[str, Any]:
    errors = {str(row.status) for _, row in TABLE if row.status < 499 or row.status >= 500}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": {_JSON: {"schema": _ref(reply)}}}}
    for status in sorted(errors):
        responses[status] = {"description": "Error", "content": {_JSON: {"schema": _ref(ErrorBody)}}}
    if not needs_key and path != "/live":
        responses["503"] = {"description": "Not now; the body says why.", "content": {_JSON: {"schema": _ref(reply)}}}
    operation: dict[str, Any] = {"summary": text, "responses": responses}
    if needs_key:
        operation["security"] = [{"key": []}, {}]
    return operation


def _text_operation(text: str, media_type: str) -> dict[str, Any]:
    content = {media_type: {"schema": {"type": "string"}}}
    return {"summary": text, "responses": {"200": {"description": "OK", "content": content}}, "security": [{"key": []}, {}]}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
