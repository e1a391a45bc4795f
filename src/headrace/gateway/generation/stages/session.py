"""Handles a request's turn of a session: puts the session's history before its messages, and adds the answer to the session.

The turn is stored before the answer's last bytes are sent. A turn that ends before that stores nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.gateway.cache.replays import retry_key
from headrace.gateway.generation.call import Call, CallNext, Ready
from headrace.gateway.generation.parsed_request import MAX_MESSAGES, ParsedRequest
from headrace.gateway.generation.stages.kept_answers import IDEMPOTENCY
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.sse import last_event
from headrace.gateway.sessions.history import FORM, History, Message, StoredSession, messages_json, prompt_messages
from headrace.gateway.sessions.sessions import HEADER as SESSION_HEADER
from headrace.gateway.sessions.sessions import (
    MAX_SESSION_BYTES,
    METADATA_FIELD,
    RAW_HEADER,
    RENEW_S,
    ReadSession,
    SessionKey,
    Sessions,
    checked_session_id,
)
from headrace.gateway.upstream.generation_request import REASONING_PASSED, Conversation
from headrace.gateway.upstream.seam import OutputEvent, PassedField, ToolCall, joined_values

NOT_KEPT = ("reasoning_content", "reasoning", *REASONING_PASSED)


async def take_turn(call: Call, call_next: CallNext, *, sessions: Sessions) -> Ready:
    """Raises: InvalidRequest, RequestTooLarge; SessionConflict while another request has the session; Unavailable without the store's
    answer.
    """
    exchange, parsed = call.exchange, call.parsed
    if not isinstance(parsed.prompt, Conversation):
        if exchange.header(RAW_HEADER) is not None:
            exchange.ignored.append(SESSION_HEADER)
        return await call_next(call)
    if (session_id := named_session(exchange, parsed)) is None:
        return await call_next(call)
    sessions.check_on(SESSION_HEADER if exchange.has_header(RAW_HEADER) else METADATA_FIELD)
    _check_one_line(parsed, parsed.prompt)
    key = retry_key(exchange.headers, call.principal.tenant_key)
    continued = last_event(exchange)
    turn = SessionTurn(sessions, SessionKey(call.principal.tenant_key, session_id), key)
    call.ending.ends.callback(turn.lease.free)
    await turn.claim("" if continued is None else continued.answer_id)
    history = turn.conversation(parsed.prompt.messages)
    call.charges.prompts.add(turn.check_size(history))
    whole = parsed.with_prompt(replace(parsed.prompt, messages=prompt_messages(history)))
    ready = await call_next(call.changed(parsed=whole, history=history, session=turn.key.entry))
    return ready if ready.cache_tier == IDEMPOTENCY else turn.recording(ready)


def named_session(exchange: Exchange, parsed: ParsedRequest) -> str | None:
    """None: the request is of no session. Raises InvalidRequest."""
    if not isinstance(parsed.prompt, Conversation):
        return None
    given = [(SESSION_HEADER, value.decode("latin-1")) for name, value in exchange.headers if name == RAW_HEADER]
    if "session_id" in parsed.metadata:
        given.append((METADATA_FIELD, parsed.metadata["session_id"]))
    names = {checked_session_id(field, value) for field, value in given}
    if len(names) > 1:
        raise InvalidRequest(given[-1][0], f"the same session as {given[0][0]}", None)
    return names.pop() if names else None


def _check_one_line(parsed: ParsedRequest, prompt: Conversation) -> None:
    """A session has a single line of messages. Raises InvalidRequest."""
    if (n := parsed.sampling.get("n", 1)) != 1:
        raise InvalidRequest("n", "1 in a session", n)
    if prompt.continue_final_message:
        raise InvalidRequest("continue_final_message", "false in a session", True)


class SessionTurn:
    """history: messages before this turn; num_new: number of the request's messages"""

    def __init__(self, sessions: Sessions, key: SessionKey, retry_key: str) -> None:
        self._sessions, self.key, self._retry_key = sessions, key, retry_key
        self.lease = sessions.lease(key)
        self._found = ReadSession()
        self.history = History()
        self.num_new = 0

    async def claim(self, continued_id: str) -> None:
        """The session's last turn is replaced when the request repeats that turn: it continues the turn's answer, or has its
        Idempotency-Key.

        Raises SessionConflict while another request has the session, or Unavailable.
        """
        self._found = await self._sessions.claimed(self.key, self.lease)
        self.lease.begin_renewing(RENEW_S)
        stored, messages = self._found.stored, self._found.messages
        if stored is None:
            return
        if continued_id == stored.answer_id or (self._retry_key and self._retry_key == stored.retry_key):
            messages = messages[: stored.num_before]
        self.history = History(messages, stored.summary)

    def conversation(self, new: Sequence[Message]) -> History:
        """Raises InvalidRequest beyond MAX_MESSAGES messages."""
        self.num_new = len(new)
        made = self.history.with_messages(new)
        if len(made.messages) > MAX_MESSAGES:
            remedy = "Begin another session, or delete this one."
            raise InvalidRequest("messages", f"at most {MAX_MESSAGES} messages with those of the session", len(made.messages), remedy)
        return made

    def check_size(self, history: History) -> int:
        """Raises RequestTooLarge beyond MAX_SESSION_BYTES."""
        num_bytes = len(messages_json(history.messages))
        if num_bytes > MAX_SESSION_BYTES:
            raise self._sessions.too_large()
        return num_bytes

    def recording(self, ready: Ready) -> Ready:
        """The turn is stored before the answer's last bytes are sent."""
        answer = TurnRecorder()
        keep = partial(self._keep, answer)
        return ready.changed(recorders=(*ready.recorders, answer), before_end=(*ready.before_end, keep))

    async def _keep(self, answer: TurnRecorder, ready: Ready) -> None:
        """Raises SessionConflict, Unavailable or RequestTooLarge."""
        call = ready.call
        history = call.history if ready.fitted is None else ready.fitted.history
        messages = [{name: value for name, value in message.items() if name not in NOT_KEPT} for message in history.messages]
        now, stored = int(self._sessions.unix_time()), self._found.stored
        turn = StoredSession(
            form=FORM,
            created=now if stored is None else stored.created,
            updated=now,
            answer_id=call.answer_id,
            num_before=max(0, len(history.messages) - self.num_new),
            summary=history.summary,
            packed=b"",
            retry_key=self._retry_key,
        )
        await self._sessions.keep(self.key, self._found, turn, [*messages, answer.message()])
        self.lease.free()  # the client's next request may come with the last byte of this answer


class TurnRecorder:
    """An `EventRecorder` that keeps the text and the tool calls of an answer's only sequence."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._pieces: dict[int, list[ToolCall]] = {}
        self._passed: list[PassedField] = []

    def add(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            if event.text:
                self._texts.append(event.text)
            self._passed += [field for field in event.passed if field.name not in NOT_KEPT]
            for piece in event.tool_calls:
                self._pieces.setdefault(piece.number, []).append(piece)

    def message(self) -> Message:
        text, calls = "".join(self._texts), [ToolCall.joined(pieces) for pieces in self._pieces.values()]
        made: dict[str, Any] = {"role": "assistant", "content": text} | joined_values(self._passed)
        if calls:
            made["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                | joined_values(call.passed)
                for call in calls
            ]
        return made
