"""Answers operators' requests: HTTP with JSON over a Unix socket in the deployment's directory, or over TCP (docs/control.md)."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import pwd
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace.core.errors import CheckpointError, ConfigError, HeadraceError, RegistryFailed
from headrace.core.sleep import SleepLevel
from headrace.core.strict_decode import decode
from headrace.core.tasks import RunningTasks, end_tasks
from headrace.fleet.admin_listen import AdminAddress
from headrace.fleet.commands import ControlBusy, Hear
from headrace.fleet.control import FleetControl, Promotion
from headrace.policy.deployment import RolloutOptions
from headrace.wire.leash import ReloadRefused
from headrace.wire.listening import listening_sockets, shown_address, shown_host

if TYPE_CHECKING:
    from aiohttp import web


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadBody:
    """Empty: everything is in the configuration file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBody:
    """version: which version of the model's registry is served, before the alias that the file names points to it"""

    model: str | None = None
    max_surge: int = 1
    allow_outage: bool = False
    alias: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBody:
    model: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepBody:
    model: str
    level: str = SleepLevel.RAM.value


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeBody:
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAdapterBody:
    """path: a folder below lora_root; relative to it, or absolute"""

    name: str
    path: str
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadAdapterBody:
    name: str
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainBody:
    """replica: None for the whole deployment; within_s: until open requests move"""

    replica: str | None = None
    within_s: float
    allow_outage: bool = False


log = logging.getLogger(__name__)

SOCKET_NAME = "admin.sock"
TOKEN_NAME = "admin.token"
MAX_BODY_BYTES = 1 << 16
BACKLOG = 128

Command = Callable[[Mapping[str, object], Hear], Coroutine[Any, Any, list[str]]]


class AdminRequests(Protocol):
    async def answer(
        self, method: str, path: Sequence[str], query: Mapping[str, str], body: Mapping[str, object], actor: str
    ) -> tuple[int, object] | None:
        """Returns (status, JSON data), or None for a path that this object does not serve."""
        ...


@asynccontextmanager
async def admin_socket(
    folder: Path, control: FleetControl, requests: Sequence[AdminRequests] = (), address: AdminAddress | None = None
) -> AsyncIterator[None]:
    """Raises ConfigError if a place cannot be listened at."""
    path = folder / SOCKET_NAME
    local = _AdminServer(control, _write_token(folder / TOKEN_NAME), requests)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(_answering(local, partial(_listen_at_socket, path=path)))
        if address is not None:
            remote = _AdminServer(control, address.token, requests)
            await stack.enter_async_context(_answering(remote, partial(_listen_at_address, address=address)))
        yield


async def _listen_at_socket(runner: web.AppRunner, path: Path) -> None:
    from aiohttp import web

    try:
        await web.UnixSite(runner, path).start()
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError("run_dir", f"{path} cannot be made ({error.strerror})") from error


async def _listen_at_address(runner: web.AppRunner, address: AdminAddress) -> None:
    from aiohttp import web

    try:
        sockets = await asyncio.to_thread(listening_sockets, address.host, address.port, backlog=BACKLOG)
        for each in sockets:
            await web.SockSite(runner, each, ssl_context=address.context).start()
    except OSError as error:
        raise ConfigError("admin.listen", f"{shown_host(address.host)}:{address.port} cannot be listened on ({error.strerror})") from error
    scheme = "http" if address.context is None else "https"
    log.info("admin requests are answered at %s", ", ".join(f"{scheme}://{shown_address(each)}" for each in sockets))


@asynccontextmanager
async def _answering(server: _AdminServer, listen: Callable[[web.AppRunner], Awaitable[None]]) -> AsyncIterator[None]:
    from aiohttp import web

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.add_routes([web.get("/status", server.status), web.get("/adapters", server.adapters)])
    app.add_routes([web.post(f"/{name}", server.command) for name in server.commands])
    app.router.add_route("*", "/{path:.*}", server.request)
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await listen(runner)
        yield
    finally:
        await server.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await runner.cleanup()


def _write_token(path: Path) -> str:
    token = secrets.token_urlsafe(32)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(token)
    return token


