"""Tests two gateways over a Redis server that fails under load: a small storm of `bench/storms/redis_faults.py`."""

from __future__ import annotations

import pytest

from bench.storms.redis_faults import storm

pytestmark = pytest.mark.process


@pytest.mark.slow
async def test_no_answer_is_wrong_or_lost_whatever_the_server_does() -> None:
    for report in await storm(["down", "stopped", "half_open", "READONLY"], rounds=1, fault_s=2.0, heal_s=5.0):
        assert report.unexpected == 0, report
        assert (report.lost_turns, report.lost_tokens) == (0, 0), report
        assert report.statuses["limited"].get(503), "the fault was felt"
        assert max(report.healed_s.values()) < 5.0, report
