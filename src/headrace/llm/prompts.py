"""Parses the inputs of `LLM.generate` and `LLM.chat`, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from headrace.core.errors import InvalidRequest
from headrace.core.sampling import SamplingParams
from headrace.text.messages import Message
from headrace.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """text             None when token ids were given
    begun  the part of the answer in a conversation whose last message is continued
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    is_conversation: bool = False
    begun: str = ""


def parse_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer) -> list[ParsedPrompt]:
    """Raises InvalidRequest.

    As in vLLM, control tokens in a text are read as such: texts are trusted here.
    """
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_parse(prompts, "prompts", tokenizer)]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest("prompts", "a text, token ids, an object with one of them, or a list of these", type(prompts).__name__)
    return [_parse(prompt, f"prompts[{number}]", tokenizer) for number, prompt in enumerate(prompts)]


def parse_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Raises InvalidRequest."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRequest("messages", "a list of messages or a list of such lists", type(messages).__name__)
    if _is_conversation(messages):
        return [messages]
    return [_conversation(item, f"messages[{number}]") for number, item in enumerate(messages)]


def parse_params(given: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams) -> list[SamplingParams]:
    """Raises InvalidRequest."""
    if given is None:
        given = default
    params = [given] * count if isinstance(given, SamplingParams) else list(given)
    if len(params) != count:
        raise InvalidRequest("sampling_params", f"one for all or one for each of the {count} prompts", len(params))
    for each in params:
        if not isinstance(each, SamplingParams):
            raise InvalidRequest("sampling_params", "headrace.SamplingParams", type(each).__name__)
        each.checked()
    return params


def _parse(prompt: object, field: str, tokenizer: Tokenizer) -> ParsedPrompt:
    if isinstance(prompt, Mapping):
        return _parse_object(prompt, field, tokenizer)
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=True, allow_control_tokens=True, field=field)
        return ParsedPrompt(tuple(ids), prompt)
    if isinstance(prompt, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        return ParsedPrompt(tuple(prompt))
    raise InvalidRequest(field, "a text, token ids, or an object with one of them", prompt)


def _parse_object(prompt: Mapping[str, object], field: str, tokenizer: Tokenizer) -> ParsedPrompt:
    unknown = sorted(str(key) for key in prompt if key not in ("prompt", "prompt_token_ids"))
    if unknown:
        raise InvalidRequest(f"{field}.{unknown[0]}", "a known key", unknown[0], 'Known: "prompt", "prompt_token_ids".')
    if len(prompt) != 1:
        raise InvalidRequest(field, 'exactly one of "prompt" and "prompt_token_ids"', sorted(prompt))
    key, value = next(iter(prompt.items()))
    if isinstance(value, str) == (key == "prompt"):
        return _parse(value, f"{field}.{key}", tokenizer)
    raise InvalidRequest(f"{field}.{key}", "a text" if key == "prompt" else "a list of token ids", value)


def _is_ids(prompts: object) -> TypeGuard[Sequence[int]]:
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)


def _is_conversation(messages: Sequence[object]) -> TypeGuard[Sequence[Message]]:
    return not messages or isinstance(messages[0], Mapping)


def _conversation(item: object, field: str) -> Sequence[Message]:
    if not isinstance(item, Sequence) or isinstance(item, str) or not all(isinstance(message, Mapping) for message in item):
        raise InvalidRequest(field, "a list of messages", item)
    return item
