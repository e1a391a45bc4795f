"""Tests a request's stream as its consumer sees it, with and without a plain row handler: the same tokens in the same order."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_kit import request

from headrace.core.errors import Unavailable
from headrace.core.ids import RequestId
from headrace.core.plan import TokenLogprobs
from headrace.core.update import FinishReason, Rejected, SequenceUpdate
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import encode_updates
from headrace.wire.codec.update import UpdateRows, update_of
from headrace.wire.service import Handle
from headrace.wire.stream import SLICE_S, SLICE_UNITS, WAKE_UNITS, DeliveryQueue, PlainRow, ReplicaStream

pytestmark = pytest.mark.loop


def made(
    n: int = 1, *, request_delivery: Callable[[ReplicaStream], object] = ReplicaStream.deliver, left: list[RequestId] | None = None
) -> ReplicaStream:
    """A stream of its own; leaving is noted and ends it, as a client does."""

    def leave(request_id: RequestId) -> None:
        if left is not None:
            left.append(request_id)
        stream.end()

    stream = ReplicaStream(request("r", n=n), Handle(1), on_end=lambda _: None, cancel_request=leave, request_delivery=request_delivery)
    return stream


def update(index: int, *token_ids: int, finish: FinishReason | None = None) -> SequenceUpdate:
    return SequenceUpdate(request_id=RequestId("r"), epoch=0, index=index, token_ids=token_ids, finish=finish)


class Consumer:
    """Takes plain rows in a handler, while `is_willing`, and reads the rest in a task."""

    def __init__(self, stream: ReplicaStream) -> None:
        self.stream = stream
        self.seen: list[PlainRow] = []
        self.num_handled = 0
        self.is_willing = True
        self.is_busy = asyncio.Event()
        self.is_busy.set()
        stream.plain_row_handler = self.take

    def take(self, rows: Sequence[PlainRow]) -> bool:
        if self.is_willing:
            self.num_handled += len(rows)
            self.seen.extend(rows)
        return self.is_willing

    async def read(self) -> None:
        while updates := await self.stream.batch():
            for each in updates:
                assert isinstance(each, SequenceUpdate)
                self.seen.append((each.index, each.token_ids))
            await self.is_busy.wait()


def broken(rows: Sequence[PlainRow]) -> bool:
    """A plain row handler with a bug."""
    raise ZeroDivisionError


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_waiting_consumer_takes_plain_rows_without_being_woken() -> None:
    consumer = Consumer(made())
    task = asyncio.create_task(consumer.read())
    await turns()
    for token_id in range(3):
        consumer.stream.put_plain_row(0, (token_id,))
    assert consumer.seen == [(0, (0,)), (0, (1,)), (0, (2,))]
    consumer.stream.put(update(0, 3, finish=FinishReason.LENGTH))
    await task
    assert consumer.seen[-1] == (0, (3,))
    assert consumer.num_handled == 3
    assert consumer.stream.unread_bytes == 0


async def test_what_a_plain_row_handler_declines_is_read_in_order_and_counted_as_unread() -> None:
    consumer = Consumer(made())
    task = asyncio.create_task(consumer.read())
    await turns()
    consumer.is_willing = False
    consumer.stream.put_plain_row(0, (1,))
    assert consumer.stream.unread_bytes > 0
    consumer.stream.put_plain_row(0, (2,))
    await turns()
    assert consumer.seen == [(0, (1,)), (0, (2,))]
    consumer.is_willing = True
    consumer.stream.put_plain_row(0, (3,))
    assert consumer.seen[-1] == (0, (3,))
    consumer.stream.end()
    await task


async def test_a_stream_that_ended_while_it_was_queued_wakes_its_consumer_after_the_handler() -> None:
    waiting: list[ReplicaStream] = []
    consumer = Consumer(made(request_delivery=waiting.append))
    task = asyncio.create_task(consumer.read())
    await turns()
    consumer.stream.put_plain_row(0, (1,))
    consumer.stream.end()
    assert waiting.pop().deliver()
    await task
    assert consumer.seen == [(0, (1,))]


async def test_a_consumer_that_is_busy_is_never_overtaken() -> None:
    """Its task has taken updates and waits for something else: rows handled now would be out of order."""
    consumer = Consumer(made())
    task = asyncio.create_task(consumer.read())
    await turns()
    consumer.is_busy.clear()
    consumer.stream.put(update(0, 1))
    await turns()
    consumer.stream.put_plain_row(0, (2,))
    assert consumer.num_handled == 0
    consumer.is_busy.set()
    await turns()
    consumer.stream.end()
    await task
    assert consumer.seen == [(0, (1,)), (0, (2,))]


async def test_a_plain_row_handler_that_fails_ends_its_stream_and_cancels_the_request() -> None:
    left: list[RequestId] = []
    stream = made(left=left)

    stream.plain_row_handler = broken
    task = asyncio.create_task(stream.batch())
    await turns()
    stream.put_plain_row(0, (1,))
    with pytest.raises(ZeroDivisionError):
        await task
    assert left == ["r"]


async def test_a_plain_row_handler_that_fails_after_the_end_wakes_its_consumer() -> None:
    """The replica was lost while plain rows were queued: no cancel ended the stream again, and the consumer task slept for ever."""
    waiting: list[ReplicaStream] = []
    stream = made(request_delivery=waiting.append)
    stream.plain_row_handler = broken
    task = asyncio.create_task(stream.batch())
    await turns()
    stream.put_plain_row(0, (1,))
    stream.fail(Unavailable("the replica was lost"))
    assert not waiting.pop().deliver()
    with pytest.raises(ZeroDivisionError):
        await task


async def test_tokens_of_a_sequence_that_has_ended_are_dropped() -> None:
    consumer = Consumer(made(2))
    task = asyncio.create_task(consumer.read())
    await turns()
    consumer.stream.put(update(0, 1, finish=FinishReason.STOP))
    await turns()
    consumer.stream.put_plain_row(0, (9,))
    consumer.stream.put_plain_row(1, (2,))
    consumer.stream.end()
    consumer.stream.put_plain_row(1, (9,))
    await task
    assert consumer.seen == [(0, (1,)), (1, (2,))]


@pytest.mark.pure
@given(st.lists(st.sampled_from(["tokens", "update", "turn", "willing", "unwilling", "busy", "idle", "deliver"]), max_size=40))
@settings(max_examples=200, deadline=None)
def test_the_order_is_that_of_arrival_whatever_the_handler_takes(steps: list[str]) -> None:
    async def run() -> None:
        waiting: list[ReplicaStream] = []
        consumer = Consumer(made(request_delivery=waiting.append))
        task = asyncio.create_task(consumer.read())
        sent: list[PlainRow] = []
        for number, step in enumerate(steps):
            if step in ("tokens", "update"):
                sent.append((0, (number,)))
            if step == "tokens":
                consumer.stream.put_plain_row(0, (number,))
            elif step == "update":
                consumer.stream.put(update(0, number))
            elif step == "turn":
                await turns()
            elif step in ("willing", "unwilling"):
                consumer.is_willing = step == "willing"
            elif step == "busy":
                consumer.is_busy.clear()
            elif step == "idle":
                consumer.is_busy.set()
            elif waiting:
                waiting.pop().deliver()
            assert len(waiting) <= 1
        consumer.is_busy.set()
        consumer.stream.put(update(0, 999, finish=FinishReason.LENGTH))
        for stream in waiting:
            stream.deliver()
        await task
        assert consumer.seen == [*sent, (0, (999,))]
        assert consumer.stream.unread_bytes == 0

    asyncio.run(run())


async def test_a_thousand_ready_streams_are_served_in_slices_and_all_of_them() -> None:
    deliveries = DeliveryQueue(lambda: 0.0)
    consumers = [Consumer(made(request_delivery=deliveries.add)) for _ in range(1000)]
    tasks = [asyncio.create_task(consumer.read()) for consumer in consumers]
    serving = asyncio.create_task(deliveries.run())
    await turns()
    for consumer in consumers:
        consumer.stream.put_plain_row(0, (1,))
    served: list[int] = []
    while not served or served[-1] < len(consumers):
        await asyncio.sleep(0)
        served.append(sum(len(consumer.seen) for consumer in consumers))
    assert max(b - a for a, b in zip([0, *served], served, strict=False)) <= SLICE_UNITS
    for consumer in consumers:
        consumer.stream.put(update(0, 2, finish=FinishReason.LENGTH))
    served.clear()
    while not served or served[-1] < 2 * len(consumers):
        await asyncio.sleep(0)
        served.append(sum(len(consumer.seen) for consumer in consumers))
    assert max(b - a for a, b in zip([1000, *served], served, strict=False)) <= SLICE_UNITS // WAKE_UNITS
    await asyncio.gather(*tasks)
    serving.cancel()


async def test_a_slice_ends_by_the_clock_whatever_it_has_counted() -> None:
    """One stream delivered to its handler, then others that are woken: the count was never a multiple of sixteen, so no clock was read."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 2 * SLICE_S
        return now

    deliveries = DeliveryQueue(clock)
    handled, *woken = (Consumer(made(request_delivery=deliveries.add)) for _ in range(9))
    tasks = [asyncio.create_task(consumer.read()) for consumer in (handled, *woken)]
    await turns()
    handled.stream.put_plain_row(0, (1,))
    for consumer in woken:
        consumer.is_willing = False
        consumer.stream.put_plain_row(0, (1,))
    deliveries._deliver_slice()
    await turns()
    assert sum(len(consumer.seen) for consumer in (handled, *woken)) == 3, "one counted 1, two counted 8 each: the time is over"
    deliveries.deliver_all()
    for consumer in (handled, *woken):
        consumer.stream.end()
    deliveries.deliver_all()
    await asyncio.gather(*tasks)


