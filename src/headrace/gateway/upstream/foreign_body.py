"""The JSON body sent to an OpenAI-compatible server: what the client gave, without fields that have their default value.

Also the most tokens that its prompt can have where the tokenizer is not known here, from its bytes alone. A tokenizer that reads every text
makes at most one token of a byte; usual text has about four bytes to a token. Not so where a normal form makes one character into several
(NFKC), which tokenizers of large models rarely have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.core.errors import InvalidRequest
from headrace.core.sampling import SamplingParams
from headrace.core.tools import CallMode
from headrace.gateway.upstream.generation_request import Conversation, GenerationRequest, PlainPrompts

_NAME_TO_DEFAULT = {field.name: getattr(SamplingParams(max_tokens=None), field.name) for field in dataclasses.fields(SamplingParams)}
_ALWAYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sent whenever the client names them: a model may have defaults of its own."""


def foreign_body(request: GenerationRequest, params: SamplingParams) -> dict[str, Any]:
    """The body but for its model. Raises InvalidRequest naming what does not carry over."""
    _check_logprobs(request, params)
    begin: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    return begin | _prompt_fields(request.prompt) | _sampling_fields(request) | _grammar_field(request)


def _grammar_field(request: GenerationRequest) -> dict[str, Any]:
    """The client's own field for what the output must match, as it was: a server that does not know it says so."""
    wanted = request.grammar
    return {} if wanted is None else {wanted.name: msgspec.Raw(wanted.value_json.encode())}


def _prompt_fields(prompt: Conversation | PlainPrompts) -> dict[str, Any]:
    """The prompt's fields. Defaults are left out, so that a server need not know these fields."""
    if isinstance(prompt, Conversation):
        fields: dict[str, Any] = {"messages": prompt.messages}
        if not prompt.add_generation_prompt:
            fields["add_generation_prompt"] = False
        if prompt.continue_final_message:
            fields["continue_final_message"] = True
        if prompt.template_kwargs:
            fields["chat_template_kwargs"] = dict(prompt.template_kwargs)
        return fields | _tool_fields(prompt) | dict(prompt.reasoning_fields)
    if prompt.needs_text and not all(isinstance(given, str) for given in prompt.prompts):
        raise InvalidRequest("echo", "prompts of text", None, "The server behind this model keeps its tokenizer: ids cannot be shown.")
    prompts = list(prompt.prompts)
    return {"prompt": prompts[0] if len(prompts) == 1 else prompts} | ({} if prompt.add_special_tokens else {"add_special_tokens": False})


def _tool_fields(prompt: Conversation) -> dict[str, Any]:
    """The functions and what binds the model to call them, as OpenAI writes both."""
    if not prompt.tools:
        return {}
    fields: dict[str, Any] = {"tools": [tool.requested() for tool in prompt.tools]}
    choice = prompt.tool_choice
    if choice.name:
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    if choice.allowed:
        named = [{"type": "function", "function": {"name": tool.name}} for tool in prompt.tools if choice.allows(tool.name)]
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": str(choice.mode), "tools": named}}
    elif choice.mode is not CallMode.AUTO:
        fields["tool_choice"] = str(choice.mode)
    return fields if choice.is_parallel else fields | {"parallel_tool_calls": False}


def _sampling_fields(request: GenerationRequest) -> dict[str, Any]:
    """The sampling parameters the client gave, without those equal to OpenAI's defaults, for which the server's own defaults hold."""
    fields = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in request.sampling.items()
        if value != _NAME_TO_DEFAULT[name] or name in _ALWAYS
    }
    num_top = fields.pop("logprobs", None)
    if num_top is not None:
        fields |= {"logprobs": True, "top_logprobs": num_top}
    return fields


def _check_logprobs(request: GenerationRequest, params: SamplingParams) -> None:
    """Raise InvalidRequest for log-probabilities other than a chat's output: no other form is the same on all servers."""
    remedy = "The server behind this model gives them for a chat's answer only."
    if params.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", "absent or null", params.prompt_logprobs, remedy)
    if params.logprobs is not None and not isinstance(request.prompt, Conversation):
        raise InvalidRequest("logprobs", "absent or null", params.logprobs, remedy)


TEMPLATE_TOKENS = 64
"""Tokens that a chat template may add to a conversation, beside its messages: a system prompt of the model's own, a date."""

TOOL_TEMPLATE_TOKENS = 512
"""Tokens that it may add where functions are shown: how to call them."""


def most_prompt_tokens(prompt: Conversation | PlainPrompts, max_model_len: int | None) -> int:
    """The bound of all prompts together. max_model_len: a longer prompt is refused by the server; None: it has not said"""
    bounds = [_of_chat(prompt)] if isinstance(prompt, Conversation) else [_of_plain(given) for given in prompt.prompts]
    return sum(bound if max_model_len is None else min(bound, max_model_len) for bound in bounds)


def _of_chat(chat: Conversation) -> int:
    """JSON has more bytes around a message than a template has tokens around it."""
    num_bytes = len(msgspec.json.encode(chat.messages)) + TEMPLATE_TOKENS
    if not chat.shown_tools:
        return num_bytes
    return num_bytes + TOOL_TEMPLATE_TOKENS + len(msgspec.json.encode([tool.requested() for tool in chat.shown_tools]))


def _of_plain(prompt: str | Sequence[int]) -> int:
    """One token more may mark the beginning of a text, and one its end."""
    if isinstance(prompt, str):
        return 2 + (len(prompt) if prompt.isascii() else len(prompt.encode("utf-8", "surrogatepass")))
    return len(prompt)
