"""Tests a deployment that is started as some daemons are, with standard input and output closed.

The request log went into whatever had descriptor 1: a client's connection, with the addresses of other clients, or an engine's.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from http_kit import CHAT, ask
from server_kit import COMMAND, KEY, started

pytestmark = pytest.mark.process


async def test_no_connection_has_the_number_of_a_closed_stream(trained_folder: Path) -> None:
    config = {
        "models": [{"name": "tiny", "engine": {"model": str(trained_folder), "num_kv_blocks": 48, "num_threads": 1}}],
        "gateway": {"api_keys": [{"key": KEY}], "request_log": "on"},
    }
    command = ["sh", "-c", 'exec "$@" <&- >&-', "sh", *COMMAND, "--config", "{folder}/config.yaml", "--port", "0"]
    with started(command, {"config.yaml": config}) as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answers = [await ask(server.port, "POST", CHAT, body, key=KEY) for _ in range(8)]
        assert [answer.status for answer in answers] == [200] * 8
        family = [server.process.pid, *(child.pid for child in psutil.Process(server.process.pid).children(recursive=True))]
        inputs_and_outputs = {pid: [os.readlink(f"/proc/{pid}/fd/{number}") for number in (0, 1)] for pid in family}
        assert inputs_and_outputs[server.process.pid] == [os.devnull] * 2
        assert not [pid for pid, (_, output) in inputs_and_outputs.items() if output.startswith("socket:")]
