"""Tests that whatever happens to a file of records, what is read back was written, and what is lost is counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.ledger.spool import HEAD, MAGIC, MAX_RECORD_BYTES, frame, num_whole, read_segment

pytestmark = pytest.mark.pure

PAYLOADS = st.lists(st.binary(min_size=1, max_size=200), max_size=20)


def file_of(payloads: list[bytes]) -> bytes:
    return MAGIC + b"".join(map(frame, payloads))


@given(PAYLOADS)
def test_records_are_read_as_they_were_written(payloads: list[bytes]) -> None:
    assert read_segment(file_of(payloads)) == (payloads, 0)


@given(PAYLOADS, st.integers(0, 5000))
def test_a_torn_file_gives_its_whole_records(payloads: list[bytes], size: int) -> None:
    data = file_of(payloads)[:size]
    found = read_segment(data)
    assert found.payloads == payloads[: len(found.payloads)]
    good = len(file_of(found.payloads)) if data.startswith(MAGIC) else 0
    assert found.num_damaged_bytes == len(data) - good
    assert len(data) - good < HEAD.size + 200 or not data.startswith(MAGIC)


@given(PAYLOADS.filter(bool), st.data())
def test_a_changed_byte_costs_records_and_never_gives_a_wrong_one(payloads: list[bytes], data: st.DataObject) -> None:
    written = bytearray(file_of(payloads))
    place = data.draw(st.integers(0, len(written) - 1))
    written[place] ^= data.draw(st.integers(1, 255))
    found = read_segment(bytes(written))
    assert all(payload in payloads for payload in found.payloads)
    assert found.num_damaged_bytes > 0


def test_a_damaged_payload_costs_its_own_record_alone() -> None:
    written = bytearray(file_of([b"one", b"two", b"three"]))
    written[written.index(b"two")] ^= 1
    assert read_segment(bytes(written)) == ([b"one", b"three"], HEAD.size + 3)


def test_zeros_behind_the_last_record_are_no_records() -> None:
    """As a file system may leave them after a power cut: the CRC of nothing is zero, too."""
    assert read_segment(file_of([b"one"]) + bytes(4096)) == ([b"one"], 4096)


def test_another_file_has_no_records() -> None:
    assert read_segment(b"SQLite format 3\0" * 10) == ([], 160)
    assert read_segment(b"") == ([], 0)


def test_a_length_beyond_the_largest_record_ends_the_reading() -> None:
    data = file_of([b"one"]) + HEAD.pack(MAX_RECORD_BYTES + 1, 0) + b"x" * 100
    assert read_segment(data) == ([b"one"], HEAD.size + 100)


@given(PAYLOADS, st.integers(0, 5000))
def test_whole_frames_are_counted(payloads: list[bytes], num_bytes: int) -> None:
    frames = [frame(payload) for payload in payloads]
    count, size = num_whole(frames, num_bytes)
    assert size == sum(map(len, frames[:count])) <= num_bytes
    assert count == len(frames) or size + len(frames[count]) > num_bytes
