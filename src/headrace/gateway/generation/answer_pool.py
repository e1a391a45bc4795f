"""Answers with many log-probabilities are encoded here: off the event loop, one at a time, and not for clients that have left.

One thread: encoding is Python, which runs once per process however many threads there are. What waits is bounded by the admitted
requests. A job given up before its turn never runs; one that runs ends at its next prompt token (see `generation.wanted`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class AnswerPool:
    """num_pending  answers queued or being encoded"""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self.num_pending = 0

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`work`'s result; cancelled in the queue it is never called."""
        self.num_pending += 1
        try:
            return await asyncio.wrap_future(self._executor.submit(work, *args, **kwargs))
        finally:
            self.num_pending -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
