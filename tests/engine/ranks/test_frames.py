"""Tests the frames between ranks: what is sent is what is read, and nothing else is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.core.errors import EngineFatal
from headrace.engine.ranks.frames import (
    HEADER,
    INT_BYTES,
    MAGIC,
    NO_ADAPTER,
    AdapterOrder,
    FrameKind,
    LoadedAdapter,
    RankFailure,
    RankHello,
    RankSizes,
    Said,
    StepLimits,
    frame,
    int_frame,
    json_frame,
    read_header,
    read_ints,
    read_json,
    read_step,
    step_frame,
)
from headrace.tensor.batch import ForwardBatch, GroupBatch, StepAdapters

pytestmark = pytest.mark.pure

LIMITS = StepLimits(max_tokens=24, max_rows=6, table_width=5, num_groups=2, max_places=4)
Step = tuple[Tensor, ForwardBatch, tuple[int, ...]]


class Part(NamedTuple):
    """Of an adapter."""

    number: int
    num_bytes: int = 0


PARTS = {number: Part(number) for number in range(20)}


@st.composite
def steps(draw: st.DrawFn) -> Step:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=LIMITS.max_rows))
    num_tokens, num_rows = sum(counts), len(counts)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    selected = draw(st.one_of(st.none(), st.sets(st.integers(0, num_tokens - 1))))

    def ints(*shape: int, dtype: type[np.signedinteger] = np.int64) -> Tensor:
        return torch.from_numpy(random.integers(0, 1 << 30, shape).astype(dtype))

    groups = []
    for _ in range(LIMITS.num_groups):
        width = draw(st.integers(1, LIMITS.table_width))
        groups.append(GroupBatch(ints(num_rows, width, dtype=np.int32), ints(num_tokens)))
    batch = ForwardBatch(
        positions=ints(num_tokens),
        row_starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        context_lens=ints(num_rows, dtype=np.int32),
        max_count=max(counts),
        groups=tuple(groups),
        selected=None if selected is None else torch.tensor(sorted(selected), dtype=torch.int64),
        num_decodes=draw(st.integers(0, num_rows)),
    )
    numbers = draw(st.lists(st.sampled_from([NO_ADAPTER, *PARTS]), max_size=LIMITS.max_places - 1))
    if numbers:
        slots = torch.from_numpy(random.integers(0, len(numbers) + 1, num_tokens).astype(np.int32))
        batch.adapters = StepAdapters(slots, ())
    return ints(num_tokens), batch, (NO_ADAPTER, *numbers) if numbers else ()


def tensors(ids: Tensor, batch: ForwardBatch) -> list[Tensor]:
    groups = [tensor for group in batch.groups for tensor in (group.block_table, group.slot_mapping)]
    optional = [batch.selected, None if batch.adapters is None else batch.adapters.slots]
    return [ids, batch.positions, batch.row_starts, batch.context_lens, *groups, *(each for each in optional if each is not None)]


def payload_of(data: bytes) -> bytearray:
    return bytearray(data[HEADER.size :])


@given(steps())
def test_a_step_is_read_as_it_was_sent(step: Step) -> None:
    data = step_frame(*step)
    assert read_header(data, LIMITS.allowed) == (FrameKind.STEP, len(data) - HEADER.size)
    ids, batch = read_step(payload_of(data), LIMITS, PARTS)
    for sent, read in zip(tensors(*step[:2]), tensors(ids, batch), strict=True):
        assert sent.dtype == read.dtype
        assert sent.tolist() == read.tolist()
    assert (batch.selected is None) == (step[1].selected is None)
    assert (batch.max_count, batch.num_decodes) == (step[1].max_count, step[1].num_decodes)
    assert (batch.adapters is None) == (not step[2])
    if batch.adapters is not None:
        assert batch.adapters.resident == tuple(PARTS.get(number) for number in step[2])
        slots, chosen = batch.adapters.slots, batch.adapters.selected_slots
        assert (chosen is None) == (batch.selected is None)
        assert chosen is None or chosen.tolist() == slots[batch.selected].tolist()


def largest() -> Step:
    limits = LIMITS
    num_tokens, num_rows = limits.max_tokens, limits.max_rows
    groups = tuple(
        GroupBatch(torch.zeros(num_rows, limits.table_width, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int64))
        for _ in range(limits.num_groups)
    )
    starts = torch.tensor([*range(num_rows), num_tokens], dtype=torch.int32)
    lens = torch.ones(num_rows, dtype=torch.int32)
    adapters = StepAdapters(torch.zeros(num_tokens, dtype=torch.int32), ())
    most, every = num_tokens - num_rows + 1, torch.arange(num_tokens)
    batch = ForwardBatch(torch.arange(num_tokens), starts, lens, most, groups, adapters, selected=every)
    return torch.zeros(num_tokens, dtype=torch.int64), batch, (NO_ADAPTER, 3, 1, 2)


def test_the_largest_step_has_the_most_bytes() -> None:
    assert len(payload_of(step_frame(*largest()))) == LIMITS.max_bytes


@pytest.mark.parametrize(
    ("less", "name"),
    [
        ({"max_tokens": 23}, "num_tokens is 24, outside 1..23"),
        ({"max_rows": 5}, "num_rows is 6, outside 1..5"),
        ({"table_width": 4}, "table width is 5, outside 1..4"),
        ({"max_places": 3}, "num_places is 4, outside 0..3"),
    ],
)
def test_a_step_beyond_what_a_step_may_have_is_refused_by_name(less: dict[str, int], name: str) -> None:
    data = step_frame(*largest())
    limits = replace(LIMITS, **less)
    with pytest.raises(EngineFatal, match=f"STEP has {LIMITS.max_bytes} bytes, more than {limits.max_bytes}"):
        read_header(data, limits.allowed)
    with pytest.raises(EngineFatal, match=name):
        read_step(payload_of(data), limits, PARTS)


def test_a_step_that_names_an_adapter_which_is_not_loaded_is_refused() -> None:
    ids, batch, _ = largest()
    for parts in ({}, {7: None}):
        with pytest.raises(EngineFatal, match="names adapter 7, which is not loaded"):
            read_step(payload_of(step_frame(ids, batch, (NO_ADAPTER, 7))), LIMITS, parts)


@given(steps(), st.integers(0, 7), st.integers(-(2**63), 2**63 - 1))
def test_a_number_that_does_not_fit_the_arrays_is_refused(step: Step, place: int, number: int) -> None:
    """max_count and num_decodes do not decide how long the arrays are: another one within its bounds is read. So is no selected token for
    all of them."""
    payload = payload_of(step_frame(*step))
    numbers = np.frombuffer(payload, np.int64, 8)
    before, numbers[place] = int(numbers[place]), number
    bounds = {3: (1, step[1].num_tokens), 4: (0, len(step[1].context_lens)), **({2: (-1, 0)} if place == 2 and before <= 0 else {})}
    low, high = bounds.get(place, (before, before))
    if low <= number <= high:
        read_step(payload, LIMITS, PARTS)
        return
    with pytest.raises(EngineFatal):
        read_step(payload, LIMITS, PARTS)


@given(steps(), st.data())
def test_a_step_that_is_cut_off_or_goes_on_is_refused(step: Step, data: st.DataObject) -> None:
    payload = payload_of(step_frame(*step))
    size = data.draw(st.integers(0, len(payload) + 16).filter(lambda size: size != len(payload)))
    with pytest.raises(EngineFatal):
        read_step((payload + bytes(16))[:size], LIMITS, PARTS)


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_what_is_no_header_is_refused(data: bytes) -> None:
    if data[:4] != MAGIC:
        with pytest.raises(EngineFatal, match="a frame begins with"):
            read_header(data, LIMITS.allowed)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (frame(FrameKind.HELLO), "kind 1 where only STEP, LOGITS, COPY, CLEAR, END, ADAPTER, DROP may come"),
        (HEADER.pack(MAGIC, 99, 0), "kind 99 where only"),
        (int_frame(FrameKind.LOGITS, 1, 2), "LOGITS has 16 bytes, more than 8"),
        (int_frame(FrameKind.END, 1), "END has 8 bytes, more than 0"),
        (HEADER.pack(MAGIC, FrameKind.COPY, 2**63), "COPY has 9223372036854775808 bytes, more than 24"),
    ],
)
def test_a_frame_that_may_not_come_is_refused_by_its_header(data: bytes, why: str) -> None:
    with pytest.raises(EngineFatal, match=why):
        read_header(data, LIMITS.allowed)


def test_numbers_are_read_as_they_were_sent_and_counted() -> None:
    payload = payload_of(int_frame(FrameKind.COPY, 1, -2, 2**40))
    assert read_ints(payload, 3) == [1, -2, 2**40]
    with pytest.raises(EngineFatal, match="has 24 bytes instead of 2 numbers"):
        read_ints(payload, 2)


SAID: list[Said] = [
    RankHello(3, {"dtype": "float32"}),
    RankFailure("no memory", is_refused=True),
    RankSizes(12, 1 << 40, "ab", "cd"),
    AdapterOrder(4, "/srv/\udc80 adapters", "ab"),
    LoadedAdapter(4, "cannot be read"),
]


@pytest.mark.parametrize("said", SAID, ids=lambda said: type(said).__name__)
def test_json_is_read_as_it_was_sent(said: Said) -> None:
    assert read_json(type(said), payload_of(json_frame(FrameKind.HELLO, said))) == said


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data.replace(b'"rank"', b'"runk"'),
        lambda data: data.replace(b"3", b'"3"'),
        lambda data: data.replace(b"3", b"3.0"),
        lambda data: data.replace(b"{", b"[").replace(b"}", b"]"),
        lambda data: b"[" * 10_000,
        lambda data: b"\xff" + data,
        lambda data: b"",
    ],
)
def test_json_of_another_form_is_refused(change: Callable[[bytes], bytes]) -> None:
    data = bytes(payload_of(json_frame(FrameKind.HELLO, SAID[0])))
    with pytest.raises(EngineFatal, match="a frame is no RankHello"):
        read_json(RankHello, bytearray(change(data)))


def test_alignment_is_kept_whatever_is_sent() -> None:
    """Kernels read the arrays where they came in."""
    step = read_step(payload_of(step_frame(*largest())), LIMITS, PARTS)
    payload = step[0].data_ptr()
    for tensor in tensors(*step):
        assert (tensor.data_ptr() - payload) % (INT_BYTES if tensor.dtype == torch.int64 else 4) == 0
