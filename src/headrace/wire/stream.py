"""Gives the updates of one open request to the task that consumes them, in batches, until the stream ends or raises.

A consumer may set `plain_row_handler`, a callback that takes rows of a token and nothing else without waking the task. The handler is
called only while the task waits and no update is unread, so the order of updates is kept. A row that the handler declines becomes an
update.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import MappingProxyType

from headrace.core.clock import Clock
from headrace.core.errors import Unavailable
from headrace.core.ids import RequestId
from headrace.core.model_info import Numerics
from headrace.core.plan import columns_of
from headrace.core.request import EngineRequest
from headrace.core.update import Rejected, SequenceUpdate
from headrace.wire.service import Attempt, Handle

PlainRow = tuple[int, tuple[int, ...]]
"""Sequence index and new token ids."""

NO_NUMERICS: Numerics = MappingProxyType({})

PlainRowHandler = Callable[[Sequence[PlainRow]], bool]
"""Takes all rows, in order (True), or none (False), and never waits."""

UPDATE_BYTES = 256
PLAIN_ROW_BYTES = 128
"""Charged for an update and for a plain row, in addition to their token ids."""

TOKEN_ID_BYTES = 40


class ReplicaStream:
    """The updates of one request at one replica, read by `batch`; iterating over them one by one is for tests.

    The stream ends after the last sequence's finish or after a Rejected. Once everything is read, `batch` raises Unavailable if the
    replica was lost, or the error of the plain row handler. If the scope ends before the stream does, the request is cancelled at the
    engine. The gateway cancels a request whose `unread_bytes` grow too large.

    first_index  index of the request's first sequence. Prompt log-probabilities are the same for all sequences; only this one's are kept
    numerics     the replica's: another replica may continue the stream only if its own are equal
    """

    __slots__ = (
        "_cancel_request",
        "_error",
        "_is_delivery_pending",
        "_is_ended",
        "_on_end",
        "_open_indices",
        "_plain",
        "_request_delivery",
        "_unread_bytes",
        "_updates",
        "_waiter",
        "adapter",
        "adapter_digest",
        "attempt",
        "first_index",
        "handle",
        "is_unbegun",
        "num_tokens",
        "numerics",
        "plain_row_handler",
        "priority",
        "required_numerics",
    )

    def __init__(
        self,
        request: EngineRequest,
        handle: Handle,
        *,
        on_end: Callable[[ReplicaStream], None],
        cancel_request: Callable[[RequestId], None],
        request_delivery: Callable[[ReplicaStream], object],
        numerics: Numerics = NO_NUMERICS,
    ) -> None:
        """request_delivery  called when data arrives and no delivery is pending. The callee must call `deliver`, now or later"""
        self.attempt = Attempt(request.request_id, request.epoch)
        self.adapter, self.adapter_digest = request.adapter, request.adapter_digest
        self.handle, self.priority = handle, request.priority
        self.is_unbegun = not request.output_ids
        """Whether any replica with its adapter may compute the request: no update has come, and it resumes nothing."""
        max_tokens = request.params.max_tokens
        self.num_tokens = len(request.prompt_ids) + (len(request.output_ids) + 1 if max_tokens is None else max_tokens)
        """For which a replica that continues it must have room; without max_tokens the next one at the request's beginning."""
        self.numerics = numerics
        self.required_numerics: Numerics | None = None
        """Set by its owner: of a replica that computed another part of the answer."""
        self._open_indices = set(request.indices)
        self.first_index = min(self._open_indices)
        self._on_end = on_end
        self._cancel_request = cancel_request
        self._request_delivery = request_delivery
        self._is_delivery_pending = False
        self.plain_row_handler: PlainRowHandler | None = None
        self._plain: list[PlainRow] = []
        self._updates: deque[SequenceUpdate | Rejected] = deque()
        self._unread_bytes = 0
        self._error: Exception | None = None
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> RequestId:
        return self.attempt.request_id

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    @property
    def num_unread(self) -> int:
        return len(self._updates) + len(self._plain)

    @property
    def unread_bytes(self) -> int:
        return self._unread_bytes + sum([PLAIN_ROW_BYTES + TOKEN_ID_BYTES * len(token_ids) for _, token_ids in self._plain])

    def __aiter__(self) -> ReplicaStream:
        return self

    async def __anext__(self) -> SequenceUpdate | Rejected:
        if not await self._wait_for_updates():
            raise StopAsyncIteration
        update = self._updates.popleft()
        self._unread_bytes -= update_bytes(update)
        return update

    async def batch(self) -> list[SequenceUpdate | Rejected]:
        """All unread updates; empty: the stream has ended. Raises as the class says."""
        if not await self._wait_for_updates():
            return []
        updates = list(self._updates)
        self._updates.clear()
        self._unread_bytes = 0
        return updates

    async def __aenter__(self) -> ReplicaStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self._is_ended:
            self._cancel_request(self.request_id)

    def put(self, update: SequenceUpdate) -> None:
        if self._is_ended or update.index not in self._open_indices:
            return
        self.is_unbegun = False
        if update.prompt_logprobs and update.index != self.first_index:
            update = update._replace(prompt_logprobs=())
        self._append(update)
        if update.finish is not None:
            self.end_sequence(update.index)

    def put_plain_row(self, index: int, token_ids: tuple[int, ...]) -> None:
        if self.plain_row_handler is None or self._updates or self._waiter is None:
            attempt = self.attempt
            self.put(SequenceUpdate(request_id=attempt.request_id, epoch=attempt.epoch, index=index, token_ids=token_ids))
        elif index in self._open_indices and not self._is_ended:
            self._plain.append((index, token_ids))
            if not self._is_delivery_pending:
                self._schedule_delivery()

    def deliver(self) -> bool:
        """True: the handler took all plain rows; False: the task was woken."""
        self._is_delivery_pending = False
        if self._plain and not self._updates and self.plain_row_handler is not None and self._waiter is not None:
            try:
                is_taken = self.plain_row_handler(self._plain)
            except Exception as error:  # a bug in the handler must not end the connection, which other streams share
                self._give_up(error)
                return False
            if is_taken:
                self._plain = []
                if self._is_ended:  # `end` left the wake-up to this delivery
                    self._wake()
                return True
        self._wake()
        return False

    def reject(self, error: Exception) -> None:
        if not self._is_ended:
            self._append(Rejected(request_id=self.request_id, epoch=self.attempt.epoch, error=error))
            self.end()

    def end_sequence(self, index: int) -> None:
        if index in self._open_indices:
            self._open_indices.discard(index)
            if not self._open_indices:
                self.end()

    def end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            # With a delivery pending `deliver` wakes the task: a thousand ends in one frame must not wake a thousand tasks at once.
            if not self._is_delivery_pending:
                self._wake()
            self._on_end(self)

    def fail(self, error: Unavailable) -> None:
        if not self._is_ended:
            self._error = error
            self.end()

    def _give_up(self, error: Exception) -> None:
        self._plain, self._error = [], error
        self._cancel_request(self.request_id)
        self._wake()  # a stream that ended while its delivery was pending is not ended again, and nothing else would wake its task

    def _append(self, update: SequenceUpdate | Rejected) -> None:
        self._plain_to_updates()
        self._updates.append(update)
        self._unread_bytes += update_bytes(update)
        if not self._is_delivery_pending:
            self._schedule_delivery()

    def _schedule_delivery(self) -> None:
        self._is_delivery_pending = True
        self._request_delivery(self)

    def _plain_to_updates(self) -> None:
        for index, token_ids in self._plain:
            update = SequenceUpdate(request_id=self.request_id, epoch=self.attempt.epoch, index=index, token_ids=token_ids)
            self._updates.append(update)
            self._unread_bytes += update_bytes(update)
        self._plain = []

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait_for_updates(self) -> bool:
        while not (self._updates or self._plain or self._is_ended):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._plain_to_updates()
        if not self._updates and self._error is not None:
            raise self._error
        return bool(self._updates)


