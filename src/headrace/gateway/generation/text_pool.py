"""Templates, tokenizers and large answers run here: off the event loop, in a bounded number of threads, behind a bounded queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from headrace.core.errors import Overloaded

P = ParamSpec("P")
R = TypeVar("R")


class TextPool:
    """num_pending  calls queued or running"""

    def __init__(self, *, max_workers: int, max_queue: int) -> None:
        self._executor = ThreadPoolExecutor(max_workers, thread_name_prefix="text")
        self._max_pending = max_workers + max_queue
        self.num_pending = 0

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`work`'s result. Raises Overloaded when too many calls wait already, and what `work` raises."""
        if self.num_pending >= self._max_pending:
            raise Overloaded("Too many prompts wait to be tokenized.", retry_after_s=1.0)
        return await self.finish(work, *args, **kwargs)

    async def finish(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `run`, and never refused: for requests whose tokens are made already. Their number is bounded by the open_requests."""
        self.num_pending += 1
        try:
            return await asyncio.wrap_future(self._executor.submit(work, *args, **kwargs))
        finally:
            self.num_pending -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
