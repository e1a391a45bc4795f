"""Runs replicas by agents (`fleet.ray.agent`) on other machines, and asks for as many machines as the deployment wants.

This end knows nothing of Ray: `fleet.ray.cluster` gives it agents. An engine listens at its node's address with a certificate for it, made
at its start by an authority that lives as long as the deployment, and with a token of its own: what later listens at the address of an
engine that has ended is not taken for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from headrace import __version__
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.strict_decode import read_json_object
from headrace.core.tasks import RunningTasks
from headrace.fleet.authority import TOKEN_BYTES, certify, make_authority, make_certificate, pem_of_certificate, pem_of_key, write_folder
from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.fleet.files import ReplicaFiles
from headrace.fleet.launcher import Child, Failure
from headrace.fleet.ray.agent import Content, EventKind, NodeEvent, NodeIdentity, NodeOrder
from headrace.fleet.ray.options import RayOptions
from headrace.fleet.replica_processes import Listens
from headrace.fleet.weights import name_elsewhere
from headrace.machine.signals import first_of
from headrace.observe.logs import relay
from headrace.wire.leash import LeashRequestKind, LeashRequests
from headrace.wire.tls.files import CA_NAME, CERTIFICATE_NAME, KEY_NAME, TlsRole

log = logging.getLogger(__name__)

LOST = 69
"""Exit status of a replica whose agent is gone, with its node or by itself (EX_UNAVAILABLE)."""

PLACE_NOTICE_S = 10.0

REQUEST_PAUSE_S = 1.0
LAST_REQUEST_S = 10.0

NodeContents = tuple[Sequence[Content], Mapping[str, str]]
"""`configs` and `sources` of a `NodeOrder`."""


class AgentLost(HeadraceError):
    """Ray has given up the agent: its process or its node has ended."""


class RemoteAgent(Protocol):
    """A `NodeAgent` in a process elsewhere."""

    async def call(self, method: str, *arguments: object) -> Any:
        """A method's result. The first call waits until the agent has a place. Raises AgentLost."""
        ...

    def end(self) -> None:
        """Its processes end with it. Waits for nothing."""
        ...


class AgentCluster(Protocol):
    def agent(self) -> RemoteAgent: ...

    def request(self, num_replicas: int) -> None:
        """Asks for machines for this number of replicas in all. Blocks. Raises HeadraceError."""
        ...


class NodeChild:
    """A replica on another machine, as `fleet.launcher.Child` describes it. Killed, it has ended at once: nothing there is waited for."""

    def __init__(
        self,
        label: str,
        agent: RemoteAgent,
        order: Callable[[NodeIdentity], NodeOrder],
        contents: Callable[[], NodeContents],
        listens: Callable[[str], None],
    ) -> None:
        """contents: as they are now, may block; listens: takes the address"""
        self.label = label
        self.failure: Failure | None = None
        self.pids: Sequence[int] = ()
        self.asked = LeashRequests(self._write)
        self._agent = agent
        self._order = order
        self._contents = contents
        self._listens = listens
        self._is_ordered = False
        self._calls = RunningTasks()
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[dict[str, object]] = loop.create_future()
        self._cut: asyncio.Future[int] = loop.create_future()
        self.exited: asyncio.Task[int] = asyncio.create_task(self._live(), name=f"child {label}")

    def terminate(self) -> None:
        if self._is_ordered:
            self._call(self._agent.call("terminate"))
        else:
            self._end(0)

    def kill(self) -> None:
        self._end(-signal.SIGKILL)

    def _end(self, status: int) -> None:
        if not self._cut.done():
            self._cut.set_result(status)

    async def _live(self) -> int:
        following = asyncio.create_task(self._follow(), name=f"events of {self.label}")
        try:
            await first_of(following, self._cut)
            return self._cut.result() if self._cut.done() else following.result()
        except HeadraceError as error:
            self.failure = Failure(str(error), can_retry=not isinstance(error, ConfigError))
            return LOST
        finally:
            self.ready.cancel()
            self.asked.close()
            for task in (following, *self._calls):
                task.cancel()
            self._agent.end()

    async def _follow(self) -> int:
        notice = asyncio.get_running_loop().call_later(PLACE_NOTICE_S, log.info, "%s waits for a node that has room for it", self.label)
        try:
            identity: NodeIdentity = await self._agent.call("identity")
        finally:
            notice.cancel()
        if identity.version != __version__:
            reason = f"has Headrace {identity.version}, and this supervisor is {__version__}"
            raise ConfigError(f"the node {identity.host}", reason, "Install the same version on all of them.")
        log.info("%s is placed on %s", self.label, identity.host)
        order = self._order(identity)
        self._is_ordered = True
        self.pids = await self._agent.call("start", order)
        taken = 0
        while True:
            for event in await self._agent.call("events", taken):
                taken = event.number
                if (status := self._take(event)) is not None:
                    return status

    def _take(self, event: NodeEvent) -> int | None:
        """The exit status, once it has ended."""
        about = event.about
        if event.kind is EventKind.SAID:
            relay(about["line"], about["label"])
        elif event.kind is EventKind.READY:
            self._listens(str(about["address"]))
            self.ready.set_result(dict(about))
        else:
            self.label = about["label"]
            if about["reason"]:
                self.failure = Failure(about["reason"], about["can_retry"])
            return int(about["status"])
        return None

    def _write(self, data: bytes) -> None:
        asked = json.loads(data)
        self._call(self._answer(asked["id"], LeashRequestKind(asked["event"]), asked.get("level")))

    async def _answer(self, request_id: int, kind: LeashRequestKind, level: str | None) -> None:
        answer: Mapping[str, object]
        match kind:
            case LeashRequestKind.RELOAD:
                answer = await self._reload()
            case LeashRequestKind.SLEEP | LeashRequestKind.WAKE:
                answer = await self._change_sleep(level)
            case _:
                answer = {"event": "refused", "reason": f"{kind} is not asked of an engine on another machine"}
        self.asked.take({**answer, "id": request_id})

    async def _reload(self) -> Mapping[str, object]:
        if not self._is_ordered:
            return {"event": "reloaded"}  # the file is read with the order
        try:
            configs, sources = await asyncio.to_thread(self._contents)
            answer: Mapping[str, object] = await self._agent.call("reload", configs, sources)
        except AgentLost:
            raise
        except HeadraceError as error:  # a registry does not answer
            return {"event": "refused", "reason": str(error)}
        return answer

    async def _change_sleep(self, level: str | None) -> Mapping[str, object]:
        if not self._is_ordered:
            return {"event": "refused", "reason": "it waits for a node"}
        try:
            answer: Mapping[str, object] = await self._agent.call("change_sleep", level)
        except AgentLost as lost:
            return {"event": "refused", "reason": str(lost)}
        return answer

    def _call(self, call: Coroutine[Any, Any, None]) -> None:
        self._calls.start(self._logged(call), f"call to {self.label}")

    async def _logged(self, call: Coroutine[Any, Any, None]) -> None:
        try:
            await call
        except HeadraceError as error:
            log.warning("%s was not reached: %s", self.label, error)


