"""Tests that records reach each sink, whatever it does, through the thread that writes them and the one that ships them."""

from __future__ import annotations

import errno
import os
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ledger_kit import MemorySink, usage
from patience import until

from headrace.gateway.ledger import shipper as shipper_module
from headrace.gateway.ledger import spool_thread
from headrace.gateway.ledger.record import FIRST_RETRY_S, LAST_RETRY_S, SinkFailed
from headrace.gateway.ledger.shipper import POLL_S, Shipper
from headrace.gateway.ledger.spool import OPEN, Spool
from headrace.gateway.ledger.spool_thread import ADOPT_S, GATHER_S, SEGMENT_S, SpoolThread

pytestmark = pytest.mark.socket

Ids = list[str]


def ids(*numbers: int) -> Ids:
    return [usage(number).request_id for number in numbers]


@contextmanager
def running(spool: Spool, *sinks: MemorySink) -> Iterator[tuple[SpoolThread, list[Shipper]]]:
    shippers = [Shipper(spool, sink) for sink in sinks]
    for shipper in shippers:
        shipper.start()

    def wake() -> None:
        for shipper in shippers:
            shipper.wake()

    thread = SpoolThread(spool, on_segment=wake)
    try:
        yield thread, shippers
    finally:
        thread.close(60)
        for shipper in shippers:
            shipper.stop()
        for shipper in shippers:
            shipper.join(60)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", ["memory"])


def test_records_are_shipped(spool: Spool) -> None:
    sink = MemorySink()
    with running(spool, sink) as (thread, [shipper]):
        for number in range(3):
            thread.put(usage(number))
        until(lambda: sink.shipped == ids(0, 1, 2))
        assert thread.num_recorded == 3
        until(lambda: shipper.num_shipped == 3)
        assert not thread.dropped
    assert sink.is_closed
    assert not spool.waiting("memory")


def test_a_segment_is_on_the_disk_before_a_sink_can_get_it(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting_at_sync: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: waiting_at_sync.append(len(spool.waiting("memory"))))
    with running(spool) as (thread, _):
        thread.put(usage(1))
        until(lambda: spool.waiting("memory"))
    assert waiting_at_sync == [0]


def test_what_is_queued_at_the_end_is_shipped(spool: Spool) -> None:
    sink = MemorySink()
    with running(spool, sink) as (thread, _):
        for number in range(1000):
            thread.put(usage(number))
    assert sink.shipped == ids(*range(1000))


def test_a_sink_that_is_down_gets_everything_once_it_is_back(spool: Spool) -> None:
    sink = MemorySink()
    sink.failure = "down"
    with running(spool, sink) as (thread, [shipper]):
        thread.put(usage(1))
        until(lambda: shipper.num_failures > 1)
        thread.put(usage(2))
        sink.failure = ""
        until(lambda: sink.shipped == ids(1, 2))


