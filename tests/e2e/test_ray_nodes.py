"""Tests replicas on a real Ray cluster, whose nodes are network namespaces: no stream fails, and lost replicas are started elsewhere."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import pytest
import ray_autoscaler
from patience import PATIENCE_S, eventually
from server_kit import SOURCE

from bench.storms import ray_nodes
from bench.storms.failover import Answer, body_of, streamed
from bench.storms.namespaces import why_not_usable

NO_NAMESPACES = "no package ray here" if find_spec("ray") is None else why_not_usable()
pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES)]


def test_streams_go_on_when_an_engine_its_agent_or_its_node_is_killed() -> None:
    faults = ["killed", "agent", "node"]
    with ray_nodes.cluster(ray_nodes.NUM_REPLICAS + 1) as made:
        rounds = asyncio.run(ray_nodes.storm(made, faults, 6))
        last, status = asyncio.run(stopped(made))
    assert (last.error, status) == ("", 0), "Ray's own handler of SIGTERM would have ended it after three seconds"
    assert [each.failed for each in rounds] == [[], [], []]
    assert [each.different for each in rounds] == [0, 0, 0]


async def stopped(made: ray_nodes.Cluster) -> tuple[Answer, int]:
    """What a stream of ten seconds had, which ran at the signal, and the exit status."""
    assert made.serving is not None
    answer = Answer()
    async with aiohttp.ClientSession() as session:
        body = body_of(ray_nodes.KIND, 0)
        streaming = asyncio.create_task(streamed(session, ray_nodes.PORT, body, host=made.host, answer=answer))
        await eventually(lambda: answer.pieces_at)
        made.serving.send_signal(signal.SIGTERM)
        await streaming
    return answer, await asyncio.to_thread(made.serving.wait, PATIENCE_S)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare here")
def test_rays_autoscaler_brings_nodes_as_it_is_asked_and_is_asked_for_less() -> None:
    """In a namespace of processes, whose end is that of all of them."""
    mount = 'mkdir -p /tmp/ray && mount -t tmpfs -o size=256m tmpfs /tmp/ray && exec "$@"'
    namespace = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", mount, "sh"]
    command = [*namespace, sys.executable, str(Path(ray_autoscaler.__file__))]
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    *rising, last = map(json.loads, said.splitlines())
    assert rising == [{"asked": number, "nodes": number} for number in ray_autoscaler.RISING]
    assert last == [{"CPU": 2}] * ray_autoscaler.AT_LAST
