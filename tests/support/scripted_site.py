"""Runs a whole deployment in the process of a test: the real supervisor and commands over processes that are objects.

On virtual time there is no socket. The port is only named, and a command goes to the admin requests as one that came over HTTP does. In
real time the admin socket is the real one. Real processes under the same supervisor are in `fleet_main.py`.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S, eventually
from virtual_time import VirtualTimeLoop
from wire_kit import socket_dir

from headrace.cli.admin.client import AdminClient
from headrace.core.errors import HeadraceError, RegistryFailed
from headrace.core.load import AttemptCounts
from headrace.fleet import supervisor as supervisor_module
from headrace.fleet.admin import AdminRequests, _AdminServer, _end_of
from headrace.fleet.admin_listen import AdminAddress
from headrace.fleet.commands import WriteAudit, not_kept
from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.fleet.control import FleetControl
from headrace.fleet.launcher import Child, Failure
from headrace.fleet.supervisor import FleetExit, FleetReady, Supervisor
from headrace.wire.leash import LeashRequests, ModelStatus, ReplicaStatus, ReportedReplicaLoad, said_model

PORT = 8123


@dataclass
class Script:
    """What the processes of a deployment do, by their labels; may change at any time.

    loading       processes that do not get ready
    failing       engine -> why its configuration is refused
    dying         processes that end with status 9 at their start
    not_ready     replica -> why gateways do not find it ready
    unreadable    model -> why gateways cannot use its tokenizer
    silent        processes that answer nothing, and leave on no signal but SIGKILL
    leaving_s     process -> seconds that it takes to leave once it is asked to; asked twice, it leaves at once and says that it cut
    holding       gateways that answer no reload
    refusal       why gateways refuse their file; empty: they take it
    refusals      why they refuse it the first times
    bad_adapters  folder -> why engines cannot use it
    num_open      replica -> requests that each gateway has open there, also while it is retired
    loads         replica -> what its engine reported last
    attempts      replica -> what a gateway has counted of it
    models        model -> more of what gateways say of it
    asleep        engine -> level at which it was put to sleep; it sleeps once it has no open request
    awake_only    engines that refuse to sleep -> why
    """

    loading: set[str] = field(default_factory=set)
    failing: dict[str, str] = field(default_factory=dict)
    dying: set[str] = field(default_factory=set)
    not_ready: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    leaving_s: dict[str, float] = field(default_factory=dict)
    holding: set[str] = field(default_factory=set)
    refusal: str = ""
    refusals: list[str] = field(default_factory=list)
    bad_adapters: dict[str, str] = field(default_factory=dict)
    num_open: dict[str, int] = field(default_factory=dict)
    loads: dict[str, ReportedReplicaLoad] = field(default_factory=dict)
    attempts: dict[str, AttemptCounts] = field(default_factory=dict)
    models: dict[str, ModelStatus] = field(default_factory=dict)
    asleep: dict[str, str] = field(default_factory=dict)
    awake_only: dict[str, str] = field(default_factory=dict)


class ScriptedProcess:
    """A gateway or an engine.

    command  without the leash; withheld: variables that it does not inherit
    config   what its file said when it was last read
    """

    def __init__(self, label: str, pid: int, command: Sequence[str], withheld: Collection[str], script: Script) -> None:
        self.label = label
        self.command = command
        self.withheld = withheld
        path = Path(command[command.index("--config") + 1])
        self.failure: Failure | None = None
        self.asked = LeashRequests(self._take_line)
        self.pid = pid
        self.path = path
        self._script = script
        self._loop = asyncio.get_running_loop()
        self.asked_at: list[float] = []
        self.adapters: dict[str, str] = {}
        self.launched_at = self.ended_at = self._loop.time()
        self._retired: dict[str, dict[str, None]] = {}
        self.ready = self._loop.create_future()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self.exited = asyncio.create_task(self._live())
        self.config = json.loads(path.read_text())

    @property
    def pids(self) -> list[int]:
        return [self.pid]

    @property
    def is_gateway(self) -> bool:
        return "models" in self.config

    def terminate(self) -> None:
        self.asked_at.append(self._loop.time())
        if self.label in self._script.silent:
            return
        if len(self.asked_at) > 1:
            self._end(int(FleetExit.CUT))
        elif leaving_s := self._script.leaving_s.get(self.label, 0.0):
            self._loop.call_later(leaving_s, self._end, 0)
        else:
            self._end(0)

    def kill(self) -> None:
        self._end(-signal.SIGKILL)

    def _end(self, status: int) -> None:
        if not self._ended.done():
            self.ended_at = self._loop.time()
            self._ended.set_result(status)

    async def _live(self) -> int:
        serving = asyncio.create_task(self._serve())
        try:
            return await self._ended
        finally:
            serving.cancel()
            self.ready.cancel()
            self.asked.close()

    def _take_adapters(self) -> str:
        """As an engine does (`core.adapters`). Returns why it refuses the file; else the file is taken."""
        content = json.loads(self.path.read_text())
        adapters = {}
        for source in content["engine"].get("lora_modules", ()):
            if (reason := self._script.bad_adapters.get(source["path"])) is None:
                adapters[source["name"]] = f"digest of {source['path']}"
            elif not source["is_optional"]:
                return reason
        self.config, self.adapters = content, adapters
        return ""

    async def _serve(self) -> None:
        self._script.asleep.pop(self.label, None)
        if reason := self._script.failing.get(self.label) or ("" if self.is_gateway else self._take_adapters()):
            self.failure = Failure(reason, can_retry=False)
            self._end(78)
            return
        if self.label in self._script.dying:
            self._end(9)
            return
        while self.label in self._script.loading:
            await asyncio.sleep(0.05)
        of_engine = {"address": self.config.get("address"), "decided": [], "adapters": self.adapters}
        facts = {"host": "127.0.0.1", "port": self.config["port"]} if self.is_gateway else of_engine
        self.ready.set_result({"event": "ready", **facts})

    def _take_line(self, line: bytes) -> None:
        self._loop.call_soon(self._answer, json.loads(line))

    def _answer(self, said: dict[str, Any]) -> None:
        if self.label in self._script.silent or (said["event"] == "reload" and self.label in self._script.holding):
            return
        if said["event"] == "status":
            statuses = {model: said_model(replace(self._seen(model), replicas=each)) for model, each in self._statuses().items()}
            self.asked.take({**said, "models": statuses})
        elif said["event"] in ("sleep", "wake"):
            self._change_sleep(said)
        elif reason := self._script.refusals.pop(0) if self._script.refusals else self._script.refusal:
            self.asked.take({**said, "event": "refused", "reason": reason})
        elif not self.is_gateway and not self.ready.done():
            self.ready.add_done_callback(lambda _: self._answer(said))  # it answers once it serves
        elif not self.is_gateway:
            refused = {"event": "refused", "reason": reason} if (reason := self._take_adapters()) else None
            self.asked.take({**said, **(refused or {"event": "reloaded", "adapters": self.adapters})})
        else:
            for model, replicas in self._listed().items():
                self._retired.setdefault(model, {}).update(dict.fromkeys(replicas))
            self.config = json.loads(self.path.read_text())
            self.asked.take({**said, "event": "reloaded"})

    def _change_sleep(self, said: dict[str, Any]) -> None:
        if reason := self._script.awake_only.get(self.label, ""):
            self.asked.take({**said, "event": "refused", "reason": reason})
        elif said["event"] == "wake":
            self._script.asleep.pop(self.label, None)
            self.asked.take({**said, "event": "done"})
        elif self._script.num_open.get(self.label, 0):
            self._loop.call_later(0.05, self._change_sleep, said)
        else:
            self._script.asleep[self.label] = said["level"]
            self.asked.take({**said, "event": "done"})

    def _listed(self) -> dict[str, list[str]]:
        return {model["name"]: [each["name"] for each in model.get("replicas", ())] for model in self.config["models"]}

    def _seen(self, model: str) -> ModelStatus:
        return self._script.models.get(model, ModelStatus({}))

    def _statuses(self) -> dict[str, dict[str, ReplicaStatus]]:
        """A replica that the file lists no more stays while it has open requests."""
        listed = self._listed()
        statuses = {model: {name: self._status(model, name) for name in names} for model, names in listed.items()}
        for model, names in self._retired.items():
            for name in names:
                if (num_open := self._script.num_open.get(name, 0)) and name not in listed.get(model, ()):
                    statuses.setdefault(model, {})[name] = ReplicaStatus(False, "retired", num_open)
        return statuses

    def _status(self, model: str, replica: str) -> ReplicaStatus:
        unreadable = self._script.unreadable.get(model, "")
        asleep = "asleep" if replica in self._script.asleep else ""
        reason = unreadable or asleep or ("loading" if replica in self._script.loading else self._script.not_ready.get(replica, ""))
        num_open, load = self._script.num_open.get(replica, 0), self._script.loads.get(replica)
        attempts = self._script.attempts.get(replica, AttemptCounts())
        return ReplicaStatus(not reason, reason, num_open, bool(unreadable), load, attempts)


class ScriptedLauncher:
    def __init__(self, script: Script) -> None:
        self._script = script
        self.launched: list[ScriptedProcess] = []

    async def launch(self, label: str, command: Sequence[str], *, forward: bool, withheld: Collection[str] = ()) -> Child:
        self.launched.append(ScriptedProcess(label, 100 + len(self.launched), command, withheld, self._script))
        return self.launched[-1]


class ScriptedSource:
    """A `fleet.control.ConfigSource`. config: what the next reload reads; registry: name of a model in one -> its folder"""

    file = Path("/etc/site.yaml")

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.registry: dict[str, Path] = {}

    def read(self, pulled: Mapping[str, Path]) -> FleetConfig:
        return self._found(pulled)

    def renewed(self, pulled: Mapping[str, Path], versions: Mapping[str, str]) -> FleetConfig:
        try:
            return self._found({**pulled, **{source: self.registry[name] for source, name in versions.items()}})
        except KeyError as error:
            raise RegistryFailed("registry", f"has no {error}") from None

    def _found(self, folders: Mapping[str, Path]) -> FleetConfig:
        models = tuple(replace(spec, folder=folders.get(spec.source, spec.folder)) for spec in self.config.models)
        return replace(self.config, models=models).checked()

    def differences(self) -> list[str]:
        return []

    def accept(self) -> None:
        """Nothing to remember."""


class _WithoutSockets:
    """Stands where the supervisor makes sockets. A command is one of the admin requests, without HTTP before it."""

    def __init__(self) -> None:
        self._server: _AdminServer | None = None

    @property
    def is_open(self) -> bool:
        return self._server is not None

    @contextmanager
    def reserved_port(self, host: str, port: int) -> Iterator[int]:
        yield port or PORT

    @asynccontextmanager
    async def admin_socket(
        self, folder: Path, control: FleetControl, requests: Sequence[AdminRequests] = (), address: AdminAddress | None = None
    ) -> AsyncIterator[None]:
        self._server = server = _AdminServer(control, "a-token", requests)
        try:
            yield
        finally:
            self._server = None
            await server.close()

    async def do(self, command: str, body: Mapping[str, object]) -> list[dict[str, Any]]:
        server = self._server
        assert server is not None, "the deployment has ended, or has not begun"
        said: list[dict[str, Any]] = []
        audited = server._audited(command, body, "the operator", lambda text: said.append({"event": "progress", "text": text}))
        task = asyncio.create_task(audited, name=f"command {command}")
        server._running.add(task)
        task.add_done_callback(server._running.discard)
        await asyncio.wait([task])
        return [*said, _end_of(task)]

    def adapters(self) -> list[dict[str, object]]:
        assert self._server is not None
        return self._server._control.adapters.rows()

    async def status(self) -> dict[str, Any]:
        assert self._server is not None
        return {**await self._server._control.status()}


class ScriptedSite:
    """The running deployment and its operator. ready: what it said when it served; None before"""

    def __init__(
        self,
        script: Script,
        launcher: ScriptedLauncher,
        make: Callable[[Callable[[FleetReady], None]], Supervisor],
        source: ScriptedSource,
        parent: Path,
        operator: _WithoutSockets | None,
    ) -> None:
        """operator: None: the real admin socket"""
        self.script = script
        self.launcher = launcher
        self.source = source
        self.ready: FleetReady | None = None
        self._parent = parent
        self._operator = operator
        self._has_failed = False
        self.supervisor = make(self._served)
        self.running = asyncio.create_task(self.supervisor.run())

    def _served(self, ready: FleetReady) -> None:
        self.ready = ready

    async def end(self) -> FleetExit | None:
        """How it ended. None where `failure` was asked for that."""
        return None if self._has_failed else await self.running

    async def failure(self) -> HeadraceError:
        with pytest.raises(HeadraceError) as caught:
            await self.running
        self._has_failed = True
        return caught.value

    def has_begun(self) -> bool:
        return any(self._parent.glob("headrace-*/admin.sock")) if self._operator is None else self._operator.is_open

    @property
    def run_dir(self) -> Path:
        [found] = self.folders()
        return found

    def folders(self) -> list[Path]:
        return [*self._parent.glob("headrace-*")]

    def scale_file(self, **replicas: int) -> None:
        self.write_file(models=models_of(replicas))

    def write_file(self, **changes: Any) -> None:
        """The file that is read at the next reload. changes: fields of `FleetConfig`"""
        self.source.config = replace(self.source.config, **changes)

    async def do(self, command: str, **body: Any) -> list[dict[str, Any]]:
        if self._operator is not None:
            async with asyncio.timeout(3600):
                return await self._operator.do(command, body)
        return await asyncio.to_thread(lambda: list(AdminClient(self.run_dir).command(command, body)))

    async def status(self) -> dict[str, Any]:
        if self._operator is not None:
            return await self._operator.status()
        return await asyncio.to_thread(AdminClient(self.run_dir).status)

    def adapters(self) -> list[dict[str, object]]:
        assert self._operator is not None
        return self._operator.adapters()

    def started_with(self, label: str) -> dict[str, Any]:
        """The engine's section of its file, as it is now."""
        path = self.process(label).path
        found: dict[str, Any] = json.loads(path.read_text())["engine"]
        return found

    @property
    def written(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "gateway.json").read_text())
        return found

    async def idle(self) -> None:
        """Until no command keeps another one out."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.status())["command"] is not None:
                await asyncio.sleep(0.02)

    async def all_serving(self, model: str = "tiny") -> None:
        async with asyncio.timeout(PATIENCE_S):
            while set((await self.phases(model)).values()) != {"serving"}:
                await asyncio.sleep(0.02)

    async def phases(self, model: str = "tiny") -> dict[str, str]:
        [found] = [each for each in (await self.status())["models"] if each["name"] == model]
        return {replica["name"]: replica["phase"] for replica in found["replicas"]}

    def listed(self, model: str, gateway: str = "gateway") -> list[str]:
        """Replicas of a model in the file that a gateway has read."""
        [found] = [each for each in self.process(gateway).config["models"] if each["name"] == model]
        return [replica["name"] for replica in found["replicas"]]

    def pids(self, label: str) -> list[int]:
        return [process.pid for process in self.launcher.launched if process.label == label]

    def is_launched(self, label: str) -> bool:
        return bool(self.pids(label))

    def process(self, label: str) -> ScriptedProcess:
        return [process for process in self.launcher.launched if process.label == label][-1]


def models_of(replicas: dict[str, int]) -> tuple[ModelSpec, ...]:
    return tuple(ModelSpec(name=name, folder=Path("none"), replicas=number) for name, number in replicas.items())


@asynccontextmanager
async def scripted_site(
    script: Script | None = None,
    *,
    workers: int = 1,
    models: dict[str, int] | None = None,
    specs: tuple[ModelSpec, ...] = (),
    gateway: Mapping[str, object] | None = None,
    is_awaited: bool = True,
    has_file: bool = True,
    requests: Sequence[AdminRequests] = (),
    audit: WriteAudit = not_kept,
    **options: Any,
) -> AsyncIterator[ScriptedSite]:
    """A deployment that runs for the length of the block.

    models      name -> replicas; one replica of "tiny" by default
    specs       instead of `models`; gateway: more keys of its section
    is_awaited  begin once all that starts at once serves
    has_file    it can be read again
    requests    what the admin socket answers beside the commands for processes
    options     of `FleetConfig`
    """
    script = script or Script()
    launcher = ScriptedLauncher(script)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    operator = _WithoutSockets() if isinstance(asyncio.get_running_loop(), VirtualTimeLoop) else None
    with socket_dir() as parent, pytest.MonkeyPatch.context() as patch:
        if operator is not None:
            patch.setattr(supervisor_module, "reserved_port", operator.reserved_port)
            patch.setattr(supervisor_module, "admin_socket", operator.admin_socket)
        section = {"workers": workers, **(gateway or {})}
        config = FleetConfig(models=specs or models_of(models or {"tiny": 1}), gateway=section, run_dir=str(parent), **options)
        source = ScriptedSource(config)

        def make(on_ready: Callable[[FleetReady], None]) -> Supervisor:
            return Supervisor(
                config, launcher=launcher, source=source if has_file else None, requests=requests, audit=audit, on_ready=on_ready
            )

        site = ScriptedSite(script, launcher, make, source, parent, operator)
        try:
            await eventually(lambda: site.running.done() or (site.ready is not None if is_awaited else site.has_begun()), PATIENCE_S)
            yield site
        finally:
            site.running.cancel()
            try:
                with suppress(asyncio.CancelledError):
                    await site.end()
            finally:
                for number, handler in handlers.items():  # a supervisor that ends leaves them ignored, also in what tests start later
                    signal.signal(number, handler)


__all__ = ["FleetExit", "Script", "ScriptedSite", "scripted_site"]
