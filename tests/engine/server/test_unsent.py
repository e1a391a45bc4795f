"""The bounded, coalescing unsent: whatever the pace of its reader, every sequence's news arrives whole, once and in order."""

from __future__ import annotations

import gc
import tracemalloc
from collections import defaultdict
from dataclasses import replace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from update_rows import decode_updates

from headrace.core.errors import ModelNotFound, Overloaded
from headrace.core.finish import FinishReason
from headrace.core.ids import RequestId
from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.core.plan import TokenLogprobs
from headrace.core.update import SequenceUpdate
from headrace.engine.server.unread import MAX_MERGED_UNITS, PAGE_POSITIONS, UNIT_BYTES, merge
from headrace.engine.server.unsent import (
    FRAME_UNITS,
    MAX_REJECTED_BYTES,
    MAX_UNITS,
    REFUSAL_BYTES_PER_UNIT,
    UnsentFrames,
)
from headrace.wire import headrace_pb2 as pb
from headrace.wire.handles import Attempt, Handle

LOAD = LoadSnapshot(
    num_running=0,
    num_waiting=0,
    kv_blocks_free=0,
    kv_blocks_cached=0,
    kv_blocks_used=0,
    kv_blocks_total=0,
    counters=EngineCounters(),
)


def news(handle: int, index: int, token_ids: tuple[int, ...], num_prompt: int = 0, *, finish: FinishReason | None = None) -> SequenceUpdate:
    return SequenceUpdate(
        request_id=RequestId(f"r{handle}"),
        epoch=0,
        index=index,
        token_ids=token_ids,
        logprobs=tuple(TokenLogprobs(token, -1.0, 1) for token in token_ids),
        prompt_logprobs=tuple(TokenLogprobs(i, -2.0, 1) for i in range(num_prompt)),
        finish=finish,
    )


def rows(frame: pb.EngineFrame) -> list[tuple[Handle, SequenceUpdate]]:
    return decode_updates(frame.updates, lambda handle: Attempt(RequestId(f"r{handle}"), 0))


steps = st.lists(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1), st.lists(st.integers(0, 9), max_size=3)), max_size=4) | st.none(), max_size=12
)


@settings(deadline=None, max_examples=60)
@given(steps)
def test_every_token_arrives_once_and_in_order_at_any_pace(script: list[list[tuple[int, int, list[int]]] | None]) -> None:
    """None: the reader takes a frame; a list: a step's updates."""
    unsent = UnsentFrames()
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    got: dict[tuple[int, int], list[int]] = defaultdict(list)
    for step in [*script, *[None] * 20]:
        if step is None:
            frame = unsent.take()
            for handle, update in rows(frame) if frame is not None else []:
                got[handle, update.index].extend(update.token_ids)
                assert [entry.token_id for entry in update.logprobs] == list(update.token_ids)
        else:
            for number, index, token_ids in step:
                unsent.put(Handle(number), news(number, index, tuple(token_ids)))
                sent[number, index].extend(token_ids)
    assert {key: value for key, value in got.items() if value} == {key: value for key, value in sent.items() if value}
    assert unsent.is_empty
    assert unsent.num_units == 0


def test_a_slow_reader_gets_one_row_per_sequence() -> None:
    unsent = UnsentFrames()
    for i in range(100):
        unsent.put(Handle(1), news(1, 0, (i,)))
    unsent.put(Handle(1), news(1, 0, (100,), finish=FinishReason.STOP))
    frame = unsent.take()
    assert frame is not None
    [(_, update)] = rows(frame)
    assert update.token_ids == tuple(range(101))
    assert update.finish is FinishReason.STOP
    assert unsent.take() is None


def test_what_waits_long_becomes_few_parts_and_no_frame_too_large() -> None:
    unsent, count = UnsentFrames(), 4 * MAX_MERGED_UNITS
    for i in range(count):
        unsent.put(Handle(1), SequenceUpdate(RequestId("r1"), 0, 0, (i,)))
    assert unsent.num_units < count + 1000
    got: list[int] = []
    while (frame := unsent.take()) is not None:
        got += [token_id for _, update in rows(frame) for token_id in update.token_ids]
    assert got == list(range(count))
    assert unsent.num_units == 0


