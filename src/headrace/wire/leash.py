"""Ties a child process to its supervisor by a socket pair, over which each end writes one JSON object per line.

    child       {"event": "ready", ...}                               it serves, with facts about it
                {"event": "failed", "reason": R, "can_retry": B}      why it ends
    supervisor  {"event": "reload", "id": N}                          read your file again, and apply what has changed
    child       {"event": "reloaded", "id": N, ...}                   done: it holds for every later request; with facts that changed
                {"event": "refused", "id": N, "reason": R}            nothing was changed
    supervisor  {"event": "status", "id": N}
    child       {"event": "status", "id": N, "models": {MODEL: STATUS}}
    supervisor  {"event": "sleep", "id": N, "level": L}               finish your requests, take no others, and sleep
    supervisor  {"event": "wake", "id": N}
    child       {"event": "done", "id": N}                            asleep or awake; or "refused", as above

The child exits at once when the supervisor's end closes: no orphan keeps a port or a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any, NamedTuple

from headrace.core.errors import HeadraceError, Unavailable
from headrace.core.load import AttemptCounts
from headrace.core.sleep import SleepLevel

ORPHANED = 69
"""Exit status of a child whose supervisor is gone (EX_UNAVAILABLE)."""


DRAINING = "draining"
ASLEEP = "asleep"

MAX_REASON_CHARS = 400
"""In the status of a replica: then the longest line that the supervisor reads (`fleet.launcher`) holds more than 10,000 replicas."""


class LeashRequestKind(StrEnum):
    RELOAD = "reload"
    STATUS = "status"
    SLEEP = "sleep"
    WAKE = "wake"


@dataclass(frozen=True, slots=True)
class LeashRequest:
    """The answer carries the same id. level: of SLEEP"""

    kind: LeashRequestKind
    id: int
    level: SleepLevel | None = None


class ReportedReplicaLoad(NamedTuple):
    """What an engine reported last: the same at every gateway, but for the age.

    fill                       sequences, or KV blocks where these are scarcer, in use: 1.0 is all
    num_finished, num_tokens   sequences and output tokens since its process started
    """

    num_running: int
    num_waiting: int
    fill: float
    num_finished: int
    num_tokens: int
    age_s: float


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """As one gateway sees it.

    is_refused  its model's tokenizer or chat template cannot be used
    load        None: it has not reported, or is a foreign server
    """

    is_ready: bool
    reason: str
    num_open: int
    is_refused: bool = False
    load: ReportedReplicaLoad | None = None
    attempts: AttemptCounts = field(default_factory=AttemptCounts)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """As one gateway sees it.

    replicas     by name; a retired one is listed until the gateway has closed its connection
    num_arrived  requests that asked for the model since the gateway began to serve it
    num_held     those that wait for any replica to serve
    wait_s       predicted until the engine begins a new request; 0 where no replica is connected
    """

    replicas: Mapping[str, ReplicaStatus]
    num_arrived: int = 0
    num_held: int = 0
    wait_s: float = 0.0


ModelStatuses = Mapping[str, ModelStatus]


class ReloadRefused(HeadraceError):
    """The child changed nothing."""


class Leash:
    """The child's end of its leash. Without a descriptor (started by hand) it does nothing."""

    def __init__(self, fd: int | None) -> None:
        """fd: owned by this object from now on. Raises OSError when it is no socket"""
        self._socket = None if fd is None else socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._handler: Callable[[LeashRequest], None] | None = None
        self._unhandled: list[LeashRequest] = []

    @property
    def is_held(self) -> bool:
        return self._socket is not None

    def watch(self, on_gone: Callable[[], None] | None = None) -> None:
        """In a thread of its own: a blocked event loop must not keep an orphan alive.

        on_gone  called once the supervisor's end has closed; None: this process exits at once with status ORPHANED
        """
        if self._socket is not None:
            leave = on_gone or (lambda: os._exit(ORPHANED))
            threading.Thread(target=self._wait, args=(self._socket, leave), name="leash", daemon=True).start()

    def listen(self, handler: Callable[[LeashRequest], None] | None) -> None:
        """`handler` is called in the thread of `watch`, and must not raise."""
        with self._lock:
            self._handler = handler
            waiting, self._unhandled = (self._unhandled, []) if handler is not None else ([], self._unhandled)
            for request in waiting:
                self._handle(request)

    def ready(self, facts: Mapping[str, object] | None = None) -> None:
        self._say({"event": "ready", **(facts or {})})

    def failed(self, reason: str, *, can_retry: bool) -> None:
        """can_retry False: a start with the same configuration fails again"""
        self._say({"event": "failed", "reason": reason, "can_retry": can_retry})

    def reloaded(self, request: LeashRequest, facts: Mapping[str, object] | None = None) -> None:
        """facts: those of `ready` that have changed"""
        self._say({"event": "reloaded", "id": request.id, **(facts or {})})

    def done(self, request: LeashRequest) -> None:
        self._say({"event": "done", "id": request.id})

    def refused(self, request: LeashRequest, reason: str) -> None:
        self._say({"event": "refused", "id": request.id, "reason": reason})

    def status(self, request: LeashRequest, models: ModelStatuses) -> None:
        self._say({"event": "status", "id": request.id, "models": {model: said_model(status) for model, status in models.items()}})

    def _say(self, message: Mapping[str, object]) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return  # The supervisor is gone; `watch` ends this process.

    def _wait(self, end: socket.socket, on_gone: Callable[[], None]) -> None:
        rest = b""
        try:
            while data := end.recv(4096):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line)
        except OSError:
            pass
        finally:  # whatever ends this thread ends the process: without it an orphan would not notice
            on_gone()

    def _take(self, line: bytes) -> None:
        message = json.loads(line)
        with self._lock:
            level = SleepLevel(message["level"]) if "level" in message else None
            self._handle(LeashRequest(LeashRequestKind(message["event"]), message["id"], level))

    def _handle(self, request: LeashRequest) -> None:
        if self._handler is not None:
            self._handler(request)
        else:
            self._unhandled.append(request)


