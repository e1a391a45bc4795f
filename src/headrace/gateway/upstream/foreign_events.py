"""Server-sent events of an OpenAI-compatible server -> output events. Its bytes are not trusted: they are bounded and typed, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Protocol

import aiohttp
import msgspec
from msgspec import Meta, Struct

from headrace.core.finish import FinishReason
from headrace.core.plan import TokenLogprobs
from headrace.gateway.upstream.foreign_numbers import CallNumbers, NamedTexts
from headrace.gateway.upstream.output_events import OutputEvent, TokenUsage, ToolCall
from headrace.text.logprobs import DecodedLogprobs

PIECE_BYTES = 64 << 10
"""Most bytes read and decoded at once: a few milliseconds of work."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Left out at an event stream's beginning, as its standard says."""

MAX_LINE_BYTES = 1 << 20
MAX_ANSWER_BYTES = 64 << 20
MAX_ERROR_BYTES = 64 << 10
"""Most bytes read of an error's body. Only its code is used."""

END_OF_STREAM_S = 5.0
"""Seconds a server may take for usage and [DONE] together after every sequence has ended."""

END_OF_BODY_S = 0.05
"""Seconds a server may take for the end of the body after [DONE]. Then the connection can be used again: another one would cost the next
request its handshakes."""

COMPLETE = ("stop", "eos", "eos_token", "stop_sequence", "tool_calls", "function_call")
"""Finish reasons that mean stop. Beside them `length` and `content_filter` are known; any other one is a failure."""

CALLED = ("tool_calls", "function_call")
"""With these finish reasons a server says that its calls are complete, also where a stop string or a stop token ended the output."""

CONTEXT_OVERFLOW = ("maximum context length", "maximum model length", "longer than the model's context length")
"""Words in the messages of vLLM and SGLang, which have no code of their own for it, that say that a prompt is too long."""

LLAMA_CPP_OVERFLOW = "exceed_context_size_error"
"""The type of llama.cpp's error for a prompt that is too long."""

MAX_NAMES_BYTES = 128 << 10
"""Most memory of one table of token names, about 600 of them; then a new table begins, so that a long stream does not grow it."""

Count = Annotated[int, Meta(ge=0, le=2**53)]


class EventSink(Protocol):
    """Takes an answer's events as they come."""

    @property
    def has_room(self) -> bool:
        """Whether more may be given now."""
        ...

    async def wait_for_room(self) -> None: ...

    def put(self, events: list[OutputEvent]) -> None: ...


class BrokenStream(Exception):
    """The server's bytes are not a complete answer. The message says what was wrong and never quotes them.

    code         the HTTP status that an error event names: vLLM and SGLang refuse some requests only so, behind a status of 200
    is_overflow  an error event says that the prompt is too long
    """

    def __init__(self, message: str, *, code: int | None = None, is_overflow: bool = False) -> None:
        super().__init__(message)
        self.code, self.is_overflow = code, is_overflow


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(Struct):
    index: Count = 0
    id: str | None = None
    function: _Function | None = None


class _Top(Struct):
    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]] | None = None


class _Logprob(_Top):
    top_logprobs: list[_Top] = []


class _Logprobs(Struct):
    content: list[_Logprob] | None = None


