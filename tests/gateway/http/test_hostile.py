"""Every hostile body is refused in OpenAI's shape, by name, and leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gateway_kit import MODEL, SAID, TestBench
from hostile_requests import Hostile, cases

pytestmark = pytest.mark.loop

CASES = cases(MODEL)
HERE = re.escape(str(Path(__file__).parents[3]))
INTERNALS = re.compile(r"0x[0-9a-f]{6,}|Traceback|/home/|/root/|site-packages|\.py\b|unix:|" + HERE)


@pytest.mark.pure
def test_there_are_enough_of_them() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_hostile_body_is_refused(bench: TestBench, case: Hostile) -> None:
    headers = {"content-type": case.content_type} if case.content_type else {}
    response = await bench.client.post(case.path, content=case.body, headers=headers)
    assert response.status_code == case.status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == case.param
    assert not INTERNALS.search(response.text.replace(SAID, ""))
    assert len(response.content) < 4096
    assert response.headers["x-request-id"]
    assert bench.replica.requests == []
    assert (await bench.chat(max_tokens=1)).status_code == 200
