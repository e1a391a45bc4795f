"""A gateway and an engine that get signals to their very end leave with their own exit status."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_processes import Child, site
from wire_kit import socket_dir

DRAINED, CUT = 0, 75


@pytest.fixture
def folder() -> Iterator[Path]:
    with socket_dir() as made:
        yield made


def end_impatiently(child: Child) -> int:
    give_up_at = time.monotonic() + 60
    while child.process.poll() is None:
        assert time.monotonic() < give_up_at
        child.signal(signal.SIGTERM)
        time.sleep(0.0005)
    return child.wait()


def test_signals_that_go_on_change_no_exit_status(folder: Path, text_folder: Path) -> None:
    with site(folder, text_folder, {}, num_engines=4) as made:
        assert end_impatiently(made.gateway) in (DRAINED, CUT)
        assert {end_impatiently(engine) for engine in made.engines} <= {DRAINED, CUT}
