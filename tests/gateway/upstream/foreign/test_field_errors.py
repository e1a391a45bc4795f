"""Tests which field of a request an error of a foreign server is about, and whether it teaches something about the server, in the words
that servers use."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.gateway.upstream.foreign.field_errors import refused_field

pytestmark = pytest.mark.pure

NAMES = {"seed", "n", "user", "max_tokens", "messages", "tools", "stream_options", "temperature", "response_format"}
NAMES |= {"prompt_cache_options", "cache_control", "messages.cache_control", "messages.thinking_blocks"}
NEWER = NAMES - {"max_tokens"} | {"max_completion_tokens"}


def error(message: object, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, **fields}}


def forbidden(*loc: object) -> dict[str, Any]:
    return {"type": "extra_forbidden", "loc": list(loc), "msg": "Extra inputs are not permitted", "input": {"seed": "'seed'"}}


# what a server does not know, whatever the value: it is learned
REFUSED_NAMES: dict[str, tuple[Any, str]] = {
    "OpenAI": (error("Unknown parameter: 'stream_options'.", param="stream_options", code="unknown_parameter"), "stream_options"),
    "OpenAI's reasoning models": (
        error(
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
            param="max_tokens",
            code="unsupported_parameter",
        ),
        "max_tokens",
    ),
    "OpenAI, by the code alone": (error("no", param="user", code="unknown_parameter"), "user"),
    "Azure, older": (error("Unrecognized request argument supplied: max_completion_tokens", param=None), "max_completion_tokens"),
    "Azure, several": (error("Unrecognized request arguments supplied: stream_options, user"), "stream_options"),
    "Mistral": ({"object": "error", "message": {"detail": [forbidden("body", "stream_options")]}}, "stream_options"),
    "FastAPI": ({"detail": [forbidden("body", "foo"), forbidden("body", "max_completion_tokens")]}, "max_completion_tokens"),
    "FastAPI, older": (
        {"detail": [{"loc": ["body", "user"], "msg": "extra fields not permitted", "type": "value_error.extra"}]},
        "user",
    ),
    "vLLM": (
        {"object": "error", "message": "[{'type': 'extra_forbidden', 'loc': ('body', 'stream_options'), 'input': 1}]"},
        "stream_options",
    ),
    "pydantic's text": (
        error("1 validation error for ChatRequest\nmax_completion_tokens\n  Extra inputs are not permitted [type=extra_forbidden]"),
        "max_completion_tokens",
    ),
    "Anthropic": (error("stream_options: Extra inputs are not permitted", type="invalid_request_error"), "stream_options"),
    "Anthropic, a mark": (error("messages.0.content.0.cache_control: Extra inputs are not permitted"), "messages.cache_control"),
    "Anthropic, a mark of the body": (error("cache_control: Extra inputs are not permitted"), "cache_control"),
    "OpenAI, a mark": (
        error("Unknown parameter: 'messages[0].cache_control'.", param="messages[0].cache_control", code="unknown_parameter"),
        "messages.cache_control",
    ),
    "Gemini": ([error('Invalid JSON payload received. Unknown name "user": Cannot find field.', code=400)], "user"),
    "Bedrock": ({"message": "Malformed input request: #: extraneous key [stream_options] is not permitted"}, "stream_options"),
    "Groq": (error("property 'user' is unsupported", type="invalid_request_error"), "user"),
    "Groq, a mark": (
        error("'messages.0' : for 'role:user' the following must be satisfied[('messages.0' : property 'cache_control' is unsupported)]"),
        "messages.cache_control",
    ),
    "Cerebras": (error("body.stream_options: property 'body.stream_options' is unsupported", param="stream_options"), "stream_options"),
    "TGI": (
        {"error": "Failed to deserialize: unknown field `max_completion_tokens`, expected one of `messages`, `max_tokens` at line 1"},
        "max_completion_tokens",
    ),
    "xAI": ({"code": "Client specified an invalid argument", "error": "Argument not supported on this model: maxTokens"}, "max_tokens"),
    "xAI, other words": ({"error": "Model grok-4 does not support parameter maxTokens."}, "max_tokens"),
    "LM Studio": ({"error": "Unrecognized key(s) in object: 'stream_options'"}, "stream_options"),
    "Ollama": (error('json: unknown field "stream_options"', type="api_error"), "stream_options"),
    "Fireworks": (error("Extra inputs are not permitted, field: 'stream_options'"), "stream_options"),
    "LiteLLM": (error("litellm.BadRequestError: Unknown parameter: 'stream_options'", param="None", type="None"), "stream_options"),
    "jsonschema": (error("Additional properties are not allowed ('stream_options' was unexpected)"), "stream_options"),
    "Python": ({"detail": "create() got an unexpected keyword argument 'stream_options'"}, "stream_options"),
    "a deprecated name": (error("max_tokens is deprecated, use max_completion_tokens"), "max_tokens"),
    "n": (error("Unsupported parameter: 'n'", param="n"), "n"),
    "for a model": (error("'stream_options' is not supported for the o1 model."), "stream_options"),
    "by a server": (error("The parameter user is not supported with this endpoint"), "user"),
}

# a value of one client: nothing is learned
REFUSED_VALUES: dict[str, tuple[Any, str]] = {
    "OpenAI": (
        error("max_tokens is too large: 9. This model supports at most 4 completion tokens.", param="max_tokens", code="invalid_value"),
        "max_tokens",
    ),
    "OpenAI, a value": (
        error("Unsupported value: 'temperature' does not support 0.5 with this model.", param="temperature", code="unsupported_value"),
        "temperature",
    ),
    "OpenAI, a length": (
        error("Invalid 'user': string too long. Expected a string with maximum length 64", param="user", code="string_above_max_length"),
        "user",
    ),
    "OpenAI, older": (error("'stream_options' is too long - 'user'", param=None), "user"),
    "OpenAI, older, n": (error("200 is greater than the maximum of 128 - 'n'", param=None), "n"),
    "Azure": (error("max_tokens must be at least 1", param=None), "max_tokens"),
    "Azure's inference": (error("Extra parameters ['stream_options'] are not allowed when extra-parameters is not set"), "stream_options"),
    "vLLM": (error("'max_tokens' or 'max_completion_tokens' is too large: 9. This model has a context of 4 tokens."), "max_tokens"),
    "vLLM, greedy": (error("n must be 1 when using greedy sampling, got 2."), "n"),
    "vLLM, other words": (error("max_tokens must be at least 1, got 0.", param="max_tokens"), "max_tokens"),
    "Anthropic": (error("max_tokens: 9000 > 4096, which is the maximum allowed number of output tokens"), "max_tokens"),
    "Anthropic, a quote": (error("user: 'unknown parameter stream_options' is too long"), "user"),
    "Gemini": (
        [error("Unable to submit request because it has a maxTokens value of 9 but the supported range is from 1 to 4")],
        "max_tokens",
    ),
    "Gemini, n": ([error("Multiple candidates is not enabled for this model", param="n")], "n"),
    "Mistral": (
        {
            "detail": [
                {"type": "less_than_equal", "loc": ["body", "n"], "msg": "Input should be less than 8", "input": "unknown field user"}
            ]
        },
        "n",
    ),
    "DeepSeek": (error("Invalid max_tokens value, the valid range of max_tokens is [1, 8192]"), "max_tokens"),
    "DeepSeek, n": (error("Invalid n value (currently only n = 1 is supported)"), "n"),
    "xAI": ({"error": "Invalid value for parameter maxTokens: it is not supported above 8"}, "max_tokens"),
    "Groq": (error("`max_tokens` must be less than or equal to `8192`, the maximum value for `max_tokens`"), "max_tokens"),
    "Groq, n": (error("'n' : number must be at most 1"), "n"),
    "TGI": (
        {"error": "Input validation error: `max_tokens` must be strictly positive. Given: 0", "error_type": "validation"},
        "max_tokens",
    ),
    "Bedrock": ({"message": "The maximum tokens you requested exceeds the model limit of 8. Try again with max_tokens of 8"}, "max_tokens"),
    "LM Studio": ({"error": "'response_format.type' must be 'json_schema' or 'text'"}, "response_format"),
    "Ollama": (error("invalid max_tokens: not supported for 0", type="api_error"), "max_tokens"),
    "llama.cpp": (error("Only one completion choice is allowed", code=500), "n"),
    "a pair of fields": (error("'n' is not supported together with 'seed'"), "n"),
    "a condition": (error("max_tokens is not supported when stream is false"), "max_tokens"),
    "a number": (error("max_tokens of 9000 is not supported"), "max_tokens"),
    "a quoted sentence": (error("Invalid 'user': 'Unknown parameter: max_tokens'", param="user"), "user"),
    "a quoted sentence, no place": (error("Parameter user is wrong: 'max_tokens, unknown parameter stream_options'"), "user"),
    "a quoted word": (error("Invalid 'user': unknown id 'unsupported'", param="user"), "user"),
    "nothing more": (error("no", param="max_tokens"), "max_tokens"),
    "inside, OpenAI": (
        error("Unknown parameter: 'prompt_cache_options.foo'.", param="prompt_cache_options.foo", code="unknown_parameter"),
        "prompt_cache_options",
    ),
    "inside, FastAPI": (
        {"detail": [forbidden("body", "messages", 0, "content", 0, "text", "cache_control", "ephemeral", "foo")]},
        "messages.cache_control",
    ),
    "inside, Anthropic": (
        error("messages.0.content.0.text.cache_control.ephemeral.foo: Extra inputs are not permitted"),
        "messages.cache_control",
    ),
    "inside, an item": (error("messages.1.thinking_blocks.0.foo: Extra inputs are not permitted"), "messages.thinking_blocks"),
    "inside, vLLM": (
        {"message": "[{'type': 'extra_forbidden', 'loc': ('body', 'prompt_cache_options', 'foo'), 'msg': 'Extra', 'input': 1}]"},
        "prompt_cache_options",
    ),
    "inside, a pointer": (error("/prompt_cache_options/foo: additional properties are not allowed"), "prompt_cache_options"),
    "inside, brackets": (error("Unknown parameter: prompt_cache_options['foo']"), "prompt_cache_options"),
    "inside, another name": (error("Unrecognized key(s) in object: 'foo'", param="prompt_cache_options"), "prompt_cache_options"),
    "inside, jsonschema": (
        error("Additional properties are not allowed ('foo' was unexpected) - 'prompt_cache_options'"),
        "prompt_cache_options",
    ),
    "a quoted code": (error("user 'unknown_parameter' is invalid", param="user"), "user"),
    "a quoted code, no place": (error('Parameter user: "extra_forbidden" is no id'), "user"),
    "a quoted path": (error("Invalid user: 'unknown_parameter.user'", param="user"), "user"),
    "a quoted code, pydantic": (
        {"message": "[{'type': 'string_type', 'loc': ('body', 'user'), 'input': {'type': 'extra_forbidden'}}]"},
        "user",
    ),
    "beside tools": (error("stream_options is not supported with tools"), "stream_options"),
    "for images": (error("'stream_options' is not supported for requests with images"), "stream_options"),
    "beside tools, does not": (error("This model does not support stream_options with tools", param="stream_options"), "stream_options"),
    "beside tools, a code": (
        error("Unsupported parameter: 'stream_options' with this model and tools", param="stream_options", code="unsupported_parameter"),
        "stream_options",
    ),
    "in some requests": (error("stream_options is not allowed in batch requests"), "stream_options"),
}


@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_a_name_that_a_server_does_not_know_is_told_from_a_value(name: str) -> None:
    body, field = REFUSED_NAMES[name]
    found = refused_field(json.dumps(body).encode(), NEWER if field == "max_completion_tokens" else NAMES)
    assert found == (field, True)


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_a_value_that_a_server_refuses_teaches_nothing(name: str) -> None:
    body, field = REFUSED_VALUES[name]
    assert refused_field(json.dumps(body).encode(), NAMES) == (field, False)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (error("use max_tokens or user", param="messages[0].name"), "messages"),
        (error("'stream_options' is not known", param="foo"), None),
        (error("messages with the role user must follow"), None),
        (error("unknown field `foo`, expected one of `seed`, `user`"), None),
        (error("does not support parameter maxTokens"), "max_tokens"),
        (error("wrong 'seed'", param="tools[0].function.parameters.properties.seed"), "tools"),
        ({"detail": [{"loc": ["body", "messages", 0, "content", 0, "cache_control"], "msg": "no"}]}, "messages.cache_control"),
        (error("no", param="tools[0].cache_control"), "tools"),
        (error("no", param="thinking_blocks"), "messages.thinking_blocks"),
        (error("property 'thinking_blocks' is unsupported"), "messages.thinking_blocks"),
        ({"detail": [{"loc": ["body"], "msg": "stream_options needs stream"}]}, "stream_options"),
        ({"detail": [{"msg": "no", "input": {"seed": "'seed'"}}]}, None),
        ({"message": ["'seed' is not known"]}, None),
        ([[["deep"]]], None),
        ("seed", None),
    ],
)
def test_the_field_that_an_error_names(error: object, found: str | None) -> None:
    refusal = refused_field(json.dumps(error).encode(), NAMES)
    assert (None if refusal is None else refusal.field) == found


@pytest.mark.parametrize("body", [b"[" * 2000 + b"]" * 2000, b'{"error":' * 2000 + b'"user"' + b"}" * 2000, b"{" * 60_000, b"", b"\xff"])
def test_a_hostile_error_names_no_field(body: bytes) -> None:
    assert refused_field(body, NAMES) is None
