"""Tests the folder of records that were not shipped: a dead writer, a full disk or a second reading costs no more than it must."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from ledger_kit import usage

from headrace.gateway.ledger import spool as spool_module
from headrace.gateway.ledger.spool import DISK_BLOCK_BYTES, MANY_SEGMENTS, OPEN, OpenSegment, Spool, frame, read_segment
from headrace.gateway.ledger.spool_thread import SpoolThread

pytestmark = pytest.mark.pure


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", ["sql", "kafka"])


def payloads(spool: Spool, sink: str) -> list[bytes]:
    return [payload for path in spool.waiting(sink) for payload in read_segment(path.read_bytes()).payloads]


def write(spool: Spool, *records: bytes, serial: int = 1) -> Counter[str]:
    segment = OpenSegment(spool, serial=serial)
    assert segment.append([frame(record) for record in records]) == len(records)
    return segment.close()


def test_a_closed_segment_waits_for_every_sink(spool: Spool) -> None:
    assert not write(spool, b"one", b"two")
    assert payloads(spool, "sql") == payloads(spool, "kafka") == [b"one", b"two"]
    assert not os.listdir(spool.folder / OPEN)


def test_an_open_segment_waits_for_none(spool: Spool) -> None:
    segment = OpenSegment(spool, serial=1)
    segment.append([frame(b"one")])
    assert not spool.adopt(), "its process lives"
    assert payloads(spool, "sql") == []
    segment.close()
    assert payloads(spool, "sql") == [b"one"]


def test_segments_of_a_dead_process_are_adopted_with_what_was_whole(spool: Spool) -> None:
    path = spool.folder / OPEN / "1-1-1.seg"
    segment = OpenSegment(spool, serial=1)
    segment.append([frame(b"one")])
    data = segment.path.read_bytes() + frame(b"torn")[:-1]
    segment.close()
    path.write_bytes(data)  # without a lock: as a process leaves it that was killed in a write
    assert not spool.adopt()
    assert payloads(spool, "kafka") == [b"one", b"one"]
    assert not path.exists()


def test_an_adoption_that_was_cut_off_is_done_again(spool: Spool) -> None:
    write(spool, b"one")
    [closed] = spool.waiting("sql")
    os.link(closed, spool.folder / OPEN / closed.name)  # linked, and killed before the unlink
    spool.adopt()
    assert payloads(spool, "sql") == payloads(spool, "kafka") == [b"one"]
    assert not os.listdir(spool.folder / OPEN)


def test_a_sink_that_is_behind_drops_the_newest_and_the_other_one_gets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "MAX_BYTES", 2 * DISK_BLOCK_BYTES)
    spool = Spool(tmp_path / "spool", ["sql", "kafka"])
    dropped: Counter[str] = Counter()
    for number in range(5):
        dropped += write(spool, b"%d" % number, b"and %d" % number, serial=number)
        for path in spool.waiting("sql"):
            path.unlink()
    assert dropped == {"kafka": 6}
    assert payloads(spool, "kafka") == [b"0", b"and 0", b"1", b"and 1"]


def test_a_full_disk_costs_the_records_that_do_not_fit(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = OpenSegment(spool, serial=1)
    left = [len(frame(b"one")) + 5]
    write_to = os.write

    def fill(descriptor: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write_to(descriptor, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", fill)
    assert segment.append([frame(b"one"), frame(b"two"), frame(b"three")]) == 1
    assert segment.error is not None
    assert segment.error.errno == errno.ENOSPC
    left[0] = 1000
    assert segment.append([frame(b"four")]) == 1, "it is written again as soon as it can be"
    segment.close()
    [path] = spool.waiting("sql")
    assert read_segment(path.read_bytes()) == ([b"one", b"four"], 0)


def test_a_full_disk_that_cannot_even_be_cut_leaves_no_wrong_record(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = OpenSegment(spool, serial=1)
    write_to = os.write

    is_torn: list[bool] = []

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def tear(descriptor: int, data: memoryview) -> int:
        if is_torn:
            return fail()
        is_torn.append(True)
        return write_to(descriptor, data[:-3])

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", fail)
        patched.setattr(os, "write", tear)
        assert segment.append([frame(b"a long record that is torn")]) == 0
    assert segment.append([frame(b"two")]) == 1
    segment.close()
    assert payloads(spool, "sql") == [b"two"]


def test_a_segment_that_cannot_be_begun_leaves_nothing(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        OpenSegment(spool, serial=1)
    assert not os.listdir(spool.folder / OPEN)


@pytest.mark.socket
def test_a_segment_that_another_process_takes_before_it_is_locked_is_begun_again(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks ship it while it is empty: a record that is written to it then is lost."""
    other, lock, append = Spool(tmp_path / "spool", ["sql", "kafka"]), spool_module._try_lock, OpenSegment.append
    taken: list[str] = []

    def late(descriptor: int) -> bool:
        if not taken:
            taken.extend(os.listdir(spool.folder / OPEN))
            other.adopt()
        return lock(descriptor)

    def append_once_shipped(segment: OpenSegment, frames: Sequence[bytes]) -> int:
        for sink in spool.sinks:
            (spool.folder / sink / taken[0]).unlink(missing_ok=True)
        return append(segment, frames)

    monkeypatch.setattr(spool_module, "_try_lock", late)
    monkeypatch.setattr(OpenSegment, "append", append_once_shipped)
    thread = SpoolThread(spool, on_segment=lambda: None)
    thread.put(usage(1))
    thread.close(60.0)
    assert len(payloads(spool, "sql")) == len(payloads(spool, "kafka")) == 1
    assert (len(taken), thread.num_recorded, thread.dropped) == (1, 1, {})
    assert not os.listdir(spool.folder / OPEN)


def test_many_segments_become_few_without_a_lost_record(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", ["sql"])
    count = MANY_SEGMENTS + 10
    for number in range(count):
        write(spool, b"%d" % number, serial=number)
    spool.merge("sql")
    assert len(spool.waiting("sql")) < 10
    assert payloads(spool, "sql") == [b"%d" % number for number in range(count)]
    assert {path.stat().st_mode & 0o777 for path in spool.waiting("sql")} == {0o600}


def test_few_segments_stay_as_they_are(spool: Spool) -> None:
    for number in range(3):
        write(spool, b"%d" % number, serial=number)
    spool.merge("sql")
    assert len(spool.waiting("sql")) == 3


def test_one_process_ships_for_a_sink(spool: Spool) -> None:
    with spool.shipping("sql") as first, spool.shipping("sql") as second, spool.shipping("kafka") as other:
        assert (first, second, other) == (True, False, True)
    with spool.shipping("sql") as third:
        assert third


def test_the_folder_is_closed_to_other_users(spool: Spool) -> None:
    write(spool, b"one")
    for path in (spool.folder, *spool.folder.iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in spool.waiting("sql"))
