"""Tests that unsent updates are bounded and merged: at any pace of the reader, each sequence's updates arrive whole, once and in order."""

from __future__ import annotations

import gc
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest
from figures import Figure
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_kit import decode_updates

from headrace.core.errors import ModelNotFound, Overloaded
from headrace.core.ids import RequestId
from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.core.plan import LogprobColumns, TokenLogprobs
from headrace.core.update import FinishReason, MissReason, SequenceUpdate, StageSeconds
from headrace.engine.server.unread import MAX_MERGED_ENTRIES, PAGE_POSITIONS, UNIT_BYTES, put, take
from headrace.engine.server.unsent import (
    FRAME_ENTRIES,
    MAX_REJECTED_BYTES,
    MAX_UNITS,
    REFUSAL_BYTES_PER_UNIT,
    UnsentFrames,
)
from headrace.wire import headrace_pb2 as pb
from headrace.wire.service import Attempt, Handle

pytestmark = pytest.mark.pure

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
    unsent, count = UnsentFrames(), 3 * FRAME_ENTRIES
    for i in range(count):
        unsent.put(Handle(1), SequenceUpdate(RequestId("r1"), 0, 0, (i,)))
    assert unsent.num_units < count + 1000
    got: list[int] = []
    while (frame := unsent.take()) is not None:
        taken = [token_id for _, update in rows(frame) for token_id in update.token_ids]
        assert len(taken) < FRAME_ENTRIES + MAX_MERGED_ENTRIES
        got += taken
    assert got == list(range(count))
    assert unsent.num_units == 0


def ended(number: int) -> dict[str, Any]:
    return {
        "finish": FinishReason.LENGTH,
        "num_cached_tokens": 2000 + number,
        "queue_time_s": 1.5 * number,
        "stages": StageSeconds(*[number * second for second in (0.1, 0.2, 0.3, 0.4, 0.5)]),
    }


def failed(number: int) -> dict[str, Any]:
    return ended(number) | {"finish": FinishReason.ERROR, "error": f"{number}" + 2000 * "x"}