class _Delta(Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(Struct):
    index: Count = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class _Details(Struct):
    cached_tokens: Count | None = None
    reasoning_tokens: Count | None = None


class _Usage(Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()
    object: str | None = None


class _ErrorObject(Struct):
    code: str | int | None = None
    type: str | None = None
    message: str | None = None


class _ErrorBody(_ErrorObject):
    """OpenAI's form, or vLLM's older one without `error` around it."""

    error: _ErrorObject | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_error = msgspec.json.Decoder(_ErrorBody).decode


class EventReader:
    """One answer.

    usage  the server's counts, once it has sent them; before that, output tokens as received, and 0 for the prompt
    """

    def __init__(self, num_sequences: int) -> None:
        self._is_running = [True] * num_sequences
        self._num_running = num_sequences
        self._num_chars = [0] * num_sequences
        self._call_numbers: dict[int, CallNumbers] = {}
        self._names = NamedTexts()
        self.usage = TokenUsage(0, 0, 0)
        self._is_counted = False
        self._has_begun = False
        self._has_events = False
        self._deadline_at: float | None = None

    async def read(
        self,
        response: aiohttp.ClientResponse,
        sink: EventSink,
        *,
        deadline: asyncio.Timeout,
        inter_chunk_s: float,
        on_begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Give `sink` the answer's events as they come.

        deadline       of the first event; moved with each event, to which comments and empty events do not belong
        inter_chunk_s  seconds between two events, without the time that `sink` takes
        on_begun       called before the first event is given

        Raises BrokenStream for anything that is no complete answer, and what reading raises.
        """
        kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "text/event-stream" or response.headers.get("content-encoding", "identity") != "identity":
            raise BrokenStream("it is no event stream")
        buffer, num_bytes, now = bytearray(), 0, asyncio.get_running_loop().time
        while piece := await (response.content.read(PIECE_BYTES) if self._num_running else self._last_piece(response)):
            num_bytes += len(piece)
            if num_bytes > MAX_ANSWER_BYTES:
                raise BrokenStream(f"it is longer than {MAX_ANSWER_BYTES} bytes")
            buffer += piece
            if b"\n" not in piece and len(buffer) <= MAX_LINE_BYTES:
                continue  # so that a line in many pieces is looked through once
            events: list[OutputEvent] = []
            try:
                is_done = self._take(buffer, events)
            finally:  # what came before a broken part counts
                if events:
                    if not self._has_events:
                        self._has_events = True
                        on_begun()
                    sink.put(events)
            if events and not sink.has_room:
                deadline.reschedule(None)
                await sink.wait_for_room()
            if events or not self._num_running:
                deadline.reschedule(now() + inter_chunk_s if self._num_running else None)
            if is_done:
                await _read_end(response)
                break
        if self._num_running:
            raise BrokenStream("it ended before it was complete")

    async def _last_piece(self, response: aiohttp.ClientResponse) -> bytes:
        """The next bytes after the end of every sequence; empty at the end, or when the server is silent for too long."""
        now = asyncio.get_running_loop().time()
        if self._deadline_at is None:
            self._deadline_at = now + END_OF_STREAM_S
        if now >= self._deadline_at:
            return b""  # bytes that are there already would be read without a look at the clock
        try:
            async with asyncio.timeout_at(self._deadline_at):
                return await response.content.read(PIECE_BYTES)
        except TimeoutError:
            return b""

    def _take(self, buffer: bytearray, events: list[OutputEvent]) -> bool:
        """Add the events of the complete lines in `buffer`, which keeps the rest. True when [DONE] was among them.

        Raises BrokenStream, for a line without an end too.
        """
        complete, _, rest = buffer.rpartition(b"\n")
        buffer[:] = rest
        for line in complete.split(b"\n"):
            if not self._has_begun:
                self._has_begun, line = True, line.removeprefix(BYTE_ORDER_MARK)
            if not line.startswith(b"data:"):
                continue  # comments, and fields of other users of event streams
            data = bytes(line[5:]).strip()
            if data == b"[DONE]":
                return True
            if data:
                self._read_chunk(data, events)
        if len(buffer) > MAX_LINE_BYTES:
            raise BrokenStream(f"a line is longer than {MAX_LINE_BYTES} bytes")
        return False

    def _read_chunk(self, data: bytes, events: list[OutputEvent]) -> None:
        try:
            chunk = _decode_chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise BrokenStream("an event is no chunk of an answer") from None
        if bytes(chunk.error) not in (b"", b"null") or chunk.object == "error":
            raise sent_error(data)
        for choice in chunk.choices or ():
            if choice.index >= len(self._is_running):
                raise BrokenStream("a choice was not asked for")
            if self._is_running[choice.index] and (event := self._event(choice)) is not None:
                events.append(event)
        if chunk.usage is not None and chunk.usage.prompt_tokens is not None:  # after the choices, which it counts already
            self._is_counted = True
            self.usage = _usage(chunk.usage)

    def _event(self, choice: _Choice) -> OutputEvent | None:
        """The event of one choice. None for a choice without content, such as the one that names the role before the first token."""
        delta = choice.delta or _Delta()
        text = delta.content or delta.refusal or choice.text or ""
        reasoning = delta.reasoning_content or delta.reasoning or ""
        calls: Sequence[ToolCall] = self._tool_calls(choice.index, delta.tool_calls) if delta.tool_calls else ()
        logprobs = (choice.logprobs and choice.logprobs.content) or []
        num_tokens = len(logprobs) or (1 if text or reasoning or calls else 0)
        decoded = self._decoded_logprobs(choice.index, logprobs) if logprobs else ()
        finish, stop_reason = _finish(choice)
        if num_tokens == 0 and finish is None:
            return None
        if not self._is_counted:
            self.usage = TokenUsage(0, self.usage.completion_tokens + num_tokens, 0)
        if finish is not None:
            self._is_running[choice.index] = False
            self._num_running -= 1
        return OutputEvent(
            index=choice.index,
            text=text,
            num_tokens=num_tokens,
            logprobs=decoded,
            finish=finish,
            stop_reason=stop_reason,
            reasoning=reasoning,
            tool_calls=calls,
            is_call_cut=stop_reason is not None and choice.finish_reason not in CALLED,
        )

    def _tool_calls(self, index: int, calls: list[_ToolCall]) -> list[ToolCall]:
        numbers = self._call_numbers.setdefault(index, CallNumbers())
        return [_tool_call(call, numbers) for call in calls]

    def _decoded_logprobs(self, index: int, logprobs: list[_Logprob]) -> tuple[DecodedLogprobs, ...]:
        if self._names.num_bytes > MAX_NAMES_BYTES:
            self._names = NamedTexts()
        found, known_bytes = DecodedLogprobs(self._names), self._names.num_bytes
        for entry in logprobs:
            token_id, *top_ids = [self._names.number(each.token, _raw(each)) for each in (entry, *entry.top_logprobs)]
            top_logprobs = tuple([each.logprob for each in entry.top_logprobs])
            found.columns.append(TokenLogprobs(token_id, entry.logprob, 0, tuple(top_ids), top_logprobs))
            found.text_offsets.append(self._num_chars[index])
            found.visible.append(True)
            self._num_chars[index] += len(entry.token)
        return (replace(found, texts_bytes=self._names.num_bytes - known_bytes),)


def is_context_overflow(body: bytes) -> bool:
    """Whether an error's body says that the prompt is too long. Its message is compared and not shown."""
    return sent_error(body).is_overflow


def sent_error(body: bytes) -> BrokenStream:
    """What an error's JSON says, as far as it is in a known form."""
    message = "it ended with an error"
    try:
        decoded = _decode_error(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BrokenStream(message)
    error = decoded.error or decoded
    is_known = error.code == "context_length_exceeded" or error.type == LLAMA_CPP_OVERFLOW
    is_overflow = is_known or any(words in (error.message or "") for words in CONTEXT_OVERFLOW)
    return BrokenStream(message, code=error.code if isinstance(error.code, int) else None, is_overflow=is_overflow)


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """Wait for the end of the body for a moment. Whatever comes instead, the answer is complete."""
    if response.content.is_eof():
        return
    with suppress(aiohttp.ClientError, OSError):  # TimeoutError is an OSError
        async with asyncio.timeout(END_OF_BODY_S):
            await response.content.read(1)


def _usage(counts: _Usage) -> TokenUsage:
    cached = (counts.prompt_tokens_details or _Details()).cached_tokens or 0
    reasoning = (counts.completion_tokens_details or _Details()).reasoning_tokens or 0
    return TokenUsage(counts.prompt_tokens or 0, counts.completion_tokens or 0, cached, reasoning)


def _tool_call(call: _ToolCall, numbers: CallNumbers) -> ToolCall:
    function = call.function or _Function()
    return ToolCall(numbers.number(call.index, call.id, function.name), call.id, function.name, function.arguments or "")


def _raw(entry: _Top) -> bytes:
    return bytes(entry.bytes) if entry.bytes is not None else entry.token.encode("utf-8", "surrogatepass")


def _finish(choice: _Choice) -> tuple[FinishReason | None, int | str | None]:
    """Raises BrokenStream for a word that is no end of an answer (abort, error, cancelled, ...): its text may be cut off."""
    match choice.finish_reason:
        case None | "":  # some servers have the empty string before the end
            return None, None
        case "length":
            return FinishReason.LENGTH, None
        case "content_filter":
            return FinishReason.STOP, "content_filter"
        case reason if reason in COMPLETE:
            return FinishReason.STOP, choice.stop_reason
        case _:
            raise BrokenStream("a sequence ended for a reason that is no end of an answer")
