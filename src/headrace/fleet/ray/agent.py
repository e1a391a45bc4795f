"""Runs the processes of one replica on the node that Ray has chosen, and keeps what they say until the supervisor has it.

Ray makes an actor of it (`fleet.ray.cluster`); the other end is `fleet.ray.host`. Ray ends an actor with the program that made it, and the
processes end with the agent, which holds their leashes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any

from headrace import __version__
from headrace.core.errors import CheckpointError, ConfigError, HeadraceError, Unavailable
from headrace.core.sleep import SleepLevel
from headrace.fleet.authority import pem_of_key, write_folder
from headrace.fleet.files import rank_label, write_process_file
from headrace.fleet.launcher import Child, Launcher, ProcessLauncher, Say, launch_ranks
from headrace.fleet.weights import resolve_adapter, resolve_model
from headrace.machine.locked_folders import LockedFolder, remove_unlocked
from headrace.machine.resources import num_allowed_cpus
from headrace.machine.signals import first_of
from headrace.wire.leash import ReloadRefused
from headrace.wire.listening import shown_host
from headrace.wire.tls.files import CA_NAME, CERTIFICATE_NAME, KEY_NAME

FOLDER_PREFIX = "headrace-node-"
LOCK_NAME = "node.lock"
"""A name other than "lock", which marks a deployment's directory (fleet/files.py)."""

MAX_LOG_BYTES = 2**20
"""Lines that the supervisor has not taken; further ones are dropped and counted."""

NOT_STARTED = 78
"""Exit status of processes that were never started (EX_CONFIG)."""

Content = Mapping[str, Any]
"""What an engine's file says, as the supervisor writes it for another machine."""


class EventKind(StrEnum):
    SAID = "said"
    READY = "ready"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """
    about  SAID: line and label; READY: facts; ENDED: status, label, reason and can_retry; a reason is empty where none was given
    """

    number: int
    kind: EventKind
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """public_key: PEM; the other half stays on the node"""

    host: str
    version: str
    public_key: bytes


@dataclass(frozen=True, slots=True, repr=False)
class NodeOrder:
    """
    command      arguments of the interpreter that runs an engine
    sources      folders of the supervisor's machine -> what names them on any other one
    withheld     variables that engines do not inherit
    authority, certificate  PEM
    token        what gateways send to this engine
    num_threads  of all ranks
    """

    replica: str
    command: Sequence[str]
    configs: Sequence[Content]
    sources: Mapping[str, str]
    withheld: Sequence[str]
    authority: bytes
    certificate: bytes
    token: str
    num_threads: int


