"""Tests that a request, and one decode step, pass through the files that docs/architecture.md names, in that order."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import gateway_kit
import pytest
from local_workers import LocalWorkers

import headrace
from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.engine.build import build_served_engine
from headrace.engine.config import EngineConfig
from headrace.engine.server.dispatcher import AsyncioOutbox
from headrace.engine.server.process import LoopThread
from headrace.engine.server.service import EngineService
from headrace.gateway.app import Gateway
from headrace.gateway.compose import open_gateway
from headrace.gateway.text_host import TextContext
from headrace.gateway.upstream.own import replica_health
from headrace.gateway.upstream.own.replicas import ReplicaPool
from headrace.gateway.upstream.own.upstream import TokenUpstream
from headrace.text.folder import load_text
from headrace.wire import client, session
from headrace.wire.service import HEARTBEAT_S
from headrace.wire.target import parse_target

pytestmark = pytest.mark.socket

HOME = str(Path(headrace.__file__).resolve().parent) + "/"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
ROW = re.compile(r"^\| \d+ \| `([\w/.]+)`", re.MULTILINE)


PATIENCE_S = 600.0
PATIENCE = [
    *((client, "SILENT_AFTER_S"), (session, "LEASE_S")),
    *((replica_health, name) for name in ("SILENT_AFTER_S", "IDLE_STALL_S", "STEP_GRACE_S")),
]
"""Seconds after which a gateway gives up a quiet engine."""


def files_of(title: str) -> list[str]:
    """The first file of each numbered row below a heading of the page."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    return ROW.findall(section)


LEAST_REQUESTS, MOST_REQUESTS = 5, 25
BACKGROUND = {"Session._watch", "EngineService._beat", "StreamWatch._run", "give_back_when_idle", "Server.serve_until"}
"""Tasks that run a few times a second whatever is asked; what they call is on no request's path."""

LOAD = {"TokenUpstream.queue", "TokenUpstream.fingerprint", "TokenUpstream.hold"}
"""Reading the load, which model it is, and whether a replica takes a request: read-only accesses, which the page leaves out."""


class Watch:
    """Which of our files was entered, call by call, in every thread, background tasks left out.

    entered   (thread, file below src/headrace) for each call that came from another file, in order
    is_quiet  a request is on its way: heartbeats, whose frames enter the same files as its own, are not sent
    sent_s    when the last of them was sent
    turning   held while the engine turns
    """

    def __init__(self) -> None:
        self.entered: list[tuple[int, str]] = []
        self.is_quiet = False
        self.sent_s = 0.0
        self.turning = threading.Lock()

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME):
            caller = frame.f_back
            if (caller is None or caller.f_code.co_filename != code.co_filename) and not in_background(frame):
                self.entered.append((threading.get_ident(), code.co_filename.removeprefix(HOME)))

    def forget_turn(self, start: int) -> None:
        """Drop what this thread entered from place `start` on; other threads may add to the end meanwhile."""
        for place in reversed(range(start, len(self.entered))):
            if self.entered[place][0] == threading.get_ident():
                del self.entered[place]

    def start(self) -> None:
        """Forget what was entered, when no turn of the engine is half done."""
        with self.turning:
            self.entered.clear()

    @contextmanager
    def looking(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)

    def order(self, files: list[str]) -> list[str]:
        """These files, each when it was first entered; rooms (`tensor/kernels/`) by any file of theirs."""
        first: dict[str, None] = {}
        for _, path in self.entered:
            for name in files:
                if path == name or (name.endswith("/") and path.startswith(name)):
                    first.setdefault(name)
        return list(first)


