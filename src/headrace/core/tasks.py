"""Tasks that run beside their owner, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


class RunningTasks(set[asyncio.Task[Any]]):
    """A task leaves the set as it ends. The event loop alone would not keep it from being collected."""

    def start(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        task = asyncio.create_task(work, name=name)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels them, and returns once all have ended. Their errors are dropped."""
    ending = [*tasks]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
