"""A whole deployment in the process of a test: the real supervisor, commands and admin socket over processes that are objects.

Real processes under the same supervisor are in `fleet_main.py`; these are for faults that take a real process long, or that need an exact
moment.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wire_kit import PATIENCE_S, socket_dir, until

from headrace.cli.control_client import AdminClient
from headrace.fleet.admin import AdminRequests
from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.fleet.launcher import Child, Failure
from headrace.fleet.supervisor import FleetExit, Supervisor
from headrace.wire.leash import LeashRequests


@dataclass
class Script:
    """What the processes of a deployment do, by their labels; may change at any time.

    loading       processes that do not get ready
    failing       engine -> why its configuration is refused
    not_ready     replica -> why gateways do not find it ready
    unreadable    model -> why gateways cannot use its tokenizer
    silent        gateways that answer nothing, and leave on no signal but SIGKILL
    holding       gateways that answer no reload
    refusal       why gateways refuse their file; empty: they take it
    num_open      replica -> requests that each gateway has open there
    """

    loading: set[str] = field(default_factory=set)
    failing: dict[str, str] = field(default_factory=dict)
    not_ready: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    holding: set[str] = field(default_factory=set)
    refusal: str = ""
    num_open: dict[str, int] = field(default_factory=dict)


class ScriptedProcess(Child):
    """A gateway or an engine. config: what its file said when it was last read"""

    def __init__(self, label: str, pid: int, path: Path, script: Script) -> None:
        self.label = label
        self.failure = None
        self.asked = LeashRequests(self._take_line)
        self._pid = pid
        self._path = path
        self._script = script
        self._loop = asyncio.get_running_loop()
        self.ready = self._loop.create_future()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self.exited = asyncio.create_task(self._live())
        self.config = json.loads(path.read_text())

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def is_gateway(self) -> bool:
        return "models" in self.config

    def terminate(self) -> None:
        if self.label not in self._script.silent:
            self._end(0)

    def kill(self) -> None:
        self._end(-signal.SIGKILL)

    def _end(self, status: int) -> None:
        if not self._ended.done():
            self._ended.set_result(status)

    async def _live(self) -> int:
        serving = asyncio.create_task(self._serve())
        try:
            return await self._ended
        finally:
            serving.cancel()
            self.ready.cancel()
            self.asked.close()

    async def _serve(self) -> None:
        if (reason := self._script.failing.get(self.label)) is not None:
            self.failure = Failure(reason, can_retry=False)
            self._end(78)
            return
        await until(lambda: self.label not in self._script.loading, 1000)
        facts = {"host": "127.0.0.1", "port": 1} if self.is_gateway else {"address": self.config["address"], "decided": []}
        self.ready.set_result({"event": "ready", **facts})

    def _take_line(self, line: bytes) -> None:
        self._loop.call_soon(self._answer, json.loads(line))

    def _answer(self, said: dict[str, Any]) -> None:
        if self.label in self._script.silent or (said["event"] == "reload" and self.label in self._script.holding):
            return
        if said["event"] == "status":
            self.asked.take({**said, "models": self._statuses()})
        elif self._script.refusal:
            self.asked.take({**said, "event": "refused", "reason": self._script.refusal})
        else:
            self.config = json.loads(self._path.read_text())
            self.asked.take({**said, "event": "reloaded"})

    def _statuses(self) -> dict[str, dict[str, dict[str, object]]]:
        models = self.config["models"]
        return {model["name"]: {each["name"]: self._status(model["name"], each["name"]) for each in model["replicas"]} for model in models}

    def _status(self, model: str, replica: str) -> dict[str, object]:
        unreadable = self._script.unreadable.get(model, "")
        reason = unreadable or ("loading" if replica in self._script.loading else self._script.not_ready.get(replica, ""))
        return {"ready": not reason, "reason": reason, "open": self._script.num_open.get(replica, 0), "refused": bool(unreadable)}


class ScriptedLauncher:
    """launched: every process ever started, in that order"""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.launched: list[ScriptedProcess] = []

    async def launch(self, label: str, command: Sequence[str], *, forward: bool, withheld: Collection[str] = ()) -> Child:
        path = Path(command[command.index("--config") + 1])
        self.launched.append(ScriptedProcess(label, 100 + len(self.launched), path, self._script))
        return self.launched[-1]


class ScriptedSource:
    """A `fleet.control.ConfigSource`. config: what the next reload reads"""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config

    def read(self) -> FleetConfig:
        return self.config.checked()

    def differences(self) -> list[str]:
        return []

    def accept(self) -> None:
        """Nothing to remember."""


class ScriptedSite:
    """The running deployment and its operator."""

    def __init__(self, script: Script, launcher: ScriptedLauncher, supervisor: Supervisor, source: ScriptedSource, parent: Path) -> None:
        self.script = script
        self.launcher = launcher
        self.supervisor = supervisor
        self.source = source
        self.running = asyncio.create_task(supervisor.run())
        self._parent = parent

    @property
    def run_dir(self) -> Path:
        [found] = self._parent.glob("headrace-*")
        return found

    def scale_file(self, **replicas: int) -> None:
        """The file that is read at the next reload: its models, and the replicas of each."""
        self.source.config = replace(self.source.config, models=models_of(replicas))

    async def do(self, command: str, **body: Any) -> list[dict[str, Any]]:
        """A command to its end."""
        return await asyncio.to_thread(lambda: list(AdminClient(self.run_dir).command(command, body)))

    async def status(self) -> dict[str, Any]:
        return await asyncio.to_thread(AdminClient(self.run_dir).status)

    async def idle(self) -> None:
        """Until no command keeps another one out."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.status())["command"] is not None:
                await asyncio.sleep(0.02)

    async def all_serving(self) -> None:
        """Until every replica of "tiny" has been ready at every gateway."""
        async with asyncio.timeout(PATIENCE_S):
            while set((await self.phases()).values()) != {"serving"}:
                await asyncio.sleep(0.02)

    async def phases(self, model: str = "tiny") -> dict[str, str]:
        [found] = [each for each in (await self.status())["models"] if each["name"] == model]
        return {replica["name"]: replica["phase"] for replica in found["replicas"]}

    def listed(self, model: str, gateway: str = "gateway") -> list[str]:
        """Replicas of a model in the file that a gateway has read."""
        [found] = [each for each in self.process(gateway).config["models"] if each["name"] == model]
        return [replica["name"] for replica in found["replicas"]]

    def pids(self, label: str) -> list[int]:
        """Of every process that ran under this label."""
        return [process.pid for process in self.launcher.launched if process.label == label]

    def is_launched(self, label: str) -> bool:
        return bool(self.pids(label))

    def process(self, label: str) -> ScriptedProcess:
        """The latest of this label."""
        return [process for process in self.launcher.launched if process.label == label][-1]