def update_bytes(update: SequenceUpdate | Rejected) -> int:
    if isinstance(update, Rejected):
        return 512
    num_bytes = UPDATE_BYTES + TOKEN_ID_BYTES * len(update.token_ids)
    if update.logprobs or update.prompt_logprobs:
        num_bytes += sum([columns_of(columns).num_bytes for columns in (update.logprobs, update.prompt_logprobs) if columns])
    return num_bytes


SLICE_S = 0.0015
"""Longest slice of the event loop: then heartbeats, new requests and sockets have their turn."""

SLICE_UNITS = 128
"""Writing to the sockets comes after the slice, and costs more."""

WAKE_UNITS = 8
"""A stream whose task is woken counts this many units, and as many again for every WAKE_UPDATES unread updates."""

WAKE_UPDATES = 4

CLOCK_UNITS = 16


class DeliveryQueue:
    """Delivers unread updates to their streams in order of arrival, in short slices of the event loop. Not thread-safe, like all of the
    wire's gateway side.

    Woken all at once, the tasks of a thousand streams would hold the event loop for a tenth of a second.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._streams: deque[ReplicaStream] = deque()
        self._has_any = asyncio.Event()

    def add(self, stream: ReplicaStream) -> None:
        self._streams.append(stream)
        self._has_any.set()

    async def run(self) -> None:
        while True:
            await self._has_any.wait()
            self._deliver_slice()
            if self._streams:
                await asyncio.sleep(0)
            else:
                self._has_any.clear()

    def deliver_all(self) -> None:
        """For a lost connection: updates that arrived before must still reach their streams."""
        while self._streams:
            self._streams.popleft().deliver()

    def _deliver_slice(self) -> None:
        streams, ends_s, units, next_look = self._streams, self._clock() + SLICE_S, 0, CLOCK_UNITS
        while streams and units < SLICE_UNITS:
            stream = streams.popleft()
            num_unread = stream.num_unread
            units += 1 if stream.deliver() else WAKE_UNITS * (1 + num_unread // WAKE_UPDATES)
            if units >= next_look:
                if self._clock() > ends_s:
                    return
                next_look = units + CLOCK_UNITS
