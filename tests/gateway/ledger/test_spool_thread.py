"""Tests the thread that writes usage records: how long one waits in memory. What a killed gateway leaves: test_process.py."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from ledger_kit import usage
from patience import PATIENCE_S

from headrace.gateway.ledger import spool_thread
from headrace.gateway.ledger.spool import Spool

pytestmark = pytest.mark.socket


def test_a_record_is_written_after_one_pause_of_ten_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed loses those that came in this time, and no other ones."""
    paused, may_go_on = threading.Event(), threading.Event()
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        paused.set()
        assert may_go_on.wait(PATIENCE_S)

    monkeypatch.setattr(spool_thread, "sleep", sleep)
    monkeypatch.setattr(spool_thread, "SEGMENT_S", PATIENCE_S)
    spool = Spool(tmp_path / "spool", ["memory"])
    thread = spool_thread.SpoolThread(spool, on_segment=lambda: None)
    thread.put(usage(1))
    assert paused.wait(PATIENCE_S)
    thread.put(usage(2))
    assert thread.num_recorded == 0
    may_go_on.set()
    thread.close(PATIENCE_S)
    assert thread.num_recorded == 2
    assert pauses[0] == spool_thread.GATHER_S == 0.01
