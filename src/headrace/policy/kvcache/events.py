"""Numbered events of one pool, for copies of its prefix tree elsewhere: block stored, removed, all cleared.

Copies are for gateways that choose a replica by its cached prefixes, and for host tiers. A reader asks for the events since the number it
knows. The ring is bounded in bytes and keeps the latest events; a reader that has missed some, or has another engine's number, reads the
whole tree again (`BlockPool.identities` beside `next_number`). Only tests read events today, and none is recorded before the first reader
asks.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from headrace.core.hashing import DIGEST_BYTES, BlockHash

EVENT_BYTES = 1 + DIGEST_BYTES
MAX_RING_BYTES = 1 << 20


class EventKind(Enum):
    """The value is the event's first byte in the ring."""

    STORED = b"s"
    REMOVED = b"r"
    CLEARED = b"c"


class BlockEvent(NamedTuple):
    """identity: the block's; zeros for CLEARED, which removes all blocks."""

    kind: EventKind
    identity: BlockHash


class BlockEvents:
    """The latest events of one pool. max_bytes: of the ring; memory it has not reached yet is not touched."""

    def __init__(self, max_bytes: int = MAX_RING_BYTES) -> None:
        self.capacity = max_bytes // EVENT_BYTES
        if self.capacity < 1:
            raise ValueError(f"an event takes {EVENT_BYTES} bytes, the ring has {max_bytes}")
        self.next_number = 0
        """The number of the next event; as many were recorded so far."""
        self._ring = bytearray(self.capacity * EVENT_BYTES)

    def stored(self, identity: BlockHash) -> None:
        self._add(b"s" + identity)

    def removed(self, identity: BlockHash) -> None:
        self._add(b"r" + identity)

    def cleared(self) -> None:
        self._add(b"c" + bytes(DIGEST_BYTES))

    def since(self, number: int) -> list[BlockEvent] | None:
        """Events from `number` on, in order. None: some are lost, or there is no such number; the reader has to resync."""
        if not max(0, self.next_number - self.capacity) <= number <= self.next_number:
            return None
        return [self._event(at) for at in range(number, self.next_number)]

    def _add(self, event: bytes) -> None:
        begin = self.next_number % self.capacity * EVENT_BYTES
        self._ring[begin : begin + EVENT_BYTES] = event
        self.next_number += 1

    def _event(self, number: int) -> BlockEvent:
        begin = number % self.capacity * EVENT_BYTES
        event = bytes(self._ring[begin : begin + EVENT_BYTES])
        return BlockEvent(EventKind(event[:1]), BlockHash(event[1:]))
