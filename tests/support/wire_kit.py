"""Runs a fake engine behind the real service on a Unix socket of this process, with small helpers for tests of whatever is above the
engine.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from patience import PATIENCE_S as PATIENCE_S
from patience import eventually

from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.server.dispatcher import AsyncioOutbox
from headrace.engine.server.service import EngineService
from headrace.lab.fake_runner import FakeOptions, fake_engine
from headrace.wire import headrace_pb2 as pb
from headrace.wire.client import ReplicaClient
from headrace.wire.codec.update import RowExtras, UpdateRows, update_of
from headrace.wire.service import Attempt, Handle
from headrace.wire.stream import ReplicaStream
from headrace.wire.target import parse_target

until = eventually


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3), **changes: Any) -> EngineRequest:
    """SamplingParams fields and EngineRequest fields may both be given."""
    ours = {f: changes.pop(f) for f in list(changes) if f in EngineRequest.__dataclass_fields__ and f != "params"}
    params = SamplingParams(**{"seed": 0, "max_tokens": 8, **changes})
    return EngineRequest(request_id=RequestId(name), prompt_ids=prompt, params=params, **ours)


@contextmanager
def socket_dir() -> Iterator[Path]:
    """A private directory with a path short enough for sockets, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="hr-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


async def signal_until_gone(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while process.poll() is None:
            process.send_signal(number)
            await asyncio.sleep(0.2)


async def read_all(stream: ReplicaStream) -> dict[int, list[int]]:
    """Token ids per sequence until the stream ends. Raises the error of a rejection."""
    token_ids: dict[int, list[int]] = defaultdict(list)
    async for update in stream:
        if isinstance(update, Rejected):
            raise update.error
        token_ids[update.index].extend(update.token_ids)
    return dict(token_ids)


async def read_updates(stream: ReplicaStream) -> list[SequenceUpdate]:
    return [update async for update in stream if isinstance(update, SequenceUpdate)]


class Served:
    def __init__(self, options: FakeOptions, config: EngineConfig, address: str, **service: Any) -> None:
        bridge = AsyncioOutbox(asyncio.get_running_loop())
        token, tls = service.pop("token", None), service.pop("tls", None)
        self.options = options
        self.address = address
        self.engine = fake_engine(bridge, options, config)
        self.runner = self.engine._steps.runner
        self.service = EngineService(self.engine, bridge, parse_target(address, token, tls), replica="fake-0", **service)
        self.thread = threading.Thread(target=self.engine.run, daemon=True)

    async def start(self) -> None:
        self.thread.start()
        await self.service.start()

    async def stop(self) -> None:
        await self.service.stop()
        self.engine.stop()
        self.runner.close()
        await asyncio.to_thread(self.thread.join, PATIENCE_S)
        assert not self.thread.is_alive()

    @property
    def is_idle(self) -> bool:
        load = self.engine.snapshot()
        return load.num_running == load.num_waiting == 0 and load.kv_blocks_used == self.num_pad_blocks and self.service.num_open == 0

    @property
    def num_pad_blocks(self) -> int:
        """Block 0 of each pool, which counts as used."""
        return len(self.engine.info.kv_groups)

    def check(self) -> None:
        self.service.check()
        self.engine.scheduler.check()


@asynccontextmanager
async def served(options: FakeOptions | None = None, config: EngineConfig | None = None, **service: Any) -> AsyncIterator[Served]:
    with socket_dir() as folder:
        engine = Served(options or FakeOptions(), config or EngineConfig(model="fake"), f"unix:{folder}/e.sock", **service)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()
            engine.check()


@asynccontextmanager
async def connected(engine: Served, **client: Any) -> AsyncIterator[ReplicaClient]:
    async with ReplicaClient(engine.address, **client) as replica:
        await replica.wait_connected(PATIENCE_S)
        yield replica


def decode_updates(message: pb.Updates, attempt_of: Callable[[Handle], Attempt | None]) -> list[tuple[Handle, SequenceUpdate]]:
    """The rows of a frame whose handle is known. Raises: as `UpdateRows` does."""
    updates: list[tuple[Handle, SequenceUpdate]] = []
    for handle, index, token_ids, extras in UpdateRows(message):
        if (attempt := attempt_of(handle)) is not None:
            updates.append((handle, update_of(attempt, index, token_ids, RowExtras() if extras is None else extras)))
    return updates