def in_background(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_qualname in BACKGROUND | LOAD:
            return True
        frame = frame.f_back
    return False


def step_by_step(engine: Any, watch: Watch) -> threading.Semaphore:
    """From now on the engine turns once for each permit while a sequence runs; turns are watched, those with nothing to do forgotten."""
    permits = threading.Semaphore(0)
    turn = engine.turn

    def when_permitted() -> bool:
        if len(engine.scheduler.sequences.slots):
            assert permits.acquire(timeout=60)
        with watch.turning, watch.looking():
            start = len(watch.entered)
            done: bool = turn()
            if not done:
                watch.forget_turn(start)
        return done

    engine.turn = when_permitted
    return permits


async def beat_between_requests(service: EngineService, watch: Watch) -> None:
    while True:
        if not watch.is_quiet:
            watch.sent_s = time.monotonic()
            service._report_and_wake()
        await asyncio.sleep(HEARTBEAT_S)


def is_ready(gateway: Gateway) -> bool:
    pool = pool_of(gateway)
    return len(pool.ready()) == len(pool.replicas)


def pool_of(gateway: Gateway) -> ReplicaPool:
    upstream = gateway.service.models.get(gateway_kit.MODEL).upstream
    assert isinstance(upstream, TokenUpstream)
    return upstream._pool


@dataclass
class Deployment:
    """A gateway and a real engine, in this process so that both are watched. steps: permits for those of the engine"""

    gateway: Gateway
    port: int
    steps: threading.Semaphore

    def has_read_since(self, sent_s: float) -> bool:
        (replica,) = pool_of(self.gateway).replicas
        return replica.connection.snapshot is not None and replica.connection.snapshot.received_s >= sent_s


@asynccontextmanager
async def deployment(watch: Watch) -> AsyncIterator[Deployment]:
    folder = str(bundled_path(DEFAULT_MODEL))
    text = load_text(folder)
    bridge = AsyncioOutbox(asyncio.get_running_loop())
    config = EngineConfig(model=folder, dtype="float32", num_threads=1, num_kv_blocks=100)
    thread = LoopThread(lambda: build_served_engine(config, bridge))
    engine = await thread.built
    steps = step_by_step(engine, watch)
    with tempfile.TemporaryDirectory(prefix="hr-") as home:
        address = f"unix:{home}/e.sock"
        service = EngineService(engine, bridge, parse_target(address, None), replica="r0")
        setattr(service, "_beat", lambda: beat_between_requests(service, watch))  # noqa: B010
        await service.start()
        model = {"name": gateway_kit.MODEL, "folder": folder, "replicas": [{"name": "r0", "address": address}]}
        settings = gateway_kit.gateway_config(models=[model])
        workers = LocalWorkers(TextContext({gateway_kit.MODEL: text}))
        try:
            async with open_gateway(settings, {gateway_kit.MODEL: text}, workers) as opened, gateway_kit.serving(opened.app) as port:
                await gateway_kit.eventually(lambda: is_ready(opened.app))
                yield Deployment(opened.app, port, steps)
        finally:
            await service.stop()
            engine.stop()
            await thread.ended


async def ask(made: Deployment, watch: Watch, files: tuple[list[str], list[str]]) -> tuple[list[str], list[str]]:
    """One request of four tokens: the order of the first files up to its first token, and of the second ones while its third is made."""
    async with gateway_kit.dial(made.port) as (reader, writer):
        watch.is_quiet = True
        await gateway_kit.eventually(lambda: made.has_read_since(watch.sent_s))
        watch.start()
        writer.write(gateway_kit.post("/v1/chat/completions", gateway_kit.chat_body(stream=True, max_tokens=4, ignore_eos=True)))
        await reader.readuntil(b'"content":"')  # of the opening, without text
        await reader.readuntil(b'"content":"')
        of_request = watch.order(files[0])
        for _ in range(2):
            watch.start()
            made.steps.release()
            await reader.readuntil(b'"content":"')
        of_step = watch.order(files[1])
        made.steps.release()
        await reader.readuntil(b"[DONE]")
        watch.is_quiet = False
    return of_request, of_step


def ways_of(seen: list[tuple[list[str], list[str]]]) -> tuple[list[str], ...]:
    """The way of more than half of the requests that were seen, and that of the steps; empty where there is none."""
    usual = [Counter(tuple(ways[which]) for ways in seen).most_common(1)[0] for which in (0, 1)]
    return tuple(list(way) if count > len(seen) / 2 else [] for way, count in usual)


async def test_a_request_and_a_decode_step_go_through_the_files_in_the_pages_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than half of several requests and steps are seen on this way. What runs beside them all the time (heartbeats, idle turns) is
    left out; where something else of it came between, more requests are watched. An engine that is kept quiet, or stands still with the
    machine, counts as neither silent nor stuck.
    """
    for module, name in PATIENCE:
        monkeypatch.setattr(module, name, PATIENCE_S)
    files = files_of("One request, from the socket to the kernel and back"), files_of("One decode step")
    assert (len(files[0]), len(files[1])) == (16, 15)
    watch = Watch()
    async with deployment(watch) as made:
        with watch.looking():
            seen = [await ask(made, watch, files) for _ in range(LEAST_REQUESTS)]
            while ways_of(seen) != files and len(seen) < MOST_REQUESTS:
                seen.append(await ask(made, watch, files))
    assert ways_of(seen) == files
