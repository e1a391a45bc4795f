"""Answers with many log-probabilities are encoded in slices: one slice at a time over all requests, and only as clients read.

Encoding is Python code; in a thread it would block the event loop through the GIL all the same. So the event loop does it, for SLICE_S at a
time. It makes one slice per round of the loop, however many answers wait, so that other events are handled between any two slices.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator

from headrace.core.clock import Clock
from headrace.gateway.http.pieces import PIECE_BYTES

SLICE_S = 0.001
"""A slice ends with the piece that passes this many seconds. One piece takes less than a millisecond (`surfaces.dialect.logprobs`)."""


class EncodingTurns:
    """num_pending  answers queued or being encoded"""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        self.num_pending = 0

    async def slices(self, pieces: Iterator[bytes]) -> AsyncGenerator[bytes]:
        """`pieces` joined into slices of about PIECE_BYTES at most. A slice is made when it is asked for."""
        self.num_pending += 1
        try:
            is_over = False
            while not is_over:
                async with self._turn:  # first come, first served
                    made, is_over = self._slice(pieces)
                    await asyncio.sleep(0)  # the next slice, of any answer, is made in the next round
                if made:
                    yield made
        finally:
            self.num_pending -= 1

    def _slice(self, pieces: Iterator[bytes]) -> tuple[bytes, bool]:
        """The next slice, and whether it is the last one."""
        found: list[bytes] = []
        size, ends_s = 0, self._clock() + SLICE_S
        for piece in pieces:
            found.append(piece)
            size += len(piece)
            if size >= PIECE_BYTES or self._clock() > ends_s:
                return b"".join(found), False
        return b"".join(found), True
