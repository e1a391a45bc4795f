"""Wire types of the HTTP surface: what msgspec decodes and encodes, and where /openapi.json takes its schemas from.

Requests hold honoured fields only (`dialect.fields` sorted the others out before), types only (the rules are `core.sampling`'s);
absent means "the default applies". Answers have OpenAI's shapes, with vLLM's additions (`stop_reason`, `prompt_logprobs`).
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

# ----------------------------------------------------------------------------------------------------------------------- requests


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    # Present in what SDKs send back of an earlier answer; there is nothing in them while tools and audio are not served.
    refusal: None = None
    audio: None = None
    tool_calls: list[Any] | None = None
    function_call: None = None
    reasoning_content: None = None
    annotations: list[Any] | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """Fields both generating endpoints share."""

    model: str
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


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    logprobs: int | None = None


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


# ------------------------------------------------------------------------------------------------------------------------ answers


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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


class AssistantMessage(Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None


class ChatCompletion(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """Also the chunk of a stream: OpenAI gives both the same shape."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    status: str


class ModelList(Struct):
    object: str
    data: list[ModelCard]


class TokenizeReply(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(Struct):
    prompt: str


class ReplicaState(Struct):
    model: str
    replica: str
    ok: bool
    reason: str


class ProbeReply(Struct):
    """Body of /health, /live and /ready: the verdict and why."""

    ok: bool
    replicas: list[ReplicaState]
    reason: str = ""


class VersionReply(Struct):
    version: str


class LoadReply(Struct):
    """vLLM's /load: requests in this server now."""

    server_load: int
