"""Tests that errors of foreign servers are sorted by what they mean, in the words and forms that public reports show."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.upstream.foreign.errors import MAX_ERROR_BYTES, MAX_WORDS_CHARS, ErrorKind, sent_error

pytestmark = pytest.mark.pure

OVERFLOW, ACCOUNT_LIMIT, RATE_LIMIT = ErrorKind.OVERFLOW, ErrorKind.ACCOUNT_LIMIT, ErrorKind.RATE_LIMIT
FILTERED, KEY, MODEL, INVALID = ErrorKind.FILTERED, ErrorKind.KEY, ErrorKind.MODEL, ErrorKind.INVALID


def error(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, **fields}}


def google(message: str, code: int, status: str, **more: Any) -> list[dict[str, Any]]:
    return [error(message, code=code, status=status, **more)]


TOO_LONG: dict[str, tuple[int, Any]] = {
    "OpenAI": (400, error("This model's maximum context length is 4096 tokens. However, your messages resulted in 5000 tokens.")),
    "OpenAI, newer interface": (400, error("Your input exceeds the context window of this model.", code="context_length_exceeded")),
    "vLLM of 2024": (400, {"object": "error", "message": "This model's maximum context length is 16 tokens.", "code": 400}),
    "vLLM": (
        400,
        error("You passed 50 input tokens and requested 0 output tokens. However, the model's context length is only 16 tokens."),
    ),
    "vLLM's engine": (400, error("The decoder prompt (length 50) is longer than the maximum model length of 16.")),
    "SGLang": (400, error("The input (50 tokens) is longer than the model's context length (16 tokens).")),
    "SGLang, with the output": (400, error("Requested token count exceeds the model's maximum context length of 16 tokens.")),
    "TensorRT-LLM": (400, error("Input length (50) exceeds model's maximum context length (16).")),
    "Anthropic": (400, {"type": "error", **error("prompt is too long: 50 tokens > 16 maximum", type="invalid_request_error")}),
    "Anthropic, with the output": (400, error("input length and `max_tokens` exceed context limit: 15 + 2 > 16, decrease input length")),
    "Anthropic, in bytes": (413, error("Request exceeds the maximum size", type="request_too_large")),
    "Gemini": (400, google("The input token count (50) exceeds the maximum number of tokens allowed (16).", 400, "INVALID_ARGUMENT")),
    "TGI": (
        422,
        {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 16. Given: 50", "error_type": "validation"},
    ),
    "TGI, the prompt": (422, {"error": "Input validation error: `inputs` must have less than 16 tokens. Given: 50"}),
    "Bedrock": (400, {"message": "Input is too long for requested model."}),
    "Bedrock, counted": (400, {"message": "Too many input tokens. Max input tokens: 16, request input token count: 50"}),
    "xAI": (
        400,
        {"code": "Client specified an invalid argument", "error": "This model's maximum prompt length is 16 but the request contains 50"},
    ),
    "Ollama": (400, error("the input length exceeds the context length", type="api_error")),
    "Ollama's cloud": (400, error("prompt too long; exceeded max context length by 34 tokens")),
    "LM Studio": (
        400,
        {"error": "Trying to keep the first 50 tokens when context the overflows. However, the model's context length is only 16"},
    ),
    "LM Studio, newer": (400, {"error": "The number of tokens to keep from the initial prompt is greater than the context length."}),
    "llama.cpp": (
        400,
        error("request (50 tokens) exceeds the available context size (16 tokens)", type="exceed_context_size_error", code=400),
    ),
    "llama.cpp of 2025": (500, error("the request exceeds the available context size. try increasing it", code=500, type="server_error")),
    "llama.cpp of 2025, unavailable": (503, error("the request exceeds the available context size", code=503, type="unavailable_error")),
    "llama.cpp while it computes": (500, error("Context size has been exceeded.", code=500, type="server_error")),
    "Mistral": (
        400,
        {"message": "Prompt contains 50 tokens and 0 draft tokens, too large for model with 16 maximum context length", "code": "3051"},
    ),
    "Cohere": (400, {"message": "too many tokens: total number of tokens in the prompt cannot exceed 16 - received 50."}),
    "DeepSeek": (
        400,
        error("This model's maximum context length is 16 tokens. However, you requested 50 tokens.", type="invalid_request_error"),
    ),
    "Groq": (400, error("Please reduce the length of the messages or completion.", param="messages", code="context_length_exceeded")),
    "Cerebras": (400, error("Please reduce the length of the messages or completion. Current length is 50 while limit is 16")),
    "Together": (422, error("Input validation error: `inputs` tokens + `max_new_tokens` must be <= 17. Given: 50 `inputs` tokens")),
    "OpenRouter": (400, error("This endpoint's maximum context length is 16 tokens. However, you requested about 50 tokens.", code=400)),
    "OpenRouter, the provider's words": (
        400,
        error("Provider returned error", code=400, metadata={"raw": '{"message": "prompt is too long"}'}),
    ),
    "OpenRouter, in an event": (200, {"choices": [], **error("prompt is too long: 50 tokens > 16 maximum", code=400)}),
    "Moonshot": (400, error("Invalid request: Your request exceeded model token limit: 16", type="invalid_request_error")),
    "MiniMax": (400, error("invalid params, context window exceeds limit (2013)", type="bad_request_error")),
    "Z.AI": (400, {"code": "1261", "message": "Prompt too long"}),
    "DashScope": (400, error("Range of input length should be [1, 16]", code="invalid_parameter_error")),
    "GitHub": (400, error("prompt token count of 50 exceeds the limit of 16", code="model_max_prompt_tokens_exceeded")),
    "Cloudflare": (
        413,
        error("The estimated number of input and maximum output tokens (50) exceeded this model context window limit (16)."),
    ),
    "TabbyAPI": (400, {"detail": "Prompt length 50 is greater than max_seq_len 16"}),
    "Perplexity": (400, error("The total length of all messages is too long.")),
    "LiteLLM": (400, error("litellm.ContextWindowExceededError: AnthropicException - prompt is too long", code="400")),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_prompt_that_is_too_long_is_that_in_any_servers_words(name: str) -> None:
    status, body = TOO_LONG[name]
    assert sent_error(json.dumps(body).encode(), None if status == 200 else status).kind is OVERFLOW


# status of the answer (None: an event of an answer with 200), body -> kind, and whether other requests may feel it
OTHERS: dict[str, tuple[int | None, Any, ErrorKind | None, bool]] = {
    "OpenAI's key": (401, error("Incorrect API key provided: sk-x.", code="invalid_api_key"), KEY, True),
    "Gemini's key": (
        400,
        google("API key not valid. Please pass a valid API key.", 400, "INVALID_ARGUMENT", details=[{"reason": "API_KEY_INVALID"}]),
        *(KEY, True),
    ),
    "Gemini's key in a proxy": (
        400,
        error('{"error": {"message": "API key not valid.", "status": "INVALID_ARGUMENT"}}', code=400),
        KEY,
        False,
    ),
    "xAI's key": (400, {"code": "Client specified an invalid argument", "error": "Incorrect API key provided: x."}, KEY, False),
    "a key as 403": (
        403,
        {"message": "The security token included in the request is invalid", "type": "UnrecognizedClientException"},
        KEY,
        True,
    ),
    "no permission": (403, error("You do not have permission", type="permission_error"), KEY, True),
    "DeepSeek's key": (401, error("Authentication Fails (no such user)", type="authentication_error"), KEY, True),
    "DeepSeek's balance": (402, error("Insufficient Balance", type="unknown_error"), KEY, True),
    "Anthropic's balance": (400, error("Your credit balance is too low", type="invalid_request_error"), KEY, False),
    "MiniMax's key in a 200": (None, {"base_resp": {"status_code": 2049, "status_msg": "invalid api key"}}, KEY, False),
    "401 without words": (401, "", KEY, True),
    "403 without words": (403, "", None, True),
    "OpenAI's rate limit": (429, error("Rate limit reached for requests", type="requests", code="rate_limit_exceeded"), RATE_LIMIT, True),
    "OpenAI's quota": (429, error("You exceeded your current quota", code="insufficient_quota"), RATE_LIMIT, True),
    "Google's quota as 403": (403, google("Quota exceeded for metric", 403, "RESOURCE_EXHAUSTED"), RATE_LIMIT, True),
    "a rate limit as 400": (400, error("Too many requests, slow down", code="rate_limit_exceeded"), RATE_LIMIT, True),
    "a rate limit as 400, words alone": (400, error("rate limit reached"), RATE_LIMIT, False),
    "Anthropic's overload": (529, {"type": "error", **error("Overloaded", type="overloaded_error")}, RATE_LIMIT, True),
    "Gemini's overload": (503, google("The model is overloaded. Please try again later.", 503, "UNAVAILABLE"), RATE_LIMIT, True),
    "TGI's overload": (429, {"error": "Model is overloaded", "error_type": "overloaded"}, RATE_LIMIT, True),
    "SGLang's queue": (None, error("The request queue is full.", type="SERVICE_UNAVAILABLE", code=503), RATE_LIMIT, True),
    "Bedrock's rate": (
        429,
        {"message": "Too many tokens, please wait before trying again.", "__type": "ThrottlingException"},
        RATE_LIMIT,
        True,
    ),
    "OpenRouter's event": (None, {"choices": [], **error("Rate limit exceeded: limit_rpm", code=429)}, RATE_LIMIT, True),
    "an event with a code alone": (None, error("slow down", code="rate_limit_exceeded"), RATE_LIMIT, True),
    "an event with a type alone": (None, error("Overloaded", type="overloaded_error"), RATE_LIMIT, True),
    "an event with words alone": (None, error("quota exceeded"), RATE_LIMIT, False),
    "an event that is no JSON": (None, "upstream: too many requests", RATE_LIMIT, False),
    "429 without words": (429, "<html>", RATE_LIMIT, True),
    "Groq's account": (
        413,
        error("Request too large for model on tokens per minute (TPM): Limit 6000, Requested 14810", code="rate_limit_exceeded"),
        *(ACCOUNT_LIMIT, False),
    ),
    "OpenAI's account": (
        429,
        error("Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 40000"),
        ACCOUNT_LIMIT,
        False,
    ),
    "Azure's filter": (
        400,
        error("The response was filtered due to the prompt triggering Microsoft's content management policy.", code="content_filter"),
        *(FILTERED, True),
    ),
    "DeepSeek's filter": (400, error("Content Exists Risk", code="invalid_request_error"), FILTERED, False),
    "Moonshot's filter": (
        400,
        error("The request was rejected because it was considered high risk", type="content_filter"),
        FILTERED,
        True,
    ),
    "DashScope's filter": (400, error("Input data may contain inappropriate content.", code="data_inspection_failed"), FILTERED, True),
    "xAI's filter": (403, {"error": "Content violates usage guidelines. Failed check: SAFETY_CHECK_TYPE_BIO"}, FILTERED, False),
    "OpenRouter's filter": (403, error("Input was flagged", code=403, metadata={"reasons": ["x"]}), FILTERED, False),
    "OpenAI's model": (404, error("The model `x` does not exist or you do not have access to it.", code="model_not_found"), MODEL, True),
    "vLLM's model": (404, error("The model `x` does not exist.", type="NotFoundError", code=404), MODEL, True),
    "DeepSeek's model": (400, error("Model Not Exist", type="invalid_request_error"), MODEL, False),
    "a model that went": (400, error("The model `x` has been decommissioned", code="model_decommissioned"), MODEL, True),
    "404 without words": (404, "<html>", None, True),
    "an unknown field": (400, error("Unrecognized request argument supplied: foo", type="invalid_request_error"), INVALID, True),
    "a field as 422": (422, {"detail": [{"type": "extra_forbidden", "msg": "Extra inputs are not permitted"}]}, INVALID, True),
    "llama.cpp's tools": (500, error("tools param requires --jinja flag", code=500, type="server_error"), INVALID, False),
    "llama.cpp's template": (500, error("Jinja Exception: System message must be at the beginning", code=500), INVALID, False),
    "llama-cpp-python's schema": (500, error("[{'type': 'literal_error', 'loc': ('body',)}] validation error", type="x"), INVALID, False),
    "OpenRouter's tools": (404, error("No endpoints found that support tool use", code=404), INVALID, False),
    "vLLM's event": (None, error("top_k must be -1 or at least 1", type="BadRequestError", code=400), INVALID, True),
    "500 without words": (500, error("Internal Server Error", type="server_error", code=500), None, True),
    "503 that loads": (503, error("Loading model", type="unavailable_error", code=503), None, True),
    "an output that is too long": (
        400,
        error("max_tokens is too large: 9. This model supports at most 4 completion tokens."),
        INVALID,
        True,
    ),
    "a temperature": (422, {"error": "Input validation error: `temperature` must be strictly positive"}, INVALID, True),
    "a name in a schema": (400, error("Invalid schema for function 'f': 'required' must include 'api_key'."), INVALID, True),
    "OpenAI's schema": (
        400,
        error(
            "Invalid schema for function 'f': authorization error, invalid api key is missing",
            type="invalid_request_error",
            param="tools[0].function.parameters",
            code="invalid_function_parameters",
        ),
        *(INVALID, True),
    ),
    "OpenAI's schema, by the code alone": (
        400,
        error("Invalid schema: the model 'x' does not exist, api key missing", code="invalid_function_parameters"),
        INVALID,
        True,
    ),
    "a schema in an event": (
        None,
        error("Invalid: api key is missing", param="tools[0].function.parameters", code="invalid_function_parameters"),
        *(INVALID, False),
    ),
    "a quoted property": (400, error("Invalid schema: 'credentials' is a required property, `x-api-key` is missing"), INVALID, True),
    "a property with no quotes": (400, error("tools.0.parameters.authorization is required"), INVALID, True),
    "Gemini's schema": (
        400,
        google(
            "tools[0].parameters.properties[credentials].enum[0]: invalid, cannot be empty",
            *(400, "INVALID_ARGUMENT"),
            details=[{"fieldViolations": [{"field": "tools[0].parameters.properties[credentials]", "description": "no"}]}],
        ),
        *(INVALID, True),
    ),
    "a type": (422, {"detail": [{"loc": ["body", "messages", 0, "content"], "msg": "content: violates the expected type"}]}, INVALID, True),
    "a type, words alone": (400, error("content: violates the expected type"), INVALID, True),
    "a place and a rate limit in words": (400, error("tools: 'rate limit: too many requests'", param="tools"), INVALID, True),
    "a length with a quoted key": (400, error("'invalid api key' is too long - 'user'"), INVALID, True),
    "a place and a code": (400, error("no", param="messages", code="content_filter"), FILTERED, True),
    "a place that we write": (400, error("The model `x` does not exist", param="model", code="invalid_value"), MODEL, False),
    "a key as a header": (400, error("Invalid api key", param="x-api-key"), KEY, False),
    "a key, in LiteLLM's words": (400, error("AuthenticationError: Incorrect API key provided", param="None", type="None"), KEY, False),
    "a key as 401 with a place": (401, error("Incorrect API key provided", param="messages"), KEY, True),
    "Groq's key as 400": (400, error("Invalid API Key", type="invalid_request_error", code="invalid_api_key"), KEY, True),
    "an authorization header": (400, error("Missing or malformed authorization header"), KEY, False),
    "Anthropic's filter in words": (
        400,
        error("Output blocked: it violates our usage policy", type="invalid_request_error"),
        FILTERED,
        False,
    ),
    "what the client wrote": (
        422,
        {
            "detail": [
                {"msg": "Input should be a number", "loc": ["body", "n"], "input": "rate limit, invalid api key", "ctx": {"error": "quota"}}
            ]
        },
        *(INVALID, True),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_errors_are_sorted_by_what_they_mean(name: str) -> None:
    status, body, kind, is_certain = OTHERS[name]
    sent = sent_error(body.encode() if isinstance(body, str) else json.dumps(body).encode(), status)
    assert sent.kind is kind
    if kind not in (None, INVALID, OVERFLOW):
        assert sent.is_certain is is_certain


@pytest.mark.parametrize(
    ("body", "wait_s"),
    [
        (error("Please try again in 20s. Visit https://x."), 20.0),
        (error("Rate limit reached. Please try again in 1m30.5s."), 90.5),
        (error("Please try again in 6ms."), 0.006),
        (error("Please retry after 26 seconds."), 26.0),
        (error("Retry in 2 minutes"), 120.0),
        (error("x", details=[{"@type": "google.rpc.RetryInfo", "retryDelay": "34s"}]), 34.0),
        (error("x", retry_after=5), 5.0),
        (error("x", metadata={"retry_after_ms": 1500}), 1.5),
        (error("x", retry_after=10**30), 3600.0),
        (error("x", retry_after=-5), None),
        (error("x", retry_after="soon"), None),
        (error("try again later"), None),
    ],
)
def test_an_error_says_when_to_come_again(body: Any, wait_s: float | None) -> None:
    assert sent_error(json.dumps(body).encode(), 429).wait_s == wait_s


def test_only_so_much_of_an_error_is_looked_at() -> None:
    far = "x" * MAX_WORDS_CHARS
    deep: Any = error("rate limit")
    for _ in range(20):
        deep = {"error": deep}
    for body in (error(f"{far} rate limit"), error("x", details=[{}] * 100 + [{"message": "rate limit"}]), deep):
        assert sent_error(json.dumps(body).encode(), 400).kind is INVALID
    for hostile in (b"{" * MAX_ERROR_BYTES, json.dumps(error("retry " + "1m" * 30_000, retry_after="1s" * 30_000)).encode()):
        assert sent_error(hostile, 400).kind is INVALID


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["rate limit", "429", "too long"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["error", "message", "code", "type", "details", "retry_after", "detail", "status"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(body=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()), status=st.none() | st.integers(100, 599))
def test_whatever_a_server_says_is_an_error(body: bytes, status: int | None) -> None:
    sent = sent_error(body, status)
    assert sent.wait_s is None or 0.0 <= sent.wait_s <= 3600.0
