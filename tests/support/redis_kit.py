"""A Redis (or Valkey) server of the tests' own: on a Unix socket, without a disk."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
MISSING = "No Redis or Valkey server is installed: run `make redis`"
NO_PACKAGE = "The package redis is not installed: pip install 'headrace[redis]'"
START_S = 20.0


class RedisServer:
    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    def start(self, **more: str) -> None:
        assert PROGRAM is not None, MISSING
        options = {"port": "0", "unixsocket": str(self._socket), "save": "", "appendonly": "no", "dir": str(self._socket.parent), **more}
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([PROGRAM, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self._listens():
            assert self._process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.01)

    def _listens(self) -> bool:
        """Its file is there a moment earlier."""
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self._socket)) == 0

    def hang(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is None:
            return
        self.go_on()
        self._process.terminate()
        self._process.wait(START_S)
        self._socket.unlink(missing_ok=True)
        self._process = None