def test_a_sink_that_is_down_keeps_none_from_another(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", ["good", "bad"])
    good, bad = MemorySink("good"), MemorySink("bad")
    bad.failure = "down"
    with running(spool, good, bad) as (thread, _):
        thread.put(usage(1))
        until(lambda: good.shipped == ids(1))
    assert not bad.shipped
    assert len(spool.waiting("bad")) == 1, "it waits for the next process"
    bad.failure = ""
    with running(spool, good, bad):
        until(lambda: bad.shipped == ids(1))


def test_a_fault_of_a_sink_ends_no_shipping(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = MemorySink()
    ship, faults = sink.ship, [ZeroDivisionError("a bug")]

    def once_faulty(payloads: object) -> None:
        if faults:
            raise faults.pop()
        ship(payloads)  # type: ignore[arg-type]

    monkeypatch.setattr(sink, "ship", once_faulty)
    with running(spool, sink) as (thread, _):
        thread.put(usage(1))
        until(lambda: sink.shipped == ids(1))


def test_two_processes_with_one_folder_ship_each_record_once(spool: Spool) -> None:
    """Two sets of threads here: their locks are as two processes' are, since each opens the files for itself."""
    first, second = MemorySink(), MemorySink()
    with running(spool, first) as (one, _), running(spool, second) as (two, _):
        for number in range(0, 100, 2):
            one.put(usage(number))
            two.put(usage(number + 1))
        until(lambda: len(first.shipped + second.shipped) == 100)
        assert not first.shipped or not second.shipped, "one of them has the lock"
    assert sorted(first.shipped + second.shipped) == ids(*range(100))


def test_another_process_takes_over_when_the_one_that_ships_ends(spool: Spool) -> None:
    first, second = MemorySink(), MemorySink()
    with running(spool, second) as (two, _):
        with running(spool, first) as (one, _):
            one.put(usage(1))
            until(lambda: len(first.shipped + second.shipped) == 1)
        two.put(usage(2))
        until(lambda: len(first.shipped + second.shipped) == 2)


def test_damaged_bytes_are_counted_and_do_not_stop_what_follows(spool: Spool) -> None:
    sink = MemorySink()
    (spool.folder / "memory" / "0-0-0.seg").write_bytes(b"no segment at all")
    with running(spool, sink) as (thread, [shipper]):
        thread.put(usage(1))
        until(lambda: sink.shipped == ids(1))
        until(lambda: shipper.num_damaged_bytes == 17)


def test_a_full_queue_drops_and_counts_and_never_blocks(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_thread, "MAX_QUEUED", 10)
    monkeypatch.setattr(spool_thread.SpoolThread, "_run", lambda self: None)
    thread = SpoolThread(spool, on_segment=lambda: None)
    for number in range(25):
        thread.put(usage(number))
    assert thread.dropped == {"queue": 15}


def test_prompts_that_wait_are_bounded_by_bytes(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_thread, "MAX_QUEUED_BYTES", 100)
    monkeypatch.setattr(spool_thread.SpoolThread, "_run", lambda self: None)
    thread = SpoolThread(spool, on_segment=lambda: None)
    for number in range(5):
        thread.put(usage(number, prompt="x" * 40))
    assert thread.dropped == {"queue": 3}


def fail_with(number: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("name", ["write", "open", "link", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=["full", "fails", "read-only"])
def test_a_disk_that_fails_costs_records_at_most_and_heals(spool: Spool, monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Every call by which the spool changes the disk, with every error that disks give."""
    sink = MemorySink()
    with running(spool, sink) as (thread, _):
        with monkeypatch.context() as broken:
            broken.setattr(os, name, fail_with(number))
            for count in range(20):
                thread.put(usage(count))
            until(lambda: thread.num_recorded + thread.dropped["disk"] == 20)
        thread.put(usage(100))
        until(lambda: usage(100).request_id in sink.shipped)
        if name in ("link", "fsync"):
            until(lambda: len(sink.shipped) == 21)
            assert not thread.dropped["disk"], "they were written before, and are shipped once they can be"
    assert len(sink.shipped) == len(set(sink.shipped)) == 21 - thread.dropped["disk"]
    assert not os.listdir(spool.folder / OPEN)


# -- seconds, on clocks of the tests' own ------------------------------------------------------------------------------------------------

SHIPPED_S = 2.0
"""Seconds after which a record is where usage is read, as long as the sink takes it."""


class Pauses:
    """Stands for the events of a shipper: notes how long it would wait, and waits not at all. is_set: from the n-th pause on"""

    def __init__(self, num_until_set: int) -> None:
        self.seconds: list[float] = []
        self._num_until_set = num_until_set

    def is_set(self) -> bool:
        return len(self.seconds) >= self._num_until_set

    def wait(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        return self.is_set()

    def clear(self) -> None:
        return


@pytest.mark.pure
def test_a_record_is_in_its_sink_within_two_seconds(tmp_path: Path, shipped_seconds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gathers with others, its segment is closed at its age, and the shipper is woken then."""
    now, woken = [100.0], list[float]()
    spool = Spool(tmp_path / "spool", ["memory"])
    monkeypatch.setattr(SpoolThread, "_run", lambda self: None)
    thread = SpoolThread(spool, on_segment=lambda: woken.append(now[0]), clock=lambda: now[0])
    thread._tend(is_last=False)
    thread._write([usage(1)])
    now[0] += SEGMENT_S / 2
    thread._write([usage(2)])
    now[0] = 100.0 + SEGMENT_S - 0.001
    thread._tend(is_last=False)
    assert not woken
    now[0] = 100.0 + SEGMENT_S
    thread._tend(is_last=False)
    assert woken == [100.0 + SEGMENT_S]
    sink = MemorySink()
    assert Shipper(spool, sink).ship_waiting()
    assert sink.shipped == ids(1, 2)
    assert GATHER_S + SEGMENT_S + POLL_S < SHIPPED_S


@pytest.mark.pure
def test_a_spool_waits_for_a_record_no_longer_than_until_a_segment_is_due(
    tmp_path: Path, shipped_seconds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = [100.0], list[float]()
    monkeypatch.setattr(SpoolThread, "_run", lambda self: None)
    thread = SpoolThread(Spool(tmp_path / "spool", ["memory"]), on_segment=lambda: None, clock=lambda: now[0])

    class Empty:
        def get(self, timeout: float) -> None:
            waits.append(round(timeout, 6))
            raise queue.Empty

    thread._queue = Empty()  # type: ignore[assignment]
    thread._tend(is_last=False)
    assert not thread._next_batch()
    thread._write([usage(1)])
    now[0] += 0.1
    assert not thread._next_batch()
    assert waits == [ADOPT_S, SEGMENT_S - 0.1]


@pytest.mark.pure
def test_a_sink_that_fails_is_tried_again_ever_later_and_at_once_after_it_took_something(
    spool: Spool, shipped_seconds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = MemorySink()
    failures = iter([True] * 8 + [False] + [True] * 4)
    monkeypatch.setattr(sink, "idle", lambda: (_ for _ in ()).throw(SinkFailed("down")) if next(failures) else None)
    shipper = Shipper(spool, sink)
    retries, polls = Pauses(11), Pauses(10**6)
    shipper._stopping, shipper._woken = retries, polls  # type: ignore[assignment]
    shipper._ship_until_stopped()
    assert retries.seconds[:8] == pytest.approx([FIRST_RETRY_S, 0.4, 0.8, 1.6, 3.2, 6.4, LAST_RETRY_S, LAST_RETRY_S])
    assert retries.seconds[8:] == pytest.approx([FIRST_RETRY_S, 0.4, 0.8, 0.0]), "once it is stopped, one last time"
    assert polls.seconds == [POLL_S]


@pytest.fixture
def shipped_seconds(monkeypatch: pytest.MonkeyPatch, ships_at_once: None) -> None:
    """The product's own again."""
    monkeypatch.setattr(spool_thread, "SEGMENT_S", SEGMENT_S)
    monkeypatch.setattr(spool_thread, "ADOPT_S", ADOPT_S)
    for name, seconds in (("POLL_S", POLL_S), ("FIRST_RETRY_S", FIRST_RETRY_S), ("LAST_RETRY_S", LAST_RETRY_S)):
        monkeypatch.setattr(shipper_module, name, seconds)
