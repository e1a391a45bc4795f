"""POST /v1/chat/completions: the wire types of a conversation, how a body is parsed, and how events become its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from headrace.core.errors import InvalidRequest
from headrace.core.plan import wide_columns
from headrace.gateway.access.principal import Principal
from headrace.gateway.cache.control import CacheControl
from headrace.gateway.generation.generation import Generation
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.http.config import Limits
from headrace.gateway.sessions.history import History
from headrace.gateway.sessions.names import METADATA_FIELD, checked_session_id
from headrace.gateway.sessions.window import ContextFitting, prompt_messages
from headrace.gateway.surfaces.dialect import schemas
from headrace.gateway.surfaces.dialect.answers import (
    AnswerHead,
    ChoiceOutput,
    Chunks,
    around_choices,
    finish_part,
    outputs_of,
    usage_body,
    whole_finish_part,
)
from headrace.gateway.surfaces.dialect.field_rule import Surface
from headrace.gateway.surfaces.dialect.logprobs import chat_logprobs, prompt_logprobs
from headrace.gateway.surfaces.dialect.parse import (
    check_shared,
    convert,
    given_params,
    lowered_priority,
    surface_fields,
    template_messages,
)
from headrace.gateway.surfaces.dialect.reasoning import ReasoningFields
from headrace.gateway.surfaces.dialect.schemas import ChatLogprobs, Message, PromptLogprobs
from headrace.gateway.surfaces.dialect.structured import requested_grammar
from headrace.gateway.surfaces.dialect.tools import ChosenTools, ToolDefinition, function_tools, tool_choice
from headrace.gateway.surfaces.generating import GeneratingSurface
from headrace.gateway.upstream.generation_request import Conversation, RequestedGrammar
from headrace.gateway.upstream.seam import OutputEvent, Prepared, TokenUsage, ToolCall

_encode = msgspec.json.encode
_NUMBER = attrgetter("number")


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
    request, grammar = parsed
    history = History(template_messages(request.messages))
    num_top = (request.top_logprobs or 0) if request.logprobs else None
    tools = function_tools(request.tools)
    return ParsedRequest(
        model=request.model,
        prompt=Conversation(
            messages=prompt_messages(history),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.chat_template_kwargs,
            tools=tools,
            tool_choice=tool_choice(request.tool_choice, tools, is_parallel=request.parallel_tool_calls),
            switches=request.switches(),
            separates_reasoning=request.separates_reasoning,
            reasoning_fields=request.given(),
        ),
        sampling=given_params(request) | {"max_tokens": request.max_tokens, "logprobs": num_top},
        is_streaming=request.stream,
        priority=lowered_priority(request.priority, principal.priority),
        grammar=grammar,
        has_priority=request.priority is not None,
        cache_salt=request.cache_salt,
        history=history,
        fitting=_fitting(request, principal),
        cache=CacheControl.of(request.cache),
        metadata=request.metadata,
    )


def _fitting(request: ChatRequest, principal: Principal) -> ContextFitting:
    """What the request asks for, else the tenant's option; one that this version does not know means to refuse."""
    wanted = request.context_fitting or principal.options.get("context_fitting")
    if wanted is None:
        return ContextFitting.REFUSE
    return next((fitting for fitting in ContextFitting if fitting == wanted), ContextFitting.REFUSE)


class ChatRequest(ReasoningFields, kw_only=True):
    messages: list[Message]
    tools: list[ToolDefinition] = field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    parallel_tool_calls: bool = True
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    context_fitting: str | None = None


ParsedChat = tuple[ChatRequest, RequestedGrammar | None]
"""A chat's body, and what its answer must match."""


class FunctionCall(Struct, omit_defaults=True, kw_only=True):
    """arguments: a string in every piece of a stream, because clients append it to what they have"""

    name: str | None = None
    arguments: str


class ToolCallPart(Struct, omit_defaults=True):
    """A tool call, or in a stream a piece of one; only pieces have an `index`."""

    function: FunctionCall
    index: int | None = None
    id: str | None = None
    type: str | None = None


