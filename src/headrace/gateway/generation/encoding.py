"""Answers with many log-probabilities are encoded in slices, one at a time over all requests, and only as their clients take them.

Encoding is Python: it runs on the event loop or holds it up from a thread. So the event loop does it, never for longer than SLICE_S at a
time, and makes one slice per round however many answers wait: what else is to be done has its turn between any two.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from headrace.core.clock import Clock
from headrace.gateway.http.exchange import PIECE_BYTES

SLICE_S = 0.001
"""A piece is less than a millisecond of work (`surfaces.dialect.logprobs`), and the one that is over this is the last."""


class EncodingTurns:
    """num_pending  answers queued or being encoded"""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        self.num_pending = 0

    async def slices(self, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        """`pieces` joined, in parts of about PIECE_BYTES at most. None is made before it is asked for."""
        self.num_pending += 1
        try:
            is_over = False
            while not is_over:
                async with self._turn:  # in the order of asking
                    made, is_over = self._slice(pieces)
                    await asyncio.sleep(0)  # the next one, whoever's, is made in the next round
                if made:
                    yield made
        finally:
            self.num_pending -= 1

    def _slice(self, pieces: Iterator[bytes]) -> tuple[bytes, bool]:
        """Some more of them, and whether they are all."""
        found: list[bytes] = []
        size, ends_s = 0, self._clock() + SLICE_S
        for piece in pieces:
            found.append(piece)
            size += len(piece)
            if size >= PIECE_BYTES or self._clock() > ends_s:
                return b"".join(found), False
        return b"".join(found), True
