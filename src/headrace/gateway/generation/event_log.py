"""Numbers the events of one stream. Clients send the number back as `Last-Event-ID`."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.core.errors import InvalidRequest
from headrace.core.ids import RequestId
from headrace.gateway.http.exchange import Exchange

HEADER = "Last-Event-ID"
LAST_EVENT_ID = HEADER.lower().encode()

NO_EVENT = "0"
"""The header's value in the first request of a stream. Without the header events have no ids, since many clients take every line of a
stream for data.
"""
_EVENT_ID = re.compile(r"([0-9a-f]{24})/([1-9][0-9]{0,8})")


class EventId(NamedTuple):
    answer_id: RequestId
    number: int


def last_event(exchange: Exchange) -> EventId | None:
    """None: the request begins a new stream. Raises InvalidRequest."""
    given = (exchange.header(LAST_EVENT_ID) or b"").decode("latin-1")
    if given in ("", NO_EVENT):
        return None
    match = _EVENT_ID.fullmatch(given)
    if match is None:
        raise InvalidRequest(HEADER, "the id of an event of this server (REQUEST/NUMBER)", given, "Send it as it was received.")
    return EventId(RequestId(match[1]), int(match[2]))


class EventLog:
    """Which sequence and output offset each event of one stream belongs to. An entry is offset * num_sequences + index, in four bytes.
    Event number N has entries[N - 1]. The usage after the last event has the next number and no entry.

    Adjacent equal entries are chunks of one `OutputEvent`. Their number depends on that `OutputEvent` alone, they are numbered together,
    and the ids between two offsets give the same `OutputEvent` again, however they arrived at first. So a stream that is made again has the
    same chunks under the same numbers, wherever its client left it, between two chunks of one offset too.
    """

    __slots__ = ("answer_id", "entries", "num_seen", "num_sequences", "prefix")

    def __init__(self, answer_id: RequestId, num_sequences: int, *, num_seen: int = 0) -> None:
        self.answer_id = answer_id
        self.num_sequences = num_sequences
        self.prefix = b"id: %b/" % answer_id.encode()
        self.entries = array("i")
        self.num_seen = num_seen

    def line(self, index: int, offset: int) -> bytes:
        self.entries.append(offset * self.num_sequences + index)
        return b"%b%d\n" % (self.prefix, len(self.entries))

    def usage_line(self) -> bytes:
        return b"%b%d\n" % (self.prefix, len(self.entries) + 1)

    @property
    def is_usage_seen(self) -> bool:
        return self.num_seen > len(self.entries)


def offsets_of(entries: Sequence[int], num_sequences: int) -> Iterator[tuple[int, int]]:
    for entry in entries:
        offset, index = divmod(entry, num_sequences)
        yield index, offset