@pytest.mark.parametrize(
    ("num_sequences", "num_updates", "num_tokens", "num_top", "num_prompt"),
    [
        (2000, 1, 1, None, 0),
        (2000, 2, 1, None, 0),
        (4, 2000, 1, None, 0),
        (1, 20_000, 1, None, 0),
        (1000, 1, 8, None, 0),
        (500, 1, 1, 0, 0),
        (500, 1, 1, 20, 0),
        (4, 500, 1, 0, 0),
        (4, 500, 1, 20, 0),
        (4, 50, 0, 0, 64),
        (4, 50, 0, 20, 64),
        (500, 1, 0, 0, 1),
    ],
)
def test_a_unit_is_at_least_the_memory_that_unread_rows_take(
    num_sequences: int, num_updates: int, num_tokens: int, num_top: int | None, num_prompt: int
) -> None:
    """An update of one token was charged 32 bytes and held 233: a gateway that did not read could leave 240 MiB of them."""

    def logprobs(count: int, begin: int) -> tuple[TokenLogprobs, ...]:
        if num_top is None:
            return ()
        return tuple(
            TokenLogprobs(
                begin + i, -1.0 - i, 1000 + i, tuple(range(begin + 300, begin + 300 + num_top)), tuple(-0.5 * k for k in range(num_top))
            )
            for i in range(count)
        )

    unsent = UnsentFrames()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(num_updates):
            for handle in range(1000, 1000 + num_sequences):
                begin = 1000 + 64 * number
                token_ids = tuple(range(begin, begin + num_tokens))
                update = SequenceUpdate(RequestId("r"), 0, 0, token_ids, logprobs(num_tokens, begin), logprobs(num_prompt, begin))
                unsent.put(Handle(handle), update)
        del update, token_ids, handle
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held <= UNIT_BYTES * unsent.num_units