class NodeAgent:
    def __init__(self, host: str, num_neighbours: int, launch_by: Callable[[Say], Launcher] | None = None) -> None:
        """num_neighbours: other replicas for which the node has room, and whose memory is left free"""
        from cryptography.hazmat.primitives.asymmetric import ec

        self._host = host
        self._num_neighbours = num_neighbours
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._is_launching_processes = launch_by is None
        self._launcher = ProcessLauncher(say=self._say) if launch_by is None else launch_by(self._say)
        self._events: deque[NodeEvent] = deque()
        self._numbers = count(1)
        self._has_events = asyncio.Event()
        self._num_log_bytes = 0
        self._num_dropped = 0
        self._lock = asyncio.Lock()
        self._folder: LockedFolder | None = None
        self._sweep: IO[bytes] | None = None
        self._order: NodeOrder | None = None
        self._child: Child | None = None
        self._following: asyncio.Task[None] | None = None

    async def identity(self) -> NodeIdentity:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return NodeIdentity(self._host, __version__, self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))

    async def start(self, order: NodeOrder) -> Sequence[int]:
        """Returns the process ids, none where it cannot be started: an event says why."""
        async with self._lock:
            self._order = order
            try:
                paths = await asyncio.to_thread(self._prepare, order)
                self._child = child = await launch_ranks([self._launch_of(order, rank, path) for rank, path in enumerate(paths)])
            except (HeadraceError, OSError, subprocess.CalledProcessError) as error:
                can_retry = not isinstance(error, ConfigError | CheckpointError)
                self._ended(NOT_STARTED, order.replica, str(error), can_retry=can_retry)
                return ()
            self._following = asyncio.create_task(self._follow(child))
            return child.pids

    async def events(self, after: int) -> Sequence[NodeEvent]:
        """Returns events with higher numbers, once there are some, and forgets the others."""
        while self._events and self._events[0].number <= after:
            event = self._events.popleft()
            self._num_log_bytes -= len(event.about.get("line", ""))
        while not self._events:
            self._has_events.clear()
            await self._has_events.wait()
        return [*self._events]

    async def reload(self, configs: Sequence[Content], sources: Mapping[str, str]) -> Mapping[str, object]:
        """configs, sources: as of `NodeOrder`. Returns the answer of the first process in the words of `wire.leash`."""
        async with self._lock:
            if self._child is None or self._child.exited.done() or self._order is None:
                return {"event": "reloaded"}  # the next one reads the file
            self._order = replace(self._order, sources=sources)
            try:
                await asyncio.to_thread(self._write, self._order, configs)
            except (HeadraceError, OSError) as error:
                return {"event": "refused", "reason": str(error)}
        try:
            return {"event": "reloaded", **await self._child.asked.reload()}
        except ReloadRefused as refused:
            return {"event": "refused", "reason": str(refused)}
        except Unavailable:
            return {"event": "reloaded"}

    async def change_sleep(self, level: str | None) -> Mapping[str, object]:
        """Returns as `reload`, once the replica sleeps, or with None is awake."""
        if self._child is None or self._child.exited.done():
            return {"event": "refused", "reason": "it has no process that runs"}
        try:
            await self._child.asked.change_sleep(None if level is None else SleepLevel(level))
        except (ReloadRefused, Unavailable) as error:
            return {"event": "refused", "reason": str(error)}
        return {"event": "done"}

    async def terminate(self) -> None:
        async with self._lock:
            if self._child is not None:
                self._child.terminate()

    def _launch_of(self, order: NodeOrder, rank: int, path: Path) -> Callable[[], Any]:
        command = (sys.executable, *order.command, "--config", str(path))
        return partial(self._launcher.launch, rank_label(order.replica, rank), command, forward=True, withheld=order.withheld)

    async def _follow(self, child: Child) -> None:
        await first_of(child.ready, child.exited)
        if child.ready.done() and not child.ready.cancelled():
            self._add(EventKind.READY, child.ready.result())
        status, failure = await child.exited, child.failure
        self._ended(status, child.label, failure.reason if failure else "", can_retry=failure is None or failure.can_retry)

    # -- files ---------------------------------------------------------------------------------------------------------------------

    def _prepare(self, order: NodeOrder) -> list[Path]:
        base = Path(tempfile.gettempdir())
        remove_unlocked(base, FOLDER_PREFIX, LOCK_NAME)
        self._folder = LockedFolder.make(base, FOLDER_PREFIX, LOCK_NAME)
        if self._is_launching_processes:
            self._sweep = _swept_with_this_process(self._folder.path)  # before there are secrets in it
        files = {CA_NAME: order.authority, CERTIFICATE_NAME: order.certificate, KEY_NAME: pem_of_key(self._key)}
        write_folder(self._folder.path / "tls", files)
        return self._write(order, order.configs)

    def _write(self, order: NodeOrder, configs: Sequence[Content]) -> list[Path]:
        assert self._folder is not None, "it is made first"
        paths = [self._folder.path / f"{rank_label('engine', rank)}.json" for rank in range(len(configs))]
        for path, content in zip(paths, configs, strict=True):
            write_process_file(path, self._placed(order, content, len(configs)))
        return paths

    def _placed(self, order: NodeOrder, content: Content, num_ranks: int) -> Content:
        assert self._folder is not None, "it is made first"
        folder, engine = self._folder.path, dict(content["engine"])
        engine["model"] = str(_here(order, engine["model"], resolve_model))
        if (drafting := engine.get("speculative_config")) and drafting.get("model"):
            engine["speculative_config"] = {**drafting, "model": str(_here(order, drafting["model"], resolve_model))}
        if adapters := engine.get("lora_modules"):
            engine["lora_modules"] = [{**each, "path": str(_here(order, each["path"], resolve_adapter))} for each in adapters]
        if engine.get("num_threads") is None:
            engine["num_threads"] = max(1, min(order.num_threads, num_allowed_cpus()) // num_ranks)
        return {
            **content,
            "engine": engine,
            "address": f"{shown_host(self._host)}:0",
            "token": order.token,
            "tls_dir": str(folder / "tls"),
            "num_neighbours": (1 + self._num_neighbours) * num_ranks - 1,
            **({"rendezvous": f"unix:{folder / 'ranks'}"} if num_ranks > 1 else {}),
        }

    # -- what the supervisor takes -------------------------------------------------------------------------------------------------

    def _say(self, line: str, label: str) -> None:
        if self._num_log_bytes + len(line) > MAX_LOG_BYTES:
            self._num_dropped += 1
            return
        if self._num_dropped:
            number, self._num_dropped = self._num_dropped, 0
            self._say(f"{number} lines of the log were dropped: the supervisor did not take them in time", label)
        self._num_log_bytes += len(line)
        self._add(EventKind.SAID, {"line": line, "label": label})

    def _ended(self, status: int, label: str, reason: str, *, can_retry: bool) -> None:
        if self._folder is not None:
            with suppress(OSError):
                self._folder.remove()
        if self._sweep is not None:
            self._sweep.close()
        self._add(EventKind.ENDED, {"status": status, "label": label, "reason": reason, "can_retry": can_retry})

    def _add(self, kind: EventKind, about: Mapping[str, Any]) -> None:
        self._events.append(NodeEvent(next(self._numbers), kind, about))
        self._has_events.set()


def _swept_with_this_process(folder: Path) -> IO[bytes]:
    """Closed, or once this process has ended, a process of its own removes the folder: Ray ends an agent, and what it started, by SIGKILL.

    The shell that is started ends at once, and leaves the one that waits without a parent: Ray does not find it.
    """
    reading, writing = os.pipe()
    command = ("/bin/sh", "-c", 'exec 3<&0; { read -r _; rm -rf -- "$1"; } <&3 3<&- &', "sh", str(folder))
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(
            command, stdin=reading, stdout=quiet, stderr=quiet, start_new_session=True, cwd="/", env={"PATH": os.defpath}, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return os.fdopen(writing, "wb")


def _here(order: NodeOrder, folder: str, resolve: Callable[[str], Path]) -> Path | str:
    """Where this node has what the supervisor's machine has in `folder`. Raises as `resolve`."""
    name = order.sources.get(folder)
    return folder if name is None else resolve(name)
