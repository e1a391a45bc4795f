"""The part that knows Ray: connects to a cluster, makes agents of actors, and asks Ray's autoscaler for machines."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError, Unavailable
from headrace.fleet.ray.agent import NodeAgent
from headrace.fleet.ray.host import AgentLost, RayHost
from headrace.fleet.ray.options import RayOptions

RETRY_S = 1.0
MAX_LINE = 200
"""Characters of each line that is kept of what Ray says."""


def ray_package() -> Any:
    """Raises ConfigError."""
    try:
        import ray
    except ImportError:
        raise ConfigError("ray", "needs the package ray", "pip install 'headrace[ray]'") from None
    return ray


class RayAgent(NodeAgent):
    """Made by Ray, in a process of its own on a node."""

    def __init__(self, options: RayOptions) -> None:
        ray = ray_package()
        node_id = ray.get_runtime_context().get_node_id()
        [node] = [each for each in ray.nodes() if each["NodeID"] == node_id]
        num_places = 1 if options.num_gpus else int(node["Resources"].get("CPU", 0)) // options.num_cpus
        super().__init__(ray.util.get_node_ip_address(), max(0, num_places - 1))


class ActorAgent:
    """A `RayAgent` as the supervisor sees it."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    async def call(self, method: str, *arguments: object) -> Any:
        while True:
            try:
                return await getattr(self._actor, method).remote(*arguments)
            except self._ray.exceptions.RayError as error:
                is_broken = isinstance(error, self._ray.exceptions.ActorUnavailableError)
                if not (is_broken and method == "events"):
                    raise AgentLost(_short(error)) from error
                await asyncio.sleep(RETRY_S)  # the connection broke, and the actor may live: asked again, no event is lost

    def end(self) -> None:
        # In a thread, since Ray's head is asked, which may not answer.
        asyncio.get_running_loop().run_in_executor(None, self._ray.kill, self._actor)


def _short(error: Exception) -> str:
    lines = [line for line in map(str.strip, str(error).splitlines()) if line] or [type(error).__name__]
    return " ".join(dict.fromkeys((lines[0][:MAX_LINE], lines[-1][:MAX_LINE])))


def _unused_token() -> str:
    """What to do where Ray has a token and does not send it: `ray start` switches it on by itself, and a program that joins does not."""
    found = [name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)]
    if os.path.exists(file := os.path.expanduser("~/.ray/auth_token")):  # false where the home cannot be read, or is not known
        found.append(file)
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" or not found:
        return ""
    return f"Set RAY_AUTH_MODE=token if the cluster wants a token: Ray has one ({found[0]}), and does not send it."


class RayCluster:
    def __init__(self, options: RayOptions) -> None:
        """Connects, and blocks. Raises ConfigError."""
        self._options = options
        self._ray = ray_package()
        try:
            self._ray.init(address=options.address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            remedy = "Start one (ray start --head), or join it (ray start --address HOST:PORT --num-cpus 0), with the same Python and Ray."
            remedy = " ".join(filter(None, (_unused_token(), remedy)))
            raise ConfigError("ray.address", f"no cluster can be used at {options.address!r}: {error}".rstrip("."), remedy) from error

    def agent(self) -> ActorAgent:
        options = self._options
        made = self._ray.remote(RayAgent).options(
            num_cpus=options.num_cpus, num_gpus=options.num_gpus, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
        )
        return ActorAgent(self._ray, made.remote(options))

    def request(self, num_replicas: int) -> None:
        """Raises Unavailable."""
        from ray.autoscaler.sdk import request_resources

        try:
            request_resources(bundles=[dict(self._options.bundle)] * num_replicas)
        except (self._ray.exceptions.RayError, OSError, RuntimeError) as error:
            raise Unavailable(f"Ray's autoscaler was not reached: {error}") from error

    def close(self) -> None:
        self._ray.shutdown()


@asynccontextmanager
async def opened_cluster(options: RayOptions, folder: Path) -> AsyncIterator[RayHost]:
    """Until the block ends. folder: private directory of the deployment. Raises ConfigError"""
    cluster = await asyncio.to_thread(RayCluster, options)
    # Ray has put its own handler in front of ours: it prints stacks, and ends the process three seconds later.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    signal.siginterrupt(signal.SIGTERM, False)
    try:
        host = RayHost(cluster, options, folder)
        try:
            yield host
        finally:
            await host.close()
    finally:
        await asyncio.to_thread(cluster.close)
