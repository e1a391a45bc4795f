"""Tests the order of a gateway's commands: cancels before submits, frames bounded, deadlines as they are when they leave."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_kit import request

from headrace.core.errors import InvalidRequest, RequestTooLarge
from headrace.core.update import FinishReason
from headrace.wire import headrace_pb2 as pb
from headrace.wire.service import Handle
from headrace.wire.session import MAX_FRAME_BYTES, MAX_SUBMIT_BYTES, UnwrittenCommands

pytestmark = pytest.mark.pure

LONG = tuple(range(100_000, 300_000))
"""600 000 bytes on the wire: two do not fit one frame."""


def kinds(frame: pb.ClientFrame) -> list[tuple[str, int]]:
    """(kind, handle) of each command."""
    found = [(str(command.WhichOneof("kind")), command) for command in frame.commands]
    return [(kind, getattr(command, kind).handle) for kind, command in found]


def test_what_an_earlier_attempt_has_put_out_counts_as_work() -> None:
    waiting = UnwrittenCommands()
    waiting.submit(replace(request("a", (1, 2, 3)), output_ids=(4, 5)), Handle(1))
    assert waiting.num_prefill_tokens == 5
    waiting.take(0.0)
    assert waiting.num_prefill_tokens == 0


def test_cancels_and_finishes_do_not_wait_behind_submits() -> None:
    waiting = UnwrittenCommands()
    for number in range(10, 15):
        waiting.submit(request(f"r{number}", LONG), Handle(number))
    waiting.cancel(Handle(1))
    waiting.finish(Handle(2), 0, 3, FinishReason.STOP)
    assert kinds(waiting.take(0.0)) == [("cancel", 1), ("finish", 2), ("submit", 10)]
    waiting.cancel(Handle(3))
    assert kinds(waiting.take(0.0)) == [("cancel", 3), ("submit", 11)]


def test_a_cancel_of_what_was_not_written_removes_both() -> None:
    waiting = UnwrittenCommands()
    waiting.submit(request("a", (1, 2)), Handle(1))
    waiting.submit(request("b", (1, 2, 3)), Handle(2))
    waiting.cancel(Handle(1))
    assert (len(waiting.handles), waiting.num_prefill_tokens) == (1, 3)
    assert kinds(waiting.take(0.0)) == [("submit", 2)]
    waiting.cancel(Handle(2))
    assert kinds(waiting.take(0.0)) == [("cancel", 2)], "it was written"


def test_a_finish_does_not_overtake_its_submit() -> None:
    waiting = UnwrittenCommands()
    waiting.submit(request("a"), Handle(1))
    waiting.submit(request("b"), Handle(2))
    waiting.finish(Handle(1), 0, 0, FinishReason.STOP)
    assert kinds(waiting.take(0.0)) == [("submit", 1), ("finish", 1), ("submit", 2)]


def test_what_remains_of_a_deadline_is_taken_when_the_frame_is() -> None:
    waiting = UnwrittenCommands()
    for number in (1, 2, 3):
        waiting.submit(request(f"r{number}", LONG, deadline_at=100.0), Handle(number))
    left = [waiting.take(now).commands[0].submit.deadline_remaining_ms for now in (90.0, 97.25, 200.0)]
    assert left == [10_000, 2750, 0]


def test_a_submit_that_no_frame_can_carry_is_refused_and_one_larger_than_a_frame_goes_alone() -> None:
    waiting = UnwrittenCommands()
    with pytest.raises(RequestTooLarge, match="prompt"):
        waiting.submit(request("huge", tuple([2**31] * (MAX_SUBMIT_BYTES // 5 + 1))), Handle(1))
    with pytest.raises(InvalidRequest):
        waiting.submit(request("odd", (-1,)), Handle(1))
    assert not waiting
    waiting.submit(request("small"), Handle(2))
    waiting.submit(request("large", LONG * 2), Handle(3))
    waiting.submit(request("small again"), Handle(4))
    assert [kinds(waiting.take(0.0)) for _ in range(3)] == [[("submit", 2)], [("submit", 3)], [("submit", 4)]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["submit", "cancel", "finish", "take"]), st.integers(1, 6), st.integers(0, 60_000))))
def test_everything_is_written_once_in_order_and_in_bounded_frames(acts: list[tuple[str, int, int]]) -> None:
    waiting, frames, submitted, expected = UnwrittenCommands(), [], set(), []
    for act, handle, length in acts:
        if act == "take":
            frames.append(waiting.take(0.0))
        elif act == "submit" and handle not in submitted:
            submitted.add(handle)
            expected.append(handle)
            waiting.submit(request(f"r{handle}", (2**28,) * length), Handle(handle))
        elif act == "cancel" and handle in submitted:
            is_written = any(("submit", handle) in kinds(frame) for frame in frames)
            waiting.cancel(Handle(handle))
            if not is_written and handle in expected:
                expected.remove(handle)
        elif act == "finish":
            waiting.finish(Handle(handle), 0, 1, FinishReason.STOP)
    while waiting:
        frames.append(waiting.take(0.0))
    assert [handle for frame in frames for kind, handle in kinds(frame) if kind == "submit"] == expected
    assert (len(waiting.handles), waiting.num_prefill_tokens) == (0, 0)
    assert all(frame.ByteSize() <= MAX_FRAME_BYTES + 10_000 for frame in frames)