def models_of(replicas: dict[str, int]) -> tuple[ModelSpec, ...]:
    return tuple(ModelSpec(name=name, folder=Path("none"), replicas=number) for name, number in replicas.items())


@asynccontextmanager
async def scripted_site(
    script: Script | None = None,
    *,
    workers: int = 1,
    models: dict[str, int] | None = None,
    is_awaited: bool = True,
    requests: Sequence[AdminRequests] = (),
    **options: Any,
) -> AsyncIterator[ScriptedSite]:
    """A deployment that runs for the length of the block.

    models      name -> replicas; one replica of "tiny" by default
    is_awaited  begin once all that starts at once serves
    requests    what the admin socket answers beside the commands for processes
    options     of `FleetConfig`
    """
    script = script or Script()
    launcher = ScriptedLauncher(script)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    with socket_dir() as parent:
        config = FleetConfig(models=models_of(models or {"tiny": 1}), gateway={"workers": workers}, run_dir=parent, **options)
        served = asyncio.Event()
        source = ScriptedSource(config)
        supervisor = Supervisor(config, launcher=launcher, source=source, requests=requests, on_ready=lambda _: served.set())
        site = ScriptedSite(script, launcher, supervisor, source, parent)
        try:
            async with asyncio.timeout(PATIENCE_S):
                if is_awaited:
                    await served.wait()
                else:
                    await until(lambda: any(parent.glob("headrace-*/admin.sock")))
            yield site
        finally:
            site.running.cancel()
            try:
                with suppress(asyncio.CancelledError):
                    await site.running
            finally:
                for number, handler in handlers.items():  # a supervisor that ends leaves them ignored, also in what tests start later
                    signal.signal(number, handler)


__all__ = ["FleetExit", "Script", "ScriptedSite", "scripted_site"]
