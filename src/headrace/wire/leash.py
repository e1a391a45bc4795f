"""Ties a child process to its supervisor by a socket pair, over which each end writes one JSON object per line.

    child       {"event": "ready", ...}                               it serves, with facts about it
                {"event": "failed", "reason": R, "can_retry": B}      why it ends
    supervisor  {"event": "reload", "id": N}                          read your file again, and apply what has changed
    child       {"event": "reloaded", "id": N, ...}                   done: it holds for every later request; with facts that changed
                {"event": "refused", "id": N, "reason": R}            nothing was changed
    supervisor  {"event": "status", "id": N}
    child       {"event": "status", "id": N, "models": {MODEL: {REPLICA: STATUS}}}

The child exits at once when the supervisor's end closes: no orphan keeps a port or a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Any

from headrace.core.errors import HeadraceError, Unavailable

ORPHANED = 69
"""Exit status of a child whose supervisor is gone (EX_UNAVAILABLE)."""


DRAINING = "draining"


class LeashRequestKind(StrEnum):
    RELOAD = "reload"
    STATUS = "status"


@dataclass(frozen=True, slots=True)
class LeashRequest:
    """The answer carries the same id."""

    kind: LeashRequestKind
    id: int


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """As one gateway sees it. is_refused: its model's tokenizer or chat template cannot be used"""

    is_ready: bool
    reason: str
    num_open: int
    is_refused: bool = False


ModelStatuses = Mapping[str, Mapping[str, ReplicaStatus]]
"""Model to replica to status. A retired replica is listed until the gateway has closed its connection."""


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

    def refused(self, request: LeashRequest, reason: str) -> None:
        self._say({"event": "refused", "id": request.id, "reason": reason})

    def status(self, request: LeashRequest, models: ModelStatuses) -> None:
        said = {model: {name: _said(status) for name, status in replicas.items()} for model, replicas in models.items()}
        self._say({"event": "status", "id": request.id, "models": said})

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
            self._handle(LeashRequest(LeashRequestKind(message["event"]), message["id"]))

    def _handle(self, request: LeashRequest) -> None:
        if self._handler is not None:
            self._handler(request)
        else:
            self._unhandled.append(request)


def _said(status: ReplicaStatus) -> Mapping[str, object]:
    return {"ready": status.is_ready, "reason": status.reason, "open": status.num_open, "refused": status.is_refused}


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
        if answer["event"] == "refused":
            raise ReloadRefused(str(answer["reason"]))
        return {name: value for name, value in answer.items() if name not in ("event", "id")}

    async def status(self) -> ModelStatuses:
        answer = await self._ask(LeashRequestKind.STATUS)
        return {
            model: {name: ReplicaStatus(said["ready"], said["reason"], said["open"], said["refused"]) for name, said in replicas.items()}
            for model, replicas in answer["models"].items()
        }

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

    async def _ask(self, kind: LeashRequestKind) -> Mapping[str, Any]:
        if self._is_closed:
            raise Unavailable("the process has ended")
        number = next(self._ids)
        asked: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._open[number] = asked
        try:
            self._write(json.dumps({"event": kind.value, "id": number}).encode() + b"\n")
            return await asked
        finally:
            del self._open[number]
