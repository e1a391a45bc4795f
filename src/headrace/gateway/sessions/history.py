"""What a session holds, its form in the store, and the conversation that it makes of a request's messages. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from headrace.gateway.stores.store import StoredEntry, entry_in

Message = Mapping[str, object]

FORM = 1
"""The form of entries that this version writes. An entry of another form is no session."""

COMPRESSION = 1
"""zlib's level: 10 ms per MB; higher ones save a tenth of the bytes for several times that."""


class StoredSession(StoredEntry, frozen=True):
    """One entry of the store.

    created, updated  Unix seconds of the first and the last turn
    answer_id         id of the last turn's answer, which its client may continue
    num_before        messages that came before the last turn's own
    model, replica    that gave the last answer; replica is empty where it is not known
    summary           of messages that were left out; empty: none were summarised
    packed            the messages: JSON, compressed
    retry_key         name of the last turn's Idempotency-Key, whose retry is that turn again; empty: it had none
    """

    created: int
    updated: int
    answer_id: str
    num_before: int
    model: str
    replica: str
    summary: str
    packed: bytes
    retry_key: str = ""


class History(Struct, frozen=True):
    """The messages of a session in order, and the summary of what was left out before them."""

    messages: Sequence[Message] = field(default_factory=tuple)
    summary: str = ""

    @property
    def num_head(self) -> int:
        return num_head(self.messages)

    def with_messages(self, new: Sequence[Message]) -> History:
        """This history with a request's messages behind it. System messages at the head of `new` take the place of those here."""
        count = num_head(new)
        head = new[:count] or self.messages[: self.num_head]
        return History([*head, *self.messages[self.num_head :], *new[count:]], self.summary)

    def with_summary(self, summary: str) -> History:
        return History(self.messages, summary)


_encode, _decoder = msgspec.msgpack.encode, msgspec.msgpack.Decoder(StoredSession)
_encode_messages, _messages_decoder = msgspec.json.encode, msgspec.json.Decoder(list[dict[str, Any]])


def num_head(messages: Sequence[Message]) -> int:
    """System messages before the first other one."""
    return next((number for number, message in enumerate(messages) if message["role"] != "system"), len(messages))


def messages_json(messages: Sequence[Message]) -> bytes:
    return _encode_messages(messages)


def packed(messages: bytes) -> bytes:
    """messages: as `messages_json` gives them"""
    return zlib.compress(messages, COMPRESSION)


def unpacked(stored: StoredSession) -> list[Message]:
    return list[Message](_messages_decoder.decode(zlib.decompress(stored.packed)))


def entry_of(stored: StoredSession) -> bytes:
    return _encode(stored)


def stored_in(entry: bytes | None) -> StoredSession | None:
    """As `entry_in`."""
    return entry_in(entry, _decoder, FORM)