async def test_plain_rows_count_as_unread() -> None:
    stream = made(64, request_delivery=lambda _: None)
    consumer = Consumer(stream)
    task = asyncio.create_task(consumer.read())
    await turns()
    for index in range(64):
        stream.put_plain_row(index, (1,))
    assert stream.num_unread == 64
    stream.deliver()
    assert (stream.num_unread, consumer.num_handled) == (0, 64)
    stream.end()
    stream.deliver()
    await task


async def test_streams_with_many_updates_are_fewer_in_a_slice() -> None:
    """Sixteen requests of 64 sequences with log-probabilities, woken at once, held the event loop for 20 ms."""
    deliveries = DeliveryQueue(lambda: 0.0)
    streams = [made(64, request_delivery=deliveries.add) for _ in range(16)]
    tasks = [asyncio.create_task(stream.batch()) for stream in streams]
    await turns()
    for stream in streams:
        for index in range(64):
            stream.put(update(index, 1))
    num_done = []
    serving = asyncio.create_task(deliveries.run())
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        num_done.append(sum(task.done() for task in tasks))
    assert max(b - a for a, b in zip([0, *num_done], num_done, strict=False)) == 1
    assert [len(await task) for task in tasks] == [64] * 16
    serving.cancel()


async def test_what_came_before_the_connection_was_lost_is_still_delivered() -> None:
    deliveries = DeliveryQueue(lambda: 0.0)
    stream = made(request_delivery=deliveries.add)
    task = asyncio.create_task(stream.batch())
    await turns()
    stream.reject(ValueError())
    await turns()
    assert not task.done()
    deliveries.deliver_all()
    assert [type(each) for each in await task] == [Rejected]