class AssistantMessage(Struct):
    """The message of a choice. content is null where the output is tool calls alone."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None


class ChatCompletion(schemas.AnswerBody):
    choices: list[ChatChoice]
    usage: schemas.CompletionUsage
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(schemas.AnswerBody):
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None = None
    usage: schemas.CompletionUsage | UnsetType | None = UNSET


def parse_chat(body: dict[str, object], limits: Limits) -> tuple[ParsedChat, list[str]]:
    """The request, what its answer must match, and the fields that change nothing.

    Raises InvalidRequest for the first field that is unknown, refused or of a wrong type.
    """
    ignored: dict[str, None] = {}
    request = convert(surface_fields(body, Surface.CHAT, limits, ignored), ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs", "logprobs = true beside it", request.top_logprobs)
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise InvalidRequest(
                "max_completion_tokens", f"the same value as max_tokens ({request.max_tokens})", request.max_completion_tokens
            )
        request.max_tokens = request.max_completion_tokens
    check_shared(request, limits)
    if request.context_fitting is not None and request.context_fitting not in (*ContextFitting,):
        raise InvalidRequest("context_fitting", f"one of {', '.join(ContextFitting)}", request.context_fitting)
    if "session_id" in request.metadata:
        checked_session_id(METADATA_FIELD, request.metadata["session_id"])
    return (request, requested_grammar(request, body, limits)), list(ignored)


TEXT_CHOICE = b'{"index":%d,"delta":{"content":%s},"logprobs":null,"finish_reason":null}'


class ChatAnswer:
    """A `generation.answer_encoder.AnswerEncoder`."""

    def __init__(self, request: ChatRequest, prepared: Prepared, head: AnswerHead) -> None:
        self._head = head
        self._prepared = prepared
        self._shows_reasoning = request.shows_reasoning
        self._num_top = request.top_logprobs or 0
        self._has_logprobs = request.logprobs
        self._num_prompt_top = request.prompt_logprobs
        self._prompt_logprobs = wide_columns()
        self._outputs = outputs_of(request.n)
        self._is_opened = [False] * request.n
        self._chunks = Chunks(head, "chat.completion.chunk", TEXT_CHOICE, request, prepared.prompts)

    def encode_events(self, events: Sequence[OutputEvent]) -> Iterator[bytes]:
        for event in self._shown(events):
            if not self._is_opened[event.index]:
                self._is_opened[event.index] = True
                self._chunks.count(event.index, 0)
                opening = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                yield self._chunks.chunk(event.index, 0, opening % event.index)
            self._chunks.count(event.index, event.num_tokens)
            has_parts = bool(event.reasoning or event.tool_calls)
            if has_parts or event.finish is not None or (self._has_logprobs and event.logprobs):
                choice = self._choice(event, self._delta_of_parts(event) if has_parts else None)
                yield from self._chunks.around(event.index, event.place, choice)
            elif event.text:
                yield self._chunks.text(event.index, event.place, event.text)

    def _delta_of_parts(self, event: OutputEvent) -> bytes:
        """A delta with the reasoning and the tool calls that were separated from the text, and with the text.

        A call is in it once, whatever the number of its pieces: clients may read a delta's list as a dictionary by index.
        """
        if event.tool_calls:
            self._outputs[event.index].has_tool_calls = True
        calls = [ToolCall.joined(list(pieces)) for _, pieces in groupby(sorted(event.tool_calls, key=_NUMBER), key=_NUMBER)]
        parts = [ToolCallPart(_function(call), call.number, call.call_id, "function" if call.call_id else None) for call in calls]
        return _encode(ChatDelta(content=event.text or None, reasoning_content=event.reasoning or None, tool_calls=parts or None))

    def _choice(self, event: OutputEvent, delta: bytes | None) -> Iterator[bytes]:
        content = delta or (b'{"content":%s}' % _encode(event.text) if event.text or event.finish is None else b"{}")
        yield b'{"index":%d,"delta":%s,"logprobs":' % (event.index, content)
        yield from chat_logprobs(event.logprobs, self._num_top) if self._has_logprobs and event.logprobs else (b"null",)
        yield finish_part(event, is_tool_turn=self._outputs[event.index].has_tool_calls and not event.is_call_cut)

    def encode_end(self, usage: TokenUsage) -> bytes:
        return self._chunks.encode_end(usage)

    def _shown(self, events: Sequence[OutputEvent]) -> Sequence[OutputEvent]:
        """The events without reasoning, where the client does not want it."""
        return events if self._shows_reasoning else [event._replace(reasoning="") if event.reasoning else event for event in events]

    def add(self, events: Sequence[OutputEvent]) -> None:
        for event in self._shown(events):
            self._outputs[event.index].add(event)
            for page in event.prompt_logprobs if event.index == 0 else ():
                self._prompt_logprobs.extend(page)

    def encode_body(self, usage: TokenUsage) -> Iterator[bytes]:
        answer = ChatCompletion(
            id=self._head.id,
            object="chat.completion",
            created=self._head.created,
            model=self._head.model,
            choices=[],
            usage=usage_body(usage, self._head.context),
            system_fingerprint=self._head.fingerprint,
        )
        before, behind = around_choices(answer)
        for index, output in enumerate(self._outputs):
            yield b"," if index else before
            yield from self._whole_choice(index, output)
        if self._num_prompt_top is None:
            yield behind
        else:
            yield behind[:-1] + b',"prompt_logprobs":'
            yield from prompt_logprobs(self._prepared.prompts[0], self._prompt_logprobs, self._num_prompt_top)
            yield b"}"

    def _whole_choice(self, index: int, output: ChoiceOutput) -> Iterator[bytes]:
        yield b'{"index":%d,"message":%b,"logprobs":%b' % (index, _encode(_message(output)), b"" if self._has_logprobs else b"null")
        if self._has_logprobs:
            yield from chat_logprobs(output.logprobs, self._num_top)
        yield whole_finish_part(output)


def _message(output: ChoiceOutput) -> AssistantMessage:
    text = "".join(output.texts)
    message = AssistantMessage(role="assistant", content=None if output.tool_calls and not text else text)
    if output.reasoning:
        message.reasoning_content = "".join(output.reasoning)
    if output.tool_calls:
        message.tool_calls = [ToolCallPart(_function(call), id=call.call_id, type="function") for call in output.tool_calls]
    return message


def _function(call: ToolCall) -> FunctionCall:
    return FunctionCall(name=call.name, arguments=call.arguments)


def _answer(parsed: ParsedChat, prepared: Prepared, generation: Generation) -> ChatAnswer:
    return ChatAnswer(parsed[0], prepared, AnswerHead.of("chatcmpl-", generation))


chat_completions = GeneratingSurface(parse_chat, _names, _common, _answer)
