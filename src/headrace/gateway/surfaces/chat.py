"""Implements POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from headrace.core.errors import InvalidRequest
from headrace.gateway.access.principal import Principal
from headrace.gateway.generation.call import Ready
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.sessions.history import ContextFitting
from headrace.gateway.surfaces.dialect import parse, schemas
from headrace.gateway.surfaces.dialect.answers import ChoiceOutput, OpenAIAnswer
from headrace.gateway.surfaces.dialect.conversation import ConversationFields, check_conversation
from headrace.gateway.surfaces.dialect.field_table import CHAT
from headrace.gateway.surfaces.dialect.logprobs import chat_logprobs, prompt_logprobs
from headrace.gateway.surfaces.dialect.reasoning import joined_details
from headrace.gateway.surfaces.endpoint import BodyParser, GeneratingSurface
from headrace.gateway.upstream.generation_request import PASSED_IN_CHAT, REASONING_PASSED
from headrace.gateway.upstream.seam import OutputEvent, ToolCall, joined_values

_encode = msgspec.json.encode
_NUMBER = attrgetter("number")


class ChatRequest(ConversationFields, kw_only=True):
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    context_fitting: str | None = None


ParsedChat = parse.Parsed[ChatRequest]

FOREIGN = ("max_completion_tokens", *PASSED_IN_CHAT)


class FunctionCall(Struct, omit_defaults=True, kw_only=True):
    """arguments: a string in every piece of a stream, because clients append it to the pieces before"""

    name: str | None = None
    arguments: str


class ToolCallPart(Struct, omit_defaults=True):
    """A tool call, or in a stream a piece of one; only pieces have an `index`."""

    function: FunctionCall
    index: int | None = None
    id: str | None = None
    type: str | None = None
    extra_content: Any = None
    provider_specific_fields: Any = None


class AssistantMessage(Struct):
    """The message of a choice. content is null where the output is tool calls alone."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET
    reasoning_details: Any = UNSET
    thinking_blocks: Any = UNSET
    extra_content: Any = UNSET
    provider_specific_fields: Any = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: schemas.ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None


class ChatCompletion(schemas.AnswerBody):
    choices: list[ChatChoice]
    usage: schemas.CompletionUsage
    system_fingerprint: str | None = None
    prompt_logprobs: schemas.PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    reasoning_details: Any = None
    thinking_blocks: Any = None
    extra_content: Any = None
    provider_specific_fields: Any = None


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: schemas.ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(schemas.AnswerBody):
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None = None
    usage: schemas.CompletionUsage | UnsetType | None = UNSET


