"""Runs a site whose processes are started one by one as on several machines: engines on ports of their own, gateways that read a file.

`Kept` stands in for a service manager and starts them again. Shared by storms that break or change such a site.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

import headrace
from bench.storms.failover import MODEL

RESTART_S = 1.0
"""Pause of the service manager in seconds before a process that ended is started again."""
TOKEN = "known-to-this-storm-alone"
SOURCE = Path(headrace.__file__).parents[1]
"""Where the package that runs here is imported from."""


class Kept:
    """A command that is started again whenever it ends, until it is closed. source: where its package is imported from; may be changed"""

    def __init__(self, *command: str, log: Path, source: Path = SOURCE) -> None:
        self.source = source
        self._command, self._log = command, log
        self._process: asyncio.subprocess.Process | None = None
        self._task = asyncio.create_task(self._keep())

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def send(self, number: signal.Signals) -> bool:
        """False: it does not run now."""
        if self.pid is None:
            return False
        os.kill(self.pid, number)
        return True

    async def upgrade(self, source: Path) -> None:
        """End it in order; what is started instead is the package of `source`. Returns when the old process has left."""
        self.source = source
        process = self._process
        if process is not None and self.send(signal.SIGTERM):
            await process.wait()

    async def _keep(self) -> None:
        with open(self._log, "ab") as log:
            while True:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "headrace", *self._command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PYTHONPATH": str(self.source)},
                )
                await self._process.wait()
                await asyncio.sleep(RESTART_S)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def free_port() -> int:
    """Outside the range from which the kernel takes ports for connections: while a killed server is away, one of those could take its port,
    or connect to itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@dataclass(slots=True)
class Site:
    """A folder with the files of a site's processes. `running_site` makes it, and ends what it started."""

    folder: Path
    _stack: AsyncExitStack = field(repr=False)

    @property
    def token(self) -> Path:
        return self.folder / "token"

    def engine(self, port: int, *, source: Path = SOURCE) -> Kept:
        flags = ("--token-file", str(self.token), "--deterministic", "--max-num-seqs", "32")
        return self._keep(f"engine-{port}", "engine", MODEL, "--listen", f"127.0.0.1:{port}", *flags, source=source)

    def gateway(
        self, port: int, engines: Mapping[str, int], *, source: Path = SOURCE, settings: Mapping[str, object] | None = None
    ) -> Kept:
        """engines: name -> port at which this gateway reaches it; settings: further top-level fields of its file."""
        self.write(port, engines, settings)
        return self._keep(f"gateway-{port}", "gateway", "--config", str(self.file(port)), source=source)

    def write(self, port: int, engines: Mapping[str, int], settings: Mapping[str, object] | None = None) -> None:
        """The file of the gateway that listens on `port`, whole or not at all. It is JSON, which is YAML."""
        replicas = [{"name": name, "address": f"127.0.0.1:{number}"} for name, number in engines.items()]
        remote = {"model": MODEL, "replicas": replicas, "token_file": str(self.token)}
        content = {"models": [{"name": MODEL, "remote": remote}], "gateway": {"port": port, "request_log": "off"}, **(settings or {})}
        new = self.file(port).with_suffix(".new")
        new.write_text(json.dumps(content), encoding="utf-8")
        new.replace(self.file(port))

    def file(self, port: int) -> Path:
        """Of the gateway on that port."""
        return self.folder / f"gateway-{port}.yaml"

    def _keep(self, name: str, *command: str, source: Path) -> Kept:
        kept = Kept(*command, log=self.folder / f"{name}.log", source=source)
        self._stack.push_async_callback(kept.close)
        return kept


@asynccontextmanager
async def running_site() -> AsyncIterator[Site]:
    """What it started has ended after the block. After a fault of the storm the ends of all logs are printed."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-site-")))
        site = Site(folder, stack)
        site.token.touch(mode=0o600)
        site.token.write_text(TOKEN, encoding="utf-8")
        try:
            yield site
        except Exception:
            for log in sorted(folder.glob("*.log")):
                print(f"--- {log.name}", log.read_text(errors="replace")[-2000:], sep="\n", file=sys.stderr)
            raise


async def until_ready(session: aiohttp.ClientSession, port: int, timeout_s: float = 240.0) -> None:
    """Until every replica of the gateway on `port` is ready. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}/ready?strict") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
