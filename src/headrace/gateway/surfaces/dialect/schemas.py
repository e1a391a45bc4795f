"""Defines the wire types of the HTTP API: what msgspec decodes and encodes, and the source of /openapi.json's schemas.

Request types have honoured fields alone, since `dialect.parse` takes out all other ones before. They check types; `core.sampling` has the
bounds. The default of a field applies where it is absent. Answers have OpenAI's shapes, with vLLM's additions (`stop_reason`,
`prompt_logprobs`).
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from headrace.gateway.cache.control import CacheControl

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
    """vLLM's `structured_outputs`. Its fields are the `guided_` fields of READERS in `dialect.structured`, without that prefix."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False


class SamplingFields(Struct, kw_only=True):
    """Fields that both generating endpoints have. The last ones say what the answer must match; `dialect.structured` takes them out."""

    model: str | None = None
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
    """How an answer, and each chunk of a stream, begins."""

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
    those of the answer.
    """

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
