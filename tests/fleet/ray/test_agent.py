"""Tests what an agent keeps for its supervisor: every line and event once and in order, whatever calls are lost, and within its bound."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import eventually
from scripted_nodes import NodesLauncher, ScriptedAgent, ScriptedCluster
from scripted_site import Script, ScriptedLauncher, ScriptedProcess
from virtual_time import VirtualTimeLoop

from headrace.core.errors import ConfigError
from headrace.fleet.ray.agent import MAX_LOG_BYTES, EventKind, NodeAgent, NodeEvent, NodeOrder
from headrace.fleet.ray.options import RayOptions

pytestmark = pytest.mark.loop


class Node:
    """One agent and its launcher. num_ranks: of the replica that it is ordered to run"""

    def __init__(self, script: Script | None = None, num_ranks: int = 1) -> None:
        self.launcher = ScriptedLauncher(script or Script())
        self._held = ScriptedAgent(ScriptedCluster(self.launcher, {}), 0)
        self.agent = NodeAgent("10.0.0.1", 0, lambda say: NodesLauncher(self.launcher, say, self._held))
        content = {"replica": "tiny-0", "engine": {"model": "/m"}}
        configs = [content if num_ranks == 1 else {**content, "rank": rank} for rank in range(num_ranks)]
        self.order = NodeOrder("tiny-0", ("-m", "headrace", "engine"), configs, {}, ("ITS_KEY",), b"ca", b"crt", "t" * 32, 4)

    def say(self, line: str) -> None:
        self._held.say(line, "tiny-0")

    @property
    def process(self) -> ScriptedProcess:
        return self.launcher.launched[-1]

    async def until_ended(self) -> list[NodeEvent]:
        """All events, taken one call after the other."""
        seen: list[NodeEvent] = []
        while not seen or seen[-1].kind is not EventKind.ENDED:
            seen += await self.agent.events(seen[-1].number if seen else 0)
        return seen


async def test_a_replica_is_said_to_be_ready_and_how_it_ended() -> None:
    node = Node()
    assert await node.agent.start(node.order) == [100]
    assert node.process.withheld == ("ITS_KEY",)
    [ready] = await node.agent.events(0)
    assert (ready.kind, ready.about["address"]) == (EventKind.READY, "10.0.0.1:0")
    folder = node.process.path.parent
    await node.agent.terminate()
    [*_, ended] = await node.until_ended()
    assert ended.about == {"status": 0, "label": "tiny-0", "reason": "", "can_retry": True}
    assert not folder.exists(), "it held a key and a token"


async def test_ranks_run_on_one_node_and_end_together() -> None:
    node = Node(num_ranks=2)
    await node.agent.start(node.order)
    first, second = node.launcher.launched
    assert (first.label, second.label) == ("tiny-0", "tiny-0.r1")
    assert first.config["rendezvous"] == second.config["rendezvous"] == f"unix:{first.path.parent / 'ranks'}"
    assert first.config["num_neighbours"] == 1, "the other rank"
    second.kill()
    [*_, ended] = await node.until_ended()
    assert (ended.about["status"], ended.about["label"]) == (-signal.SIGKILL, "tiny-0.r1")
    assert first.exited.done()


async def test_a_reason_of_the_engine_travels_with_its_end() -> None:
    node = Node(Script(failing={"tiny-0": "is cut short"}))
    await node.agent.start(node.order)
    [*_, ended] = await node.until_ended()
    assert ended.about == {"status": 78, "label": "tiny-0", "reason": "is cut short", "can_retry": False}
    assert await node.agent.reload(node.order.configs, {}) == {"event": "reloaded"}, "the next one reads the file"


async def test_a_file_that_cannot_be_written_at_a_reload_is_an_answer() -> None:
    node = Node()
    await node.agent.start(node.order)
    shutil.rmtree(node.process.path.parent)
    answer = await node.agent.reload(node.order.configs, {})
    assert answer["event"] == "refused"
    assert "No such file" in str(answer["reason"])
    node.process.kill()
    await node.until_ended()


async def test_lines_that_are_not_taken_are_dropped_and_counted() -> None:
    node = Node()
    await node.agent.start(node.order)
    assert len(await node.agent.events(0)) == 1, "it is ready"
    line = "x" * 2**16
    for _ in range(20):
        node.say(line)
    first = [event for event in await node.agent.events(0) if event.kind is EventKind.SAID]
    assert len(first) == MAX_LOG_BYTES // len(line)
    waiting = asyncio.create_task(node.agent.events(first[-1].number))
    await asyncio.sleep(1)
    assert not waiting.done(), "those taken are forgotten, and nothing is new"
    node.say("later")
    await asyncio.sleep(1)
    said = [event.about["line"] for event in await node.agent.events(first[-1].number) if event.kind is EventKind.SAID]
    assert said == [f"{20 - len(first)} lines of the log were dropped: the supervisor did not take them in time", "later"]
    node.process.kill()
    await node.until_ended()


@given(st.lists(st.one_of(st.integers(1, 3), st.sampled_from(["lost before", "lost after", "taken"])), max_size=40))
def test_each_line_arrives_once_and_in_order_whatever_calls_are_lost(acts: Sequence[Any]) -> None:
    """Numbers: so many lines are said. A call that is lost is asked again, and the agent may have done it."""

    async def play() -> None:
        node = Node()
        await node.agent.start(node.order)
        await eventually(node.process.ready.done)
        num_said, arrived = 0, await node.agent.events(0)
        arrived = [*arrived]
        for act in acts:
            if isinstance(act, int):
                for _ in range(act):
                    node.say(str(num_said))
                    num_said += 1
            elif act != "lost before" and num_said > len(arrived) - 1:
                events = await node.agent.events(arrived[-1].number)
                arrived += events if act == "taken" else []
        node.process.kill()
        while arrived[-1].kind is not EventKind.ENDED:
            arrived += await node.agent.events(arrived[-1].number)
        assert [event.number for event in arrived] == list(range(1, len(arrived) + 1))
        assert [event.about["line"] for event in arrived[1:-1]] == [str(number) for number in range(num_said)]

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(play())
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (RayOptions(address="ray://head:10001"), "ray.address"),
        (RayOptions(num_cpus=0), "ray.num_cpus"),
        (RayOptions(num_gpus=-1), "ray.num_gpus"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused_by_name(options: RayOptions, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        options.checked()