class RayHost:
    """A `fleet.replica_processes.ReplicaHost`."""

    is_this_machine = False

    def __init__(self, cluster: AgentCluster, options: RayOptions, folder: Path) -> None:
        """folder: private directory of the deployment. Raises ConfigError"""
        self._cluster = cluster
        self._options = options
        self._authority = make_authority(datetime.now(UTC))
        key, certificate = make_certificate(self._authority, TlsRole.GATEWAY, (), datetime.now(UTC))
        self._tls = folder / "gateway-tls"
        files = {CA_NAME: self._authority.certificate, CERTIFICATE_NAME: certificate}
        write_folder(self._tls, {**{name: pem_of_certificate(each) for name, each in files.items()}, KEY_NAME: pem_of_key(key)})
        self._num_wanted = 0
        self._num_requested = 0
        self._requesting: asyncio.Task[None] | None = None

    async def launch(self, config: FleetConfig, spec: Callable[[], ModelSpec], files: ReplicaFiles, listens: Listens) -> Child:
        token = secrets.token_urlsafe(TOKEN_BYTES)

        def contents() -> NodeContents:
            return [read_json_object(path) for path in files.configs], _sources(spec())

        def order(identity: NodeIdentity) -> NodeOrder:
            configs, sources = contents()
            return NodeOrder(
                replica=files.name,
                command=config.engine_command[1:],
                configs=configs,
                sources=sources,
                withheld=sorted(config.key_variables),
                authority=pem_of_certificate(self._authority.certificate),
                certificate=self._certificate_for(identity),
                token=token,
                num_threads=self._options.num_cpus,
            )

        def listen(address: str) -> None:
            listens({"address": address, "token": token, "tls_dir": str(self._tls)})

        return NodeChild(files.name, self._cluster.agent(), order, contents, listen)

    def _certificate_for(self, identity: NodeIdentity) -> bytes:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        key = load_pem_public_key(identity.public_key)
        assert isinstance(key, ec.EllipticCurvePublicKey), "agents make no others"
        return pem_of_certificate(certify(self._authority, key, TlsRole.ENGINE, [identity.host], datetime.now(UTC)))

    def want(self, num_replicas: int) -> None:
        self._num_wanted = num_replicas
        if self._requesting is None or self._requesting.done():
            self._requesting = asyncio.create_task(self._request(), name="request to the cluster")

    async def _request(self) -> None:
        """One after another, and the last number last. One that has failed is made again."""
        while self._num_requested != (number := self._num_wanted):
            try:
                await asyncio.to_thread(self._cluster.request, number)
                self._num_requested = number
            except HeadraceError as error:
                self._num_requested = -1  # it may have been made
                log.warning("the cluster was not asked for machines for %d replicas: %s", number, error)
                await asyncio.sleep(REQUEST_PAUSE_S)

    async def close(self) -> None:
        """What it has asked the cluster for is taken back, unless that cannot be done within LAST_REQUEST_S."""
        self.want(0)
        assert self._requesting is not None, "want has made it"
        try:
            async with asyncio.timeout(LAST_REQUEST_S):
                await self._requesting
        except TimeoutError:
            log.error("the cluster may keep machines for this deployment until another program asks it for some")


def _sources(spec: ModelSpec) -> Mapping[str, str]:
    named = {**spec.sources, **({str(spec.folder): spec.source} if spec.source else {})}
    return {folder: name_elsewhere(name, Path(folder)) for folder, name in named.items()}