def test_large_news_is_split_into_frames_and_the_end_comes_last() -> None:
    unsent = UnsentFrames()
    unsent.put(Handle(1), news(1, 0, (1, 2), 5 * FRAME_UNITS // 4, finish=FinishReason.LENGTH))
    unsent.put(Handle(2), news(2, 0, (3,)))
    frames: list[pb.EngineFrame] = []
    while (frame := unsent.take()) is not None:
        assert frame.ByteSize() < 2**20
        frames.append(frame)
    updates = [update for frame in frames for handle, update in rows(frame) if handle == 1]
    assert len(updates) == 2
    assert [entry.token_id for update in updates for entry in update.prompt_logprobs] == list(range(5 * FRAME_UNITS // 4))
    assert [update.finish for update in updates] == [None, FinishReason.LENGTH]
    assert [update.token_ids for update in updates] == [(), (1, 2)]


def test_a_page_is_small_enough_for_others_to_get_between() -> None:
    unsent = UnsentFrames()
    wide = tuple(TokenLogprobs(i, -2.0, 1, tuple(range(20)), (-1.0,) * 20) for i in range(4 * PAGE_POSITIONS))
    unsent.put(Handle(1), news(1, 0, (1,))._replace(prompt_logprobs=wide))
    unsent.put(Handle(2), news(2, 0, (3,)))
    sizes = []
    while (frame := unsent.take()) is not None:
        sizes.append(frame.ByteSize())
    assert len(sizes) > 1
    assert max(sizes) < 2**20


def test_a_forgotten_request_leaves_nothing_behind() -> None:
    unsent = UnsentFrames()
    unsent.put(Handle(1), news(1, 0, (1, 2)))
    unsent.put(Handle(1), news(1, 1, (1, 2)))
    unsent.put(Handle(2), news(2, 0, (7,)))
    unsent.forget(Handle(1))
    frame = unsent.take()
    assert frame is not None
    assert [(handle, update.token_ids) for handle, update in rows(frame)] == [(2, (7,))]
    assert unsent.num_units == 0


def test_an_unsent_load_is_replaced() -> None:
    unsent = UnsentFrames()
    unsent.put_load(replace(LOAD, num_running=1), 1)
    unsent.put_load(replace(LOAD, num_running=2), 4)
    frame = unsent.take()
    assert frame is not None
    assert (frame.load.num_running, frame.submits_seen) == (2, 4)
    assert unsent.is_empty


def test_rejections_and_the_draining_notice_are_sent_once() -> None:
    unsent = UnsentFrames()
    unsent.put_rejected(Handle(3), Overloaded("full"))
    unsent.put_draining("stopping")
    assert unsent.has_answers
    frame = unsent.take()
    assert frame is not None
    assert (frame.rejected[0].handle, frame.draining.reason) == (3, "stopping")
    assert unsent.take() is None


def test_refusals_fill_no_frame_beyond_its_bound_and_keep_their_order() -> None:
    unsent, count = UnsentFrames(), 40_000
    for number in range(1, count + 1):
        unsent.put_rejected(Handle(number), Overloaded("x" * 500))
    unsent.put(Handle(count + 1), news(count + 1, 0, (7,)))
    assert unsent.num_units > count * 500 // REFUSAL_BYTES_PER_UNIT
    frames = []
    while (frame := unsent.take()) is not None:
        frames.append(frame)
        assert frame.ByteSize() < MAX_REJECTED_BYTES + 10_000
    assert [rejected.handle for frame in frames for rejected in frame.rejected] == list(range(1, count + 1))
    assert [update.token_ids for frame in frames for _, update in rows(frame)] == [(7,)]
    assert (unsent.num_units, unsent.is_empty) == (0, True)


@pytest.mark.parametrize(
    ("name", "served", "count"),
    [("m", [], 40_000), ("m" * 256, ["n" * 100] * 20, 2_000), ("m", ["x" * 10_000], 2_000)],
    ids=["short", "usual", "long"],
)
def test_refusals_count_by_the_memory_they_hold(name: str, served: list[str], count: int) -> None:
    """Each counted as one token: a gateway that does not read could leave a million of the longest, 10 GB, and keep its lease."""
    unsent = UnsentFrames()
    before = psutil.Process().memory_info().rss
    for number in range(count):
        unsent.put_rejected(Handle(number), ModelNotFound(name, served))
    held = psutil.Process().memory_info().rss - before
    held_when_full = MAX_UNITS // (unsent.num_units // count) * held // count
    assert held_when_full < 128 << 20
    assert held_when_full > 2 << 20, "no memory was seen to be held, or a refusal counts for far more than it holds"


def test_refusals_take_no_room_of_the_rows_in_a_frame() -> None:
    unsent = UnsentFrames()
    for number in range(FRAME_UNITS // 16):
        unsent.put_rejected(Handle(number), ModelNotFound("m", ["n" * 3_000]))
    for handle in (1, 2):
        unsent.put(Handle(handle), news(handle, 0, (1, 2)))
    frame = unsent.take()
    assert frame is not None
    assert len(rows(frame)) == 2
    while unsent.take() is not None:
        pass
    assert unsent.num_units == 0


def test_one_refusal_above_the_bound_travels_alone() -> None:
    unsent = UnsentFrames()
    unsent.put_rejected(Handle(1), ModelNotFound("m", ["x" * 2 * MAX_REJECTED_BYTES]))
    unsent.put_rejected(Handle(2), Overloaded("full"))
    frames = [unsent.take(), unsent.take(), unsent.take()]
    assert [frame and [rejected.handle for rejected in frame.rejected] for frame in frames] == [[1], [2], None]


def test_only_one_sequences_updates_can_be_merged() -> None:
    with pytest.raises(ValueError, match="one sequence"):
        merge([news(1, 0, (1,)), news(1, 1, (2,))])
    first = news(1, 0, (1,))._replace(num_cached_tokens=3, queue_time_s=0.5)
    both = merge([first, news(1, 0, (2,), finish=FinishReason.STOP)])
    assert (both.num_cached_tokens, both.queue_time_s, both.finish) == (3, 0.5, FinishReason.STOP)
