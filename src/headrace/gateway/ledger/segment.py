"""One file of usage records: how it is appended to, and read again after anything that may have happened to it.

    magic, then per record: length (4 bytes, big-endian), CRC-32 of the payload (4 bytes), payload

A write may be torn by a crash or a full disk, and a disk may give back other bytes than it got. Reading skips a record whose CRC is wrong
and ends where no whole record follows; what was left out is counted in bytes. Which file is written and read when: `spool`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

MAGIC = b"HRUSAGE1"
HEAD = struct.Struct(">II")
MAX_RECORD_BYTES = 1 << 20
"""A length beyond this is no length: what follows is damaged."""


class SegmentContent(NamedTuple):
    """payloads: of the whole records, in order;  num_damaged_bytes: of the file that belong to none of them"""

    payloads: list[bytes]
    num_damaged_bytes: int


def frame(payload: bytes) -> bytes:
    """A record as it stands in the file."""
    assert 0 < len(payload) <= MAX_RECORD_BYTES
    return HEAD.pack(len(payload), crc32(payload)) + payload


def read_segment(data: bytes) -> SegmentContent:
    """The records in a file's bytes. Never raises."""
    if not data.startswith(MAGIC):
        return SegmentContent([], len(data))
    payloads, good_bytes, place = [], len(MAGIC), len(MAGIC)
    while place + HEAD.size < len(data):
        size, checksum = HEAD.unpack_from(data, place)
        end = place + HEAD.size + size
        if not 0 < size <= MAX_RECORD_BYTES or end > len(data):
            break
        payload = data[place + HEAD.size : end]
        if crc32(payload) == checksum:
            payloads.append(payload)
            good_bytes += HEAD.size + size
        place = end
    return SegmentContent(payloads, len(data) - good_bytes)


def num_whole(frames: Iterable[bytes], num_bytes: int) -> tuple[int, int]:
    """How many of the frames lie whole within the first `num_bytes` of all, and how many bytes these are."""
    count = size = 0
    for one in frames:
        if size + len(one) > num_bytes:
            break
        count, size = count + 1, size + len(one)
    return count, size
