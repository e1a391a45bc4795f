"""One open request as its reader sees it: an async iterator over updates that ends, or raises, exactly once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from headrace.core.errors import Unavailable
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.update import Rejected, SequenceUpdate
from headrace.wire.handles import Attempt, Handle


class ReplicaStream:
    """Made by `ReplicaClient.submit`. Read it with `async for`, or in batches; leave it by scope:

        async with replica.submit(request) as stream:
            async for update in stream: ...

    Leaving early cancels the request at the engine. The iterator ends after the last sequence's finish or after a Rejected, and raises
    Unavailable when the replica was lost first. What is buffered is bounded by the request's own max_tokens.
    """

    def __init__(
        self,
        request: EngineRequest,
        handle: Handle,
        *,
        on_end: Callable[[ReplicaStream], None],
        on_leave: Callable[[RequestId], None],
    ) -> None:
        self.attempt = Attempt(request.request_id, request.epoch)
        self.handle = handle
        self._running = set(request.indices)
        self._on_end = on_end
        self._on_leave = on_leave
        self._news: deque[SequenceUpdate | Rejected] = deque()
        self._unread_bytes = 0
        self._error: Unavailable | None = None
        self._is_ended = False
        self._wake = asyncio.Event()

    @property
    def request_id(self) -> RequestId:
        return self.attempt.request_id

    @property
    def is_ended(self) -> bool:
        """Nothing more will arrive; there may still be unread updates."""
        return self._is_ended

    @property
    def unread_bytes(self) -> int:
        """About how much memory the unread updates take: what a reader's reader may make wait is bounded by it."""
        return self._unread_bytes

    def __aiter__(self) -> ReplicaStream:
        return self

    async def __anext__(self) -> SequenceUpdate | Rejected:
        if not await self._has_news():
            raise StopAsyncIteration
        update = self._news.popleft()
        self._unread_bytes -= unread_size(update)
        return update

    async def batch(self) -> list[SequenceUpdate | Rejected]:
        """Everything unread, at least one entry; empty when the stream has ended. Raises Unavailable like the iterator."""
        if not await self._has_news():
            return []
        news = list(self._news)
        self._news.clear()
        self._unread_bytes = 0
        return news

    async def __aenter__(self) -> ReplicaStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self._is_ended:
            self._on_leave(self.request_id)

    def put(self, update: SequenceUpdate) -> None:
        """News from the session. News of a sequence that has ended is dropped."""
        if self._is_ended or update.index not in self._running:
            return
        self._append(update)
        if update.finish is not None:
            self.end_sequence(update.index)

    def reject(self, error: Exception) -> None:
        if not self._is_ended:
            self._append(Rejected(request_id=self.request_id, epoch=self.attempt.epoch, error=error))
            self.end()

    def end_sequence(self, index: int) -> None:
        if index in self._running:
            self._running.discard(index)
            if not self._running:
                self.end()

    def end(self) -> None:
        """No more news; what is unread stays readable."""
        if not self._is_ended:
            self._is_ended = True
            self._wake.set()
            self._on_end(self)

    def fail(self, error: Unavailable) -> None:
        """The replica was lost: raised after what is unread."""
        if not self._is_ended:
            self._error = error
            self.end()

    def _append(self, update: SequenceUpdate | Rejected) -> None:
        self._news.append(update)
        self._unread_bytes += unread_size(update)
        self._wake.set()

    async def _has_news(self) -> bool:
        while not self._news and not self._is_ended:
            self._wake.clear()
            await self._wake.wait()
        if not self._news and self._error is not None:
            raise self._error
        return bool(self._news)


def unread_size(news: SequenceUpdate | Rejected) -> int:
    """Bytes an update is taken for: an object, 8 per token, and for log-probabilities an object and 16 per alternative."""
    if isinstance(news, Rejected):
        return 512
    if not news.logprobs and not news.prompt_logprobs:
        return 256 + 8 * len(news.token_ids)
    entries = sum(96 + 16 * len(entry.top_ids) for entries in (news.logprobs, news.prompt_logprobs) for entry in entries)
    return 256 + 8 * len(news.token_ids) + entries