class _AdminServer:
    def __init__(self, control: FleetControl, token: str, requests: Sequence[AdminRequests]) -> None:
        self._control = control
        self._expected = f"Bearer {token}".encode()
        self._requests = requests
        self._running = RunningTasks()
        self.commands: dict[str, Command] = {
            "reload": self._reload,
            "rollout": self._roll_out,
            "scale": self._scale,
            "drain": self._drain,
            "sleep": self._sleep,
            "wake": self._wake,
            "load-adapter": self._load_adapter,
            "unload-adapter": self._unload_adapter,
        }

    async def close(self) -> None:
        await end_tasks(self._running)

    async def status(self, request: web.Request) -> web.Response:
        from aiohttp import web

        self._authenticate(request)
        return web.json_response(await self._control.status())

    async def adapters(self, request: web.Request) -> web.Response:
        from aiohttp import web

        self._authenticate(request)
        return web.json_response(self._control.adapters.rows())

    async def request(self, request: web.Request) -> web.Response:
        """Without the token every path gets the same refusal."""
        from aiohttp import web

        self._authenticate(request)
        parts = tuple(request.path.strip("/").split("/"))
        body = await _body(request)
        for requests in self._requests:
            if (answer := await requests.answer(request.method, parts, request.query, body, _user_at(request))) is not None:
                return web.json_response(answer[1], status=answer[0])
        raise web.HTTPNotFound(text="There is no such request.")

    async def command(self, request: web.Request) -> web.StreamResponse:
        """Lines of JSON: progress, then how the command ended. It goes on if the client leaves."""
        from aiohttp import web

        self._authenticate(request)
        body = await _body(request)
        lines: asyncio.Queue[Mapping[str, object]] = asyncio.Queue()

        def hear(text: str) -> None:
            lines.put_nowait({"event": "progress", "text": text})

        actor = f"{_user_at(request)}, through the admin socket"
        task = self._running.start(self._audited(request.path.removeprefix("/"), body, actor, hear), f"command {request.path}")
        task.add_done_callback(lambda done: lines.put_nowait(_end_of(done)))
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                line = await lines.get()
                await response.write(json.dumps(line).encode() + b"\n")
                if line["event"] != "progress":
                    await response.write_eof()
                    break
        return response

    async def _audited(self, name: str, body: Mapping[str, object], actor: str, hear: Hear) -> list[str]:
        """The end of the whole deployment is recorded first: it also ends this task."""
        ends_all = name == "drain" and body.get("replica") is None
        if ends_all:
            await self._control.audit.record(actor, name, body, hear)
        failures = await self.commands[name](body, hear)
        if not ends_all:
            await self._control.audit.record(actor, name, body, hear, failures)
        return failures

    def _authenticate(self, request: web.Request) -> None:
        from aiohttp import web

        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), self._expected):
            raise web.HTTPUnauthorized(text="The token is missing or wrong.")

    async def _reload(self, body: Mapping[str, object], hear: Hear) -> list[str]:
        decode(ReloadBody, body)
        return await self._control.reload(hear)

    async def _roll_out(self, body: Mapping[str, object], hear: Hear) -> list[str]:
        given = decode(RolloutBody, body)
        if given.max_surge not in (0, 1):
            raise ConfigError("--max-surge", f"{given.max_surge} is neither 0 nor 1")
        if (given.alias is None) != (given.version is None):
            raise ConfigError("version", "goes with alias", "Give both.")
        promotion = None if given.alias is None or given.version is None else Promotion(given.alias, given.version)
        return await self._control.roll_out(given.model, RolloutOptions(given.max_surge, given.allow_outage), hear, promotion=promotion)

    async def _scale(self, body: Mapping[str, object], hear: Hear) -> list[str]:
        given = decode(ScaleBody, body)
        return await self._control.scale(given.model, given.replicas, hear)

    async def _sleep(self, body: Mapping[str, object], hear: Hear) -> list[str]:
        given = decode(SleepBody, body)
        if given.level not in [*SleepLevel]:
            raise ConfigError("--level", f"{given.level!r} is not one of {', '.join(SleepLevel)}")
        return await self._control.change_sleep(given.model, SleepLevel(given.level), hear)

    async def _wake(self, body: Mapping[str, object], hear: Hear) -> list[str]:
        return await self._control.change_sleep(decode(WakeBody, body).model, None, hear)

    async def _load_adapter(self, body: Mapping[str, object], hear: Hear) -> list[str]:
        given = decode(LoadAdapterBody, body)
        await self._control.adapters.load(given.name, given.path, given.model, hear)
        return []

    async def _unload_adapter(self, body: Mapping[str, object], hear: Hear) -> list[str]:
        given = decode(UnloadAdapterBody, body)
        await self._control.adapters.unload(given.name, given.model, hear)
        return []

    async def _drain(self, body: Mapping[str, object], hear: Hear) -> list[str]:
        given = decode(DrainBody, body)
        if given.replica is None:
            return await self._control.drain_all(given.within_s)
        return await self._control.drain(given.replica, given.within_s, allow_outage=given.allow_outage, hear=hear)


async def _body(request: web.Request) -> Mapping[str, object]:
    from aiohttp import web

    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="The body is no JSON object.")
    return body


def _user_at(request: web.Request) -> str:
    """The user of the process at the other end; over TCP its certificate's name and its address."""
    connected = None if request.transport is None else request.transport.get_extra_info("socket")
    if request.transport is None or connected is None:
        return "unknown"
    if connected.family != socket.AF_UNIX:
        return f"{_certificate_name(request.transport)} at {request.remote}"
    _, uid, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _certificate_name(transport: asyncio.BaseTransport) -> str:
    subject = (transport.get_extra_info("peercert") or {}).get("subject", ())
    return next((str(value) for part in subject for name, value in part if name == "commonName"), "somewhere")


def _end_of(task: asyncio.Task[list[str]]) -> dict[str, object]:
    if task.cancelled():
        return {"event": "failed", "reason": "The deployment ends."}
    error = task.exception()
    if isinstance(error, ConfigError | CheckpointError | RegistryFailed | ReloadRefused | ControlBusy):
        return {"event": "refused", "reason": str(error)}
    if isinstance(error, HeadraceError):
        return {"event": "failed", "reason": str(error)}
    if error is not None:
        log.error("a command failed", exc_info=error)
        return {"event": "failed", "reason": "The command failed by a fault of this program; the log says more."}
    failures = task.result()
    return {"event": "failed", "reason": "\n".join(failures)} if failures else {"event": "done"}
