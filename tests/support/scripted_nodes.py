"""A cluster of nodes in the process of a test: agents are the product's own, their engines are scripted, and nodes can be lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import scripted_site as scripted_site_module
from scripted_site import Script, ScriptedLauncher, ScriptedSite, scripted_site

from headrace.core.errors import Unavailable
from headrace.fleet.launcher import Child, Launcher, Say
from headrace.fleet.ray import cluster as cluster_module
from headrace.fleet.ray.agent import NodeAgent, NodeIdentity, NodeOrder
from headrace.fleet.ray.host import AgentLost, RayHost
from headrace.fleet.ray.options import RayOptions
from headrace.machine.signals import first_of


class NodesLauncher:
    """Launches on the node of one agent, and keeps what its processes may say."""

    def __init__(self, launcher: Launcher, say: Say, agent: ScriptedAgent) -> None:
        self._launcher = launcher
        self._agent = agent
        agent.say = say

    async def launch(self, label: str, command: Sequence[str], *, forward: bool, withheld: Collection[str] = ()) -> Child:
        child = await self._launcher.launch(label, command, forward=forward, withheld=withheld)
        self._agent.children.append(child)
        return child


class ScriptedAgent:
    """A `fleet.ray.host.RemoteAgent` on one node. Lost, it answers nothing more, and its processes have been killed."""

    say: Say

    def __init__(self, cluster: ScriptedCluster, number: int) -> None:
        self.number = number
        self.children: list[Child] = []
        self.node = ""
        self.orders: list[NodeOrder] = []
        self._cluster = cluster
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._agent: NodeAgent | None = None

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    def lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)
            for child in self.children:
                child.kill()

    def end(self) -> None:
        self.lose("it was ended")

    async def call(self, method: str, *arguments: Any) -> Any:
        if self._agent is None:
            await self._or_lost(self._cluster.place(self))
            self._agent = NodeAgent(self.node, 1, lambda say: NodesLauncher(self._cluster.launcher, say, self))
        if method == "start":
            self.orders.append(*arguments)
        answer = await self._or_lost(getattr(self._agent, method)(*arguments))
        return replace(answer, version=self._cluster.version or answer.version) if isinstance(answer, NodeIdentity) else answer

    async def _or_lost(self, work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(work)
        try:
            await first_of(task, self._lost)
            if self._lost.done():
                raise AgentLost(self._lost.result())
            return task.result()
        finally:
            task.cancel()


class ScriptedCluster:
    """A `fleet.ray.host.AgentCluster`.

    launcher  starts engines, on all nodes
    room      node -> replicas for which it has room
    version   of Headrace on the nodes; empty: the same as here
    requests  numbers of replicas for which machines were asked for
    deaf      so many requests fail that come next
    """

    def __init__(self, launcher: Launcher, room: dict[str, int]) -> None:
        self.launcher = launcher
        self.room = room
        self.version = ""
        self.agents: list[ScriptedAgent] = []
        self.requests: list[int] = []
        self.deaf = 0
        self._numbers = count()

    def agent(self) -> ScriptedAgent:
        self.agents.append(ScriptedAgent(self, next(self._numbers)))
        return self.agents[-1]

    def request(self, num_replicas: int) -> None:
        if self.deaf:
            self.deaf -= 1
            raise Unavailable("the autoscaler does not answer")
        self.requests.append(num_replicas)

    async def place(self, agent: ScriptedAgent) -> None:
        """On the node with the most room."""
        while not agent.node:
            free = {node: room - len(self.on(node)) for node, room in self.room.items()}
            agent.node = max((node for node, places in free.items() if places > 0), key=lambda node: free[node], default="")
            if not agent.node:
                await asyncio.sleep(0.1)

    def on(self, node: str) -> list[ScriptedAgent]:
        return [agent for agent in self.agents if agent.node == node and not agent.is_lost]

    def lose_node(self, node: str) -> None:
        self.room[node] = 0
        for agent in self.on(node):
            agent.lose(f"the node {node} has died")

    def of(self, replica: str) -> ScriptedAgent:
        """The last one that was ordered to run it."""
        return [agent for agent in self.agents if agent.orders and agent.orders[-1].replica == replica][-1]

    def check(self) -> None:
        """No agent is left, and nothing is asked for any more by a deployment that was heard."""
        assert all(agent.is_lost for agent in self.agents)
        assert self.deaf or not self.requests or self.requests[-1] == 0


@asynccontextmanager
async def site_on_nodes(
    room: dict[str, int], script: Script | None = None, options: RayOptions | None = None, **given: Any
) -> AsyncIterator[tuple[ScriptedSite, ScriptedCluster]]:
    """A deployment whose engines run on nodes. room: node -> replicas for which it has room; given: as of `scripted_site`"""
    ray = options or RayOptions()
    clusters: list[ScriptedCluster] = []
    launcher = ScriptedLauncher(script or Script())

    @asynccontextmanager
    async def opened(options: RayOptions, folder: Path) -> AsyncIterator[RayHost]:
        clusters.append(ScriptedCluster(launcher, room))
        host = RayHost(clusters[0], options, folder)
        try:
            yield host
        finally:
            await host.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_module, "opened_cluster", opened)
        patch.setattr(scripted_site_module, "ScriptedLauncher", lambda _script: launcher)
        async with scripted_site(script, ray=ray, **given) as site:
            yield site, clusters[0]
    clusters[0].check()
