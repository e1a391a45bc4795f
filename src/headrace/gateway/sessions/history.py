"""Defines the stored form of a session, and chooses the turns that stay of a conversation that has outgrown its context. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct, field

from headrace.gateway.stores.store import StoredEntry, entry_in

Message = Mapping[str, object]

FORM = 2

COMPRESSION = 1
"""zlib's level: 10 ms per MB; higher ones save a tenth of the bytes for several times that."""


class StoredSession(StoredEntry, frozen=True):
    """created, updated  Unix seconds of the first and the last turn
    answer_id   id of the last turn's answer, which its client may continue
    num_before  number of messages before the last turn's own
    packed      messages as compressed JSON
    retry_key   a request with the same one repeats the last turn; empty: it had none
    """

    created: int
    updated: int
    answer_id: str
    num_before: int
    summary: str
    packed: bytes
    retry_key: str = ""


class History(Struct, frozen=True):
    messages: Sequence[Message] = field(default_factory=tuple)
    summary: str = ""

    @property
    def num_head(self) -> int:
        return num_head(self.messages)

    def with_messages(self, new: Sequence[Message]) -> History:
        count = num_head(new)
        head = new[:count] or self.messages[: self.num_head]
        return History([*head, *self.messages[self.num_head :], *new[count:]], self.summary)

    def with_summary(self, summary: str) -> History:
        return History(self.messages, summary)


entry_of, _decoder = msgspec.msgpack.encode, msgspec.msgpack.Decoder(StoredSession)
messages_json, _messages_decoder = msgspec.json.encode, msgspec.json.Decoder(list[dict[str, Any]])


def num_head(messages: Sequence[Message]) -> int:
    return next((number for number, message in enumerate(messages) if message["role"] != "system"), len(messages))


def packed(messages: bytes) -> bytes:
    return zlib.compress(messages, COMPRESSION)


def unpacked(stored: StoredSession) -> list[Message]:
    return list[Message](_messages_decoder.decode(zlib.decompress(stored.packed)))


def stored_in(entry: bytes | None) -> StoredSession | None:
    return entry_in(entry, _decoder, FORM)


TARGET_SHARE = 0.75
"""Part of the window's room for a prompt that a shortened one fills, so that the next turns fit whole."""

ANSWER_DIVISOR = 4
"""1/N of the window is left for an answer whose length the client does not bound."""

SUMMARY_TITLE = "Summary of the earlier conversation:"


class ContextFitting(StrEnum):
    REFUSE = "refuse"
    SLIDING_WINDOW = "sliding_window"
    SUMMARY = "summary"


def turn_starts(history: History) -> list[int]:
    """Messages between the head and the first user's message belong to the first turn."""
    first = history.num_head
    users = [number for number, message in enumerate(history.messages) if number > first and message["role"] == "user"]
    return [first, *users] if len(history.messages) > first else []


def last_turns(history: History, count: int) -> tuple[History, Sequence[Message]]:
    head, start = history.num_head, turn_starts(history)[-count]
    return History([*history.messages[:head], *history.messages[start:]], history.summary), history.messages[head:start]


def prompt_messages(history: History) -> Sequence[Message]:
    if not history.summary:
        return history.messages
    text = f"{SUMMARY_TITLE}\n{history.summary}"
    if not (count := history.num_head):
        return [{"role": "system", "content": text}, *history.messages]
    system = history.messages[count - 1]
    content = system["content"]
    joined = [*content, {"type": "text", "text": text}] if isinstance(content, list) else f"{content}\n\n{text}"
    return [*history.messages[: count - 1], {**system, "content": joined}, *history.messages[count:]]


async def most_that_fit(fits: Callable[[int], Awaitable[bool]], limit: int) -> int:
    """The largest fitting count below `limit`, at least 1. The cost of `fits` grows with the count, so no count above twice a fitting
    one is tried.
    """
    fitting, too_many = 1, limit
    while fitting * 2 < too_many:
        if not await fits(fitting * 2):
            too_many = fitting * 2
            break
        fitting *= 2
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if await fits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting


def transcript(messages: Sequence[Message]) -> str:
    return "\n\n".join(f"{message['role']}: {_text(message)}" for message in messages)


def _text(message: Message) -> str:
    content = message.get("content")
    parts = [part["text"] for part in content] if isinstance(content, list) else [content] if isinstance(content, str) else []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function: Mapping[str, object] = call["function"]
        parts.append(f"(called {function['name']} with {function['arguments']})")
    return "\n".join(parts)
