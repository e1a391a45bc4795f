"""One request's turn of a session: the conversation it makes, and the answer that it adds.

`opened_turn` claims the session. `conversation` puts the history before the request's messages, `recorded` keeps what the model says, and
`keep` stores the turn before the answer's last bytes are sent. A turn that ends without `keep` stores nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.gateway.generation.event_log import HEADER as LAST_EVENT
from headrace.gateway.generation.event_log import NO_EVENT, EventId
from headrace.gateway.generation.run import AnswerEncoder, Generation
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.sessions.history import FORM, History, Message, StoredSession, messages_json
from headrace.gateway.sessions.names import SessionKey
from headrace.gateway.sessions.sessions import ReadSession, Sessions
from headrace.gateway.upstream.seam import OutputEvent, TokenUsage, ToolCall

RENEW_S = 5.0
"""Seconds between two renewals of a claim."""

NOT_KEPT = ("reasoning_content", "reasoning")
"""Fields of a message that no history has."""


@asynccontextmanager
async def opened_turn(sessions: Sessions, exchange: Exchange, session_id: str) -> AsyncIterator[SessionTurn]:
    """The next turn of the session, which no other request has until the block ends. Raises SessionConflict or Unavailable."""
    claim = SessionClaim(sessions, SessionKey(exchange.principal.tenant, session_id))
    continued_id = _continued_id(exchange)
    try:
        found = await sessions.claimed(claim.key, claim.owner)
        renewing = asyncio.create_task(claim.renew())
        try:
            yield SessionTurn(sessions, claim, found, continued_id)
        finally:
            renewing.cancel()
    finally:
        claim.free()


class SessionClaim:
    """What holds a session for one turn, or will. owner: names the turn in the store"""

    def __init__(self, sessions: Sessions, key: SessionKey) -> None:
        self.key = key
        self.owner = os.urandom(12)
        self._sessions = sessions
        self._is_freed = False

    async def renew(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            await self._sessions.renew(self.key, self.owner)

    def free(self) -> None:
        """Give the claim back, without waiting for it. Later calls do nothing."""
        if not self._is_freed:
            self._is_freed = True
            self._sessions.free_later(self.key, self.owner)


def _continued_id(exchange: Exchange) -> str:
    """Id of the answer that the request continues; empty: it begins one. Raises InvalidRequest."""
    given = (exchange.header(LAST_EVENT.lower().encode()) or b"").decode("latin-1")
    return "" if given in ("", NO_EVENT) else EventId.parsed(given).answer_id


class SessionTurn:
    """
    history     what came before this turn
    num_new     messages of the request
    """

    def __init__(self, sessions: Sessions, claim: SessionClaim, found: ReadSession, continued_id: str) -> None:
        """continued_id: the answer that the request continues: where it is the session's last one, the turn is that one again"""
        self._sessions, self._claim, self._found = sessions, claim, found
        stored = found.stored
        messages, summary = found.messages, "" if stored is None else stored.summary
        if stored is not None and continued_id and stored.answer_id == continued_id:
            messages = messages[: stored.num_before]
        self.history = History(messages, summary)
        self.num_new = 0

    def conversation(self, new: Sequence[Message], *, max_messages: int) -> History:
        """The history with the request's messages behind it. Raises RequestTooLarge, or InvalidRequest for too many messages."""
        self.num_new = len(new)
        made = self.history.with_messages(new)
        if len(made.messages) > max_messages:
            remedy = "Begin another session, or delete this one."
            raise InvalidRequest("messages", f"at most {max_messages} messages with those of the session", len(made.messages), remedy)
        return made

    def check_size(self, history: History) -> int:
        """Bytes of a history as JSON. Raises RequestTooLarge for more than a session may have."""
        num_bytes = len(messages_json(history.messages))
        if num_bytes > self._sessions.config.max_session_bytes:
            raise self._sessions.too_large()
        return num_bytes

    def preferred_replica(self, model: str) -> str:
        """Name of the replica of `model` that gave the last answer; empty where another model gave it, or none."""
        stored = self._found.stored
        return stored.replica if stored is not None and stored.model == model else ""

    def recorded(self, encoder: AnswerEncoder, generation: Generation) -> AnswerEncoder:
        """The encoder of an answer that is stored as this turn's before its last bytes are sent."""
        answer = RecordedAnswer(encoder)
        generation.before_end = partial(self._keep, generation, answer)
        return answer

    async def _keep(self, generation: Generation, answer: RecordedAnswer, replica: str | None) -> None:
        """Store the messages that made the prompt, and the answer. Raises as `Sessions.keep`."""
        history = generation.parsed.history if generation.fitted is None else generation.fitted.history
        messages = [*(_kept(message) for message in history.messages), answer.message()]
        now, stored = int(self._sessions.unix_time()), self._found.stored
        turn = StoredSession(
            form=FORM,
            created=now if stored is None else stored.created,
            updated=now,
            answer_id=generation.resumable.answer_id,
            num_before=max(0, len(history.messages) - self.num_new),
            model=generation.model.name,
            replica=replica or "",
            summary=history.summary,
            packed=b"",
        )
        await self._sessions.keep(self._claim.key, self._found, turn, messages)
        self._claim.free()  # the client's next request may come with the last byte of this answer


def _kept(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in NOT_KEPT}


class RecordedAnswer:
    """An `AnswerEncoder` that keeps the text and the tool calls of the only sequence, beside another one that makes the answer."""

    def __init__(self, encoder: AnswerEncoder) -> None:
        self._encoder = encoder
        self._texts: list[str] = []
        self._pieces: dict[int, list[ToolCall]] = {}

    def encode_events(self, events: Sequence[OutputEvent]) -> Iterator[bytes]:
        self._record(events)
        return self._encoder.encode_events(events)

    def encode_end(self, usage: TokenUsage) -> bytes:
        return self._encoder.encode_end(usage)

    def add(self, events: Sequence[OutputEvent]) -> None:
        self._record(events)
        self._encoder.add(events)

    def encode_body(self, usage: TokenUsage) -> Iterator[bytes]:
        return self._encoder.encode_body(usage)

    def message(self) -> Message:
        """The answer as a message of its conversation."""
        text, calls = "".join(self._texts), [ToolCall.joined(pieces) for pieces in self._pieces.values()]
        made: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            made["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
        return made

    def _record(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            if event.text:
                self._texts.append(event.text)
            for piece in event.tool_calls:
                self._pieces.setdefault(piece.number, []).append(piece)
