"""Tests that a test that breaks its kind fails, and so do a test without a kind, a skip that is not on the list, and a quarantine that is
over.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.house.reader import ROOT

pytestmark = pytest.mark.process

ACTS = {
    "sleeps": "time.sleep(0.01)",
    "starts_a_program": "subprocess.run(['true'])",
    "asks_a_shell": "os.system('true')",
    "binds": "socket.socket().bind(('127.0.0.1', 0))",
    "sends_a_datagram": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "opens_a_channel": "grpc.insecure_channel('unix:/nowhere').close()",
}
HEAD = "import asyncio, grpc, grpc.aio, os, socket, subprocess, time\nimport pytest\n"
SLEEPER = """
@pytest.mark.pure
def test_a_day_passes_in_a_loop_of_its_own():
    asyncio.run(asyncio.sleep(86_400))

@pytest.mark.loop
async def test_an_hour_passes_at_once():
    loop, began = asyncio.get_running_loop(), time.monotonic()
    at = loop.time()
    await asyncio.sleep(3600)
    assert loop.time() == at + 3600 and time.monotonic() - began < 60

@pytest.mark.loop
async def test_waits_for_nothing():
    await asyncio.get_running_loop().create_future()

@pytest.mark.loop
async def test_waits_for_what_does_not_come_while_timers_tick():
    async def tick():
        while True:
            await asyncio.sleep(1)
    ticking = asyncio.create_task(tick())
    await asyncio.get_running_loop().create_future()
"""


def run(folder: Path, text: str, *options: str, quarantine: str = "") -> str:
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_it.py").write_text(HEAD + text)
    support = folder / "support"
    support.mkdir()
    module = (ROOT / "tests" / "support" / "quarantine.py").read_text()
    (support / "quarantine.py").write_text(module.replace("Path(__file__).parents[1]", f"Path({str(folder)!r})"))
    (folder / "quarantine.txt").write_text(quarantine)
    paths = f"pythonpath={support} {ROOT} {ROOT / 'tests' / 'support'}"
    settings = ["-c", str(ROOT / "pyproject.toml"), "-o", paths, "-p", "no:cacheprovider", "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", "-q", *settings, *options, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return f"exit {done.returncode}\n{done.stdout}{done.stderr}"


def test_each_act_that_a_kind_forbids_is_refused_also_where_the_refusal_is_swallowed(tmp_path: Path) -> None:
    tests = [
        f"""
@pytest.mark.pure
def test_pure_{name}():
    {act}

@pytest.mark.loop
async def test_loop_{name}():
    try:
        {act}
    except AssertionError:
        pass
"""
        for name, act in ACTS.items()
    ]
    shown = run(tmp_path, "".join(tests))
    lines = shown.splitlines()
    for name in ACTS:
        assert any(line.startswith("FAILED") and f"::test_pure_{name}" in line for line in lines), shown
        assert any(line.startswith("ERROR") and f"::test_loop_{name}" in line for line in lines), shown


def test_a_socket_test_starts_no_program_and_may_do_the_rest(tmp_path: Path) -> None:
    allowed = [name for name in ACTS if name not in ("starts_a_program", "asks_a_shell")]
    tests = [f"\n@pytest.mark.socket\ndef test_{name}():\n    {act}\n" for name, act in ACTS.items()]
    shown = run(tmp_path, "".join(tests), "-W", "ignore")
    assert f"{len(ACTS) - len(allowed)} failed, {len(allowed)} passed" in shown, shown


def test_virtual_time_jumps_and_ends_a_wait_in_vain(tmp_path: Path) -> None:
    shown = run(tmp_path, SLEEPER, "-W", "ignore")
    assert "2 failed, 2 passed" in shown, shown
    assert "nothing could ever happen again" in shown
    assert "timers tick on" in shown


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("def test_it():\n    pass\n", "1 tests name no kind"),
        ("@pytest.mark.pure\nasync def test_it():\n    pass\n", "is asynchronous"),
    ],
)
def test_a_test_without_a_fitting_kind_fails_the_collection(tmp_path: Path, test: str, said: str) -> None:
    shown = run(tmp_path, test)
    assert "exit 4" in shown
    assert said in shown


def test_a_skip_for_a_reason_that_is_not_on_the_list_fails_a_strict_run(tmp_path: Path) -> None:
    shown = run(tmp_path, "@pytest.mark.pure\ndef test_it():\n    pytest.skip('not today')\n", "--strict-skips")
    assert "exit 1" in shown, shown
    assert "a skip that is not allowed: test_it.py::test_it: Skipped: not today" in shown


@pytest.mark.parametrize(("days_ago", "status"), [(-1, 1), (0, 0), (14, 0), (15, 1)])
def test_a_quarantine_holds_for_fourteen_days(tmp_path: Path, days_ago: int, status: int) -> None:
    since = datetime.now(UTC).date() - timedelta(days=days_ago)
    failing = "@pytest.mark.socket\ndef test_it():\n    raise ValueError\n"
    shown = run(tmp_path, failing, quarantine=f"# why\ntest_it.py::test_it {since} fails now and then\n")
    assert f"exit {status}" in shown, shown