def parse_chat(body: dict[str, object]) -> tuple[ParsedChat, list[str]]:
    ignored: dict[str, None] = {}
    kept = parse.honoured_fields(body, CHAT, ignored)
    check_conversation(kept, ignored)
    if (metadata := kept.get("metadata")) is not None:
        parse.check_inert("metadata", metadata)
        if set(metadata) != {"session_id"}:  # type: ignore[call-overload]  # it is checked to be an object
            ignored["metadata"] = None
    request = parse.convert(kept, ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs", "logprobs = true beside it", request.top_logprobs)
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise InvalidRequest(
                "max_completion_tokens", f"the same value as max_tokens ({request.max_tokens})", request.max_completion_tokens
            )
        request.max_tokens = request.max_completion_tokens
    if request.context_fitting is not None and request.context_fitting not in (*ContextFitting,):
        raise InvalidRequest("context_fitting", f"one of {', '.join(ContextFitting)}", request.context_fitting)
    return parse.checked(request, body), list(ignored)


def _names(parsed: ParsedChat) -> dict[str, str]:
    request, grammar = parsed
    names = {"prompt": "messages"}
    if grammar is not None:
        names["grammar"] = grammar.field
    elif request.tools:
        names["grammar"] = "tools"
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if request.top_logprobs:
        names["logprobs"] = "top_logprobs"  # a chat's own logprobs is true or false
    return names


def _common(parsed: ParsedChat, principal: Principal) -> ParsedRequest:
    request, _ = parsed
    shared = parse.shared_request(parsed, principal, request.conversation())
    num_top = (request.top_logprobs or 0) if request.logprobs else None
    return msgspec.structs.replace(
        shared,
        sampling={**shared.sampling, "max_tokens": request.max_tokens, "logprobs": num_top},
        fitting=_fitting(request, principal),
        metadata=request.metadata,
        foreign_fields={**shared.foreign_fields, **{name: value for name in FOREIGN if (value := getattr(request, name)) is not None}},
    )


def _fitting(request: ChatRequest, principal: Principal) -> ContextFitting:
    """An option that this version does not know means to refuse."""
    wanted = request.context_fitting or principal.options.get("context_fitting")
    return next((fitting for fitting in ContextFitting if fitting == wanted), ContextFitting.REFUSE)


class ChatAnswer(OpenAIAnswer[ChatRequest]):
    ID_PREFIX, OBJECT, CHUNK_OBJECT = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    TEXT_CHOICE = b'{"index":%d,"delta":{"content":%s},"logprobs":null,"finish_reason":null}'

    def __init__(self, parsed: ParsedChat, ready: Ready) -> None:
        super().__init__(parsed, ready)
        self._shows_reasoning = self._request.shows_reasoning

    def _shown(self, events: Sequence[OutputEvent]) -> Sequence[OutputEvent]:
        return events if self._shows_reasoning else [_without_reasoning(event) for event in events]

    def encode_events(self, events: Sequence[OutputEvent]) -> Iterator[bytes]:
        for event in self._shown(events):
            if not self._is_opened[event.index]:
                self._is_opened[event.index] = True
                self._count(event.index, 0)
                opening = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                yield from self._chunk(event.index, 0, (opening % event.index,))
            if self._counts is not None:
                self._count(event.index, event.num_tokens)
            has_parts = bool(event.reasoning or event.tool_calls or event.passed)
            if event.tool_calls and event.finish is not None:
                yield from self._calls_and_end(event)
            elif has_parts or event.finish is not None or (event.logprobs and self._request.logprobs):
                choice = self._choice(event, self._delta_of_parts(event) if has_parts else None)
                yield from self._chunk(event.index, event.offset, choice)
            elif event.text:
                yield self._text_chunk(event.index, event.offset, event.text)

    def _calls_and_end(self, event: OutputEvent) -> Iterator[bytes]:
        """Two chunks, as OpenAI's server sends: its client makes no `arguments.done` of a call that comes in the chunk with the end. Both
        have their numbers before the first is made, so that a stream that breaks between them is kept with both.
        """
        calls = self._choice(event._replace(finish=None), self._delta_of_parts(event))
        end = self._choice(event._replace(text="", logprobs=()), None)
        return chain(*[self._chunk(event.index, event.offset, choice) for choice in (calls, end)])

    def _delta_of_parts(self, event: OutputEvent) -> bytes:
        """The pieces of one call are joined, since some clients read a delta's list as a dictionary by index."""
        if event.tool_calls:
            self._outputs[event.index].has_tool_calls = True
        calls = [ToolCall.joined(list(pieces)) for _, pieces in groupby(sorted(event.tool_calls, key=_NUMBER), key=_NUMBER)]
        parts = [
            ToolCallPart(_function(call), call.number, call.call_id, "function" if call.call_id else None, **joined_values(call.passed))
            for call in calls
        ]
        reasoning = event.reasoning or None
        return _encode(
            ChatDelta(content=event.text or None, reasoning_content=reasoning, tool_calls=parts or None, **joined_values(event.passed))
        )

    def _choice(self, event: OutputEvent, delta: bytes | None) -> Iterator[bytes]:
        content = delta or (b'{"content":%s}' % _encode(event.text) if event.text or event.finish is None else b"{}")
        yield b'{"index":%d,"delta":%s,"logprobs":' % (event.index, content)
        has_logprobs = self._request.logprobs and event.logprobs
        yield from chat_logprobs(event.logprobs, self._request.top_logprobs or 0) if has_logprobs else (b"null",)
        yield self._outputs[event.index].finish_part(event)

    def add(self, events: Sequence[OutputEvent]) -> None:
        super().add(self._shown(events))

    def _whole_choice(self, index: int, output: ChoiceOutput) -> Iterator[bytes]:
        yield b'{"index":%d,"message":%b,"logprobs":' % (index, _encode(_message(output)))
        yield from chat_logprobs(output.logprobs, self._request.top_logprobs or 0) if self._request.logprobs else (b"null",)
        yield output.finish_part(output.last)

    def _after_choices(self) -> Iterator[bytes]:
        if self._request.prompt_logprobs is not None:
            yield b',"prompt_logprobs":'
            yield from prompt_logprobs(self._prompts[0], self._prompt_logprobs[0], self._request.prompt_logprobs)


def _message(output: ChoiceOutput) -> AssistantMessage:
    text = "".join(output.texts)
    message = AssistantMessage(role="assistant", content=None if output.tool_calls and not text else text)
    if output.reasoning:
        message.reasoning_content = "".join(output.reasoning)
    if output.tool_calls:
        message.tool_calls = [
            ToolCallPart(_function(call), id=call.call_id, type="function", **joined_values(call.passed)) for call in output.tool_calls
        ]
    for name, value in joined_values(output.passed).items():
        setattr(message, name, joined_details(value) if name == "reasoning_details" else value)
    return message


def _without_reasoning(event: OutputEvent) -> OutputEvent:
    if not (event.reasoning or event.passed):
        return event
    return event._replace(reasoning="", passed=[field for field in event.passed if field.name not in REASONING_PASSED])


def _function(call: ToolCall) -> FunctionCall:
    return FunctionCall(name=call.name, arguments=call.arguments)


CHAT_BODY = BodyParser(parse_chat, ParsedChat)
chat_completions = GeneratingSurface(parser=CHAT_BODY, names=_names, common=_common, encoder=ChatAnswer)
