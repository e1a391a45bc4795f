"""Usage in real processes: a gateway that is killed, its successor, and the command that reads what they recorded."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
from gateway_processes import GATEWAY, PATIENCE_S, child, site
from lateness import machine_lateness
from wire_kit import socket_dir

from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.ledger.segment import read_segment
from headrace.gateway.ledger.spool import Spool

FAKE = {"vocab_size": 345, "step_seconds": 0.001}
BODY = {"model": "fox", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


def usage_rows(state: Path, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "headrace", "usage", "--json", "--state", str(state), *words]
    found: list[dict[str, Any]] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S).stdout)
    return found


def num_written(client: httpx2.Client) -> float:
    """Records in the gateway's spool."""
    [found] = re.findall(r"^headrace_usage_records_total (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found)


def test_a_killed_gateway_loses_no_request_that_was_answered_before(text_folder: Path) -> None:
    """Ten milliseconds before, strictly: `spool_thread.GATHER_S`. The command reads with the gateway running, after its death, and with
    another one."""
    with socket_dir() as folder:
        state = folder / "state"
        state.mkdir(mode=0o700)
        prices = {"fox": {"output": 1.0}}
        with site(folder, text_folder, FAKE, state=str(state), prices=prices) as running, running.client() as client:
            for _ in range(10):
                assert client.post("/v1/chat/completions", json=BODY).status_code == 200
            deadline = time.monotonic() + PATIENCE_S
            while sum(row["requests"] for row in usage_rows(state)) < 10:
                assert time.monotonic() < deadline
            waits_s = []
            for number in range(11, 21):
                assert client.post("/v1/chat/completions", json=BODY).status_code == 200
                answered = time.monotonic()
                with machine_lateness() as lateness:
                    while num_written(client) < number:
                        assert time.monotonic() < answered + PATIENCE_S
                    waits_s.append(time.monotonic() - answered - lateness.late_s)
            assert median(waits_s) < 0.1, waits_s  # single ones meet a moment in which the gateway gets no CPU
            running.gateway.signal(signal.SIGKILL)
            running.gateway.wait()
            [row] = usage_rows(state, "--by", "model")
            assert (row["model"], row["requests"], row["completion_tokens"], row["cost_nanos"]) == ("fox", 20, 60, 60_000)
            with child(GATEWAY, folder / "gateway.json") as second:
                second.wait_ready()
                assert usage_rows(state)[0]["requests"] == 20


WRITES_TO_A_SMALL_DISK = """
import sys, time
from pathlib import Path
import resource
sys.path += sys.argv[2:]
from ledger_kit import usage
from headrace.gateway.ledger.spool import Spool
from headrace.gateway.ledger.spool_thread import SpoolThread

resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
thread = SpoolThread(Spool(Path(sys.argv[1]), ["memory"], 1 << 30), fsync="segment", on_segment=lambda: None)
for number in range(500):
    thread.put(usage(number))
    if number % 100 == 99:
        time.sleep(0.1)
thread.close(20)
print(thread.num_recorded, thread.dropped["disk"])
"""


def test_a_disk_that_takes_part_of_a_write_leaves_whole_records(tmp_path: Path) -> None:
    """The kernel's own refusal: a file may have ten thousand bytes, and a write beyond that is cut short, then fails."""
    support = str(Path(__file__).parents[2] / "support")
    command = [sys.executable, "-c", WRITES_TO_A_SMALL_DISK, str(tmp_path / "spool"), support]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    recorded, dropped = map(int, done.stdout.split())
    assert recorded + dropped == 500
    assert 0 < recorded < 500
    spool = Spool(tmp_path / "spool", ["memory"], UsageConfig().max_spool_bytes)
    spool.adopt()
    contents = [read_segment(path.read_bytes()) for path in spool.waiting("memory")]
    assert sum(len(content.payloads) for content in contents) == recorded
    assert not any(content.num_damaged_bytes for content in contents)
