"""Tests what an agent leaves on its node when it is killed, as Ray ends every agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import until

pytestmark = pytest.mark.process

SCRIPT = """
import asyncio, json, sys
from headrace.fleet.ray.agent import NodeAgent, NodeOrder

async def run():
    agent = NodeAgent("127.0.0.1", 0)
    configs = [{"replica": "tiny-0", "block_key": "secret", "engine": {"model": "/m"}}]
    command = ("-c", "import socket, sys; socket.socket(fileno=int(sys.argv[sys.argv.index('--parent-fd') + 1])).recv(1)")
    print(json.dumps([*await agent.start(NodeOrder("tiny-0", command, configs, {}, (), b"ca", b"crt", "t" * 32, 1))]), flush=True)
    await asyncio.Event().wait()

asyncio.run(run())
"""


def test_an_agent_that_is_killed_leaves_no_secrets(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, env=environment) as agent:
        assert agent.stdout is not None
        assert json.loads(agent.stdout.readline())
        assert {path.name for path in tmp_path.rglob("*.key")} == {"tls.key"}
        agent.kill()
    until(lambda: not any(tmp_path.iterdir()))
