"""The leash: a socket pair between a supervisor and a child it started.

The child says through it when it is ready or why it refused to start (one JSON object per line); the supervisor says nothing and only
holds its end. When that end closes, by `kill -9` of the supervisor too, the child exits at once: no orphan keeps a port or a GPU.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping

ORPHANED = 69
"""Exit status of a child whose supervisor is gone (EX_UNAVAILABLE)."""


class Leash:
    """The child's end. Without a descriptor (started by hand) it does nothing."""

    def __init__(self, fd: int | None) -> None:
        """fd  the inherited descriptor, owned by this object from now on. Raises OSError when it is no socket."""
        self._socket = None if fd is None else socket.socket(fileno=fd)

    @property
    def is_held(self) -> bool:
        """A supervisor started this process."""
        return self._socket is not None

    def watch(self, on_gone: Callable[[], None] | None = None) -> None:
        """Waits for the supervisor's end to close, in a thread of its own: a blocked event loop must not keep an orphan alive.

        on_gone  what to do then; default: leave at once with status ORPHANED
        """
        if self._socket is not None:
            leave = on_gone or (lambda: os._exit(ORPHANED))
            threading.Thread(target=self._wait, args=(self._socket, leave), name="leash", daemon=True).start()

    def ready(self, facts: Mapping[str, object] | None = None) -> None:
        """The child serves; `facts` (address, what was decided) are for the supervisor's log and its operator."""
        self._say({"event": "ready", **(facts or {})})

    def failed(self, reason: str, *, can_retry: bool) -> None:
        """Why the child ends. can_retry False: starting it again with the same configuration fails again."""
        self._say({"event": "failed", "reason": reason, "can_retry": can_retry})

    def _say(self, message: Mapping[str, object]) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return  # The supervisor is gone; `watch` ends this process.

    @staticmethod
    def _wait(end: socket.socket, on_gone: Callable[[], None]) -> None:
        try:
            while end.recv(4096):
                pass
        except OSError:
            pass
        on_gone()