def said_model(status: ModelStatus) -> Mapping[str, object]:
    replicas = {name: _said(replica) for name, replica in status.replicas.items()}
    return {"replicas": replicas, "arrived": status.num_arrived, "held": status.num_held, "wait_s": status.wait_s}


def _said(status: ReplicaStatus) -> Mapping[str, object]:
    facts = {"ready": status.is_ready, "reason": status.reason[:MAX_REASON_CHARS], "open": status.num_open, "refused": status.is_refused}
    return {**facts, "load": status.load, "attempts": astuple(status.attempts)}


def _heard_model(said: Mapping[str, Any]) -> ModelStatus:
    replicas = {name: _heard(replica) for name, replica in said["replicas"].items()}
    return ModelStatus(replicas, said["arrived"], said["held"], said["wait_s"])


def _heard(said: Mapping[str, Any]) -> ReplicaStatus:
    load = None if said["load"] is None else ReportedReplicaLoad(*said["load"])
    return ReplicaStatus(said["ready"], said["reason"], said["open"], said["refused"], load, AttemptCounts(*said["attempts"]))


class LeashRequests:
    """A supervisor's requests to one child, and the answers to them. Lives on one event loop."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._ids = count(1)
        self._open: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._is_closed = False
        self.num_answers = 0

    async def reload(self) -> Mapping[str, Any]:
        """Raises ReloadRefused, or Unavailable when the child ends first."""
        answer = await self._ask(LeashRequestKind.RELOAD)
        _raise_if_refused(answer)
        return {name: value for name, value in answer.items() if name not in ("event", "id")}

    async def status(self) -> ModelStatuses:
        answer = await self._ask(LeashRequestKind.STATUS)
        return {model: _heard_model(said) for model, said in answer["models"].items()}

    async def change_sleep(self, level: SleepLevel | None) -> None:
        """Returns once it sleeps, or with None is awake. Raises as `reload`."""
        asked = self._ask(LeashRequestKind.WAKE) if level is None else self._ask(LeashRequestKind.SLEEP, level=level.value)
        _raise_if_refused(await asked)

    def take(self, message: Mapping[str, Any]) -> None:
        """An answer to a request that was given up is only counted."""
        self.num_answers += 1
        answered = self._open.get(message.get("id", 0))
        if answered is not None and not answered.done():
            answered.set_result(message)

    def close(self) -> None:
        self._is_closed = True
        for asked in self._open.values():
            if not asked.done():
                asked.set_exception(Unavailable("the process ended before it answered"))

    async def _ask(self, kind: LeashRequestKind, **more: object) -> Mapping[str, Any]:
        if self._is_closed:
            raise Unavailable("the process has ended")
        number = next(self._ids)
        asked: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._open[number] = asked
        try:
            self._write(json.dumps({"event": kind.value, "id": number, **more}).encode() + b"\n")
            return await asked
        finally:
            del self._open[number]


def _raise_if_refused(answer: Mapping[str, Any]) -> None:
    if answer["event"] == "refused":
        raise ReloadRefused(str(answer["reason"]))