@pytest.mark.parametrize(
    ("num_sequences", "num_updates", "num_tokens", "num_top", "num_prompt", "end"),
    [
        (500, 1, 1, None, 0, None),
        (500, 2, 1, None, 0, None),
        (4, 500, 1, None, 0, None),
        (1, 4000, 1, None, 0, None),
        (200, 1, 8, None, 0, None),
        (200, 1, 1, 0, 0, None),
        (200, 1, 1, 20, 0, None),
        (4, 100, 1, 0, 0, None),
        (4, 100, 1, 20, 0, None),
        (4, 15, 0, 0, 64, None),
        (4, 15, 0, 20, 64, None),
        (200, 1, 0, 0, 1, None),
        (200, 1, 0, 20, 1, None),
        (100, 1, 1, 128, 0, None),
        (50, 1, 1000, None, 0, None),
        (50, 2, 1000, None, 0, None),
        (200, 1, 1, None, 0, ended),
        (200, 2, 1, None, 0, ended),
        (200, 1, 0, None, 0, failed),
        (200, 2, 0, None, 0, failed),
    ],
)
def test_a_unit_is_at_least_the_memory_that_unread_rows_take(
    num_sequences: int,
    num_updates: int,
    num_tokens: int,
    num_top: int | None,
    num_prompt: int,
    end: Callable[[int], dict[str, Any]] | None,
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
                facts = end(handle) if end is not None and number == num_updates - 1 else {}
                update = SequenceUpdate(RequestId("r"), 0, 0, token_ids, logprobs(num_tokens, begin), logprobs(num_prompt, begin), **facts)
                unsent.put(Handle(handle), update)
        del update, token_ids, handle, facts
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held <= UNIT_BYTES * unsent.num_units


def test_large_news_is_split_into_frames_and_the_end_comes_last() -> None:
    unsent = UnsentFrames()
    unsent.put(Handle(1), news(1, 0, (1, 2), 5 * FRAME_ENTRIES // 4, finish=FinishReason.LENGTH))
    unsent.put(Handle(2), news(2, 0, (3,)))
    frames: list[pb.EngineFrame] = []
    while (frame := unsent.take()) is not None:
        assert frame.ByteSize() < 2**20
        frames.append(frame)
    updates = [update for frame in frames for handle, update in rows(frame) if handle == 1]
    assert len(updates) == 2
    assert [entry.token_id for update in updates for entry in update.prompt_logprobs] == list(range(5 * FRAME_ENTRIES // 4))
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


@pytest.mark.timing
@pytest.mark.parametrize(
    ("name", "served", "count"),
    [("m", [], 40_000), ("m" * 256, ["n" * 100] * 20, 2_000), ("m", ["x" * 10_000], 2_000)],
    ids=["short", "usual", "long"],
)
def test_refusals_count_by_the_memory_they_hold(name: str, served: list[str], count: int, figure: Figure) -> None:
    """Each counted as one token: a gateway that does not read could leave a million of the longest, 10 GB, and keep its lease."""
    unsent = UnsentFrames()
    before = psutil.Process().memory_info().rss
    for number in range(count):
        unsent.put_rejected(Handle(number), ModelNotFound(name, served))
    held = psutil.Process().memory_info().rss - before
    held_when_full = MAX_UNITS // (unsent.num_units // count) * held // count
    figure("held when full", held_when_full / 2**20, 64, "MiB", slack=2)
    assert held_when_full > 2 << 20, "no memory was seen to be held, or a refusal counts for far more than it holds"


def test_refusals_take_no_room_of_the_rows_in_a_frame() -> None:
    unsent = UnsentFrames()
    for number in range(FRAME_ENTRIES // 16):
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
        put(news(1, 0, (1,)), news(1, 1, (2,)))


@pytest.mark.parametrize(
    "later", [{}, {"num_cached_tokens": 5, "queue_time_s": 0.75, "miss_reason": MissReason.NOT_USED}], ids=["once", "twice"]
)
def test_a_first_tokens_facts_stay_as_they_came_first(later: dict[str, Any]) -> None:
    first = news(1, 0, (1,))._replace(num_cached_tokens=3, queue_time_s=0.5, miss_reason=MissReason.EVICTED)
    waiting, _ = put(first, news(1, 0, (2,), finish=FinishReason.STOP)._replace(**later))
    both, left = take(waiting, FRAME_ENTRIES)
    assert (both.token_ids, both.num_cached_tokens, both.queue_time_s, both.finish) == ((1, 2), 3, 0.5, FinishReason.STOP)
    assert both.miss_reason is MissReason.EVICTED
    assert left == []


def test_an_update_that_waits_for_no_other_is_sent_as_it_came() -> None:
    """A gateway that keeps up pays for no merging."""
    update = news(1, 0, (1,), num_prompt=3, finish=FinishReason.STOP)
    waiting, num_units = put(None, update)
    assert waiting is update
    assert num_units > 0
    assert take(waiting, 1) == (update, [])


def test_merged_log_probabilities_are_taken_without_an_object_per_position(monkeypatch: pytest.MonkeyPatch) -> None:
    unsent, count = UnsentFrames(), 500
    for _ in range(count):
        unsent.put(Handle(1), news(1, 0, (1,), num_prompt=64))

    def unwanted(_: LogprobColumns) -> None:
        raise AssertionError("columns were read position by position")

    with monkeypatch.context() as patch:
        patch.setattr(LogprobColumns, "__iter__", unwanted)
        frames = [unsent.take(), unsent.take()]
    updates = [update for frame in frames if frame is not None for _, update in rows(frame)]
    assert sum(len(update.prompt_logprobs) for update in updates) == 64 * count
    assert unsent.is_empty


@pytest.mark.parametrize("count", [2000, FRAME_ENTRIES])
def test_a_steps_tokens_are_one_frame_however_many_sequences_have_one(count: int) -> None:
    """A frame is not filled by what its rows are charged in memory: 1,310 of them would take a mebibyte's units."""
    unsent = UnsentFrames()
    for handle in range(1, count + 1):
        unsent.put(Handle(handle), SequenceUpdate(RequestId("r"), 0, 0, (handle,)))
    frame = unsent.take()
    assert frame is not None
    assert len(frame.updates.handles) == count
    assert frame.ByteSize() < 2**20
    assert (unsent.is_empty, unsent.num_units) == (True, 0)


def test_long_messages_of_failed_sequences_are_spread_over_frames() -> None:
    unsent, count = UnsentFrames(), 1000
    for handle in range(1, count + 1):
        unsent.put(Handle(handle), SequenceUpdate(RequestId("r"), 0, 0, **failed(handle)))
    handles: list[int] = []
    while (frame := unsent.take()) is not None:
        assert frame.ByteSize() < 2**20 + 4000
        handles += frame.updates.handles
    assert handles == list(range(1, count + 1))


def scored(draw: st.DrawFn, num_positions: int) -> tuple[TokenLogprobs, ...]:
    begin, num_top = draw(st.integers(0, 2**30)), draw(st.sampled_from((0, 3, 20)))
    tops = tuple(range(begin, begin + num_top)), tuple(-0.1 * k for k in range(num_top))
    return tuple(TokenLogprobs(begin + i, -1.0 / (1 + i), 1 + i, *tops) for i in range(num_positions))


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[Handle, SequenceUpdate] | None]:
    """Updates of four sequences as an engine makes them, and None where the gateway takes a frame."""
    story: list[tuple[Handle, SequenceUpdate] | None] = []
    keys = [(number, index) for number in (1, 2) for index in (0, 1)]
    with_logprobs = {key: draw(st.booleans()) for key in keys}
    begun: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(1, 40))):
        if not keys or draw(st.integers(0, 7)) == 0:
            story.append(None)
            continue
        number, index = key = draw(st.sampled_from(keys))
        token_ids = tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=3)))
        facts: dict[str, Any] = {"logprobs": scored(draw, len(token_ids))} if with_logprobs[key] else {}
        if draw(st.integers(0, 4)) == 0:
            facts["prompt_logprobs"] = scored(draw, draw(st.sampled_from((1, 4, PAGE_POSITIONS + 1, 2 * PAGE_POSITIONS + 52))))
        if token_ids and key not in begun:
            begun.add(key)
            facts |= {"num_cached_tokens": draw(st.integers(0, 99)), "queue_time_s": draw(st.floats(0, 1))}
            facts["miss_reason"] = draw(st.sampled_from(MissReason))
        if draw(st.integers(0, 15)) == 0:
            keys.remove(key)
            facts |= {"finish": FinishReason.ERROR, "error": "x", "stop_token_id": 5, "stages": StageSeconds(1.0, 2.0, 3.0, 4.0, 5.0)}
        story.append((Handle(number), SequenceUpdate(RequestId(f"r{number}"), 0, index, token_ids, **facts)))
    return story


def joined(updates: list[tuple[Handle, SequenceUpdate]]) -> dict[tuple[Handle, int], list[Any]]:
    """Per sequence: its tokens and log-probabilities in order, and each other field's values."""
    found: dict[tuple[Handle, int], list[Any]] = {}
    for handle, update in updates:
        columns = found.setdefault((handle, update.index), [[] for _ in update[3:]])
        for column, values in zip(columns, [*update[3:6], *[[] if fact in (None, ()) else [fact] for fact in update[6:]]], strict=True):
            column.extend(values)
    return found


@settings(deadline=None, max_examples=60)
@given(stories())
def test_all_that_is_put_arrives_once_and_in_order_at_any_pace(story: list[tuple[Handle, SequenceUpdate] | None]) -> None:
    unsent = UnsentFrames()
    arrived: list[tuple[Handle, SequenceUpdate]] = []
    for event in [*story, *[None] * 40]:
        if event is not None:
            unsent.put(*event)
        elif (frame := unsent.take()) is not None:
            arrived += rows(frame)
    assert joined(arrived) == joined([event for event in story if event is not None])
    assert (unsent.is_empty, unsent.num_units) == (True, 0)