def drawn_logprobs(draw: random.Random, num_tokens: int, num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """Entries as a model of 150,000 tokens gives them; none without num_top."""
    if num_top is None:
        return ()
    ids = range(300, 150_000)

    def entry() -> TokenLogprobs:
        top_logprobs = tuple(draw.random() for _ in range(num_top))
        return TokenLogprobs(draw.choice(ids), draw.random(), draw.choice(ids), tuple(draw.choices(ids, k=num_top)), top_logprobs)

    return tuple(entry() for _ in range(num_tokens))


@pytest.mark.pure
@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "num_top", "num_prompt"),
    [
        (1000, 1, None, 0),
        (500, 8, None, 0),
        (10, 1000, None, 0),
        (500, 1, 0, 0),
        (500, 1, 1, 0),
        (200, 1, 20, 0),
        (5, 400, 20, 0),
        (2, 0, 0, 1024),
        (2, 0, 20, 1024),
    ],
)
def test_unread_bytes_are_what_unread_updates_take(num_rows: int, num_tokens: int, num_top: int | None, num_prompt: int) -> None:
    """Decoded from a frame, as they come: each integer and float of a log-probability is an object of its own."""
    stream, draw = made(), random.Random(7)
    token_ids = tuple(draw.choices(range(300, 150_000), k=num_tokens))
    logprobs, prompt_logprobs = drawn_logprobs(draw, num_tokens, num_top), drawn_logprobs(draw, num_prompt, num_top)
    row = update(0, *token_ids)._replace(logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    frames = [encode_updates([(Handle(1), row)]).SerializeToString() for _ in range(num_rows)]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for frame in frames:
            for _, index, ids, facts in UpdateRows(pb.Updates.FromString(frame)):
                stream.put(update_of(stream.attempt, index, ids, facts or {}))
        del index, ids, facts
        gc.collect()
        resident = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.7 * stream.unread_bytes < resident <= stream.unread_bytes


async def test_unread_bytes_of_rows_for_a_plain_row_handler_are_what_they_take() -> None:
    stream = made(request_delivery=lambda _: None)
    consumer = Consumer(stream)
    task = asyncio.create_task(consumer.read())
    await turns()
    frame = pb.Updates(handles=[1] * 1000, indices=[0] * 1000, token_counts=[4] * 1000, token_ids=range(2000, 6000))
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _, index, ids, _ in UpdateRows(frame):
            stream.put_plain_row(index, ids)
        resident = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.7 * stream.unread_bytes < resident <= stream.unread_bytes
    stream.end()
    stream.deliver()
    await task
    assert stream.unread_bytes == 0
