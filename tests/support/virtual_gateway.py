"""Runs a whole deployment on virtual time: a gateway, its connection to a replica, and the engine's own loop, scheduler and cache over a
runner whose steps take a known time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway_kit import gateway_config
from local_workers import LocalWorkers
from virtual_time import virtual_loop
from virtual_wire import VirtualServed

from headrace.core.clock import Clock
from headrace.gateway.app import Gateway
from headrace.gateway.compose import open_gateway
from headrace.gateway.control.models import Sources
from headrace.gateway.text_host import TextContext
from headrace.gateway.upstream.model_config import ReplicaConfig
from headrace.lab.fake_runner import FakeOptions
from headrace.text.folder import TextModel
from headrace.wire.client import ReplicaClient


@asynccontextmanager
async def virtual_gateway(
    text: TextModel, *, pause_s: float, runner: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[tuple[Gateway, VirtualServed]]:
    """A gateway and its only engine, which says letters: each token is text at once.

    pause_s  between two steps
    runner   `FakeOptions`
    """
    checked = gateway_config(**config)
    first, last = (text.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "az")
    options = FakeOptions(vocab_size=text.tokenizer.vocab_size, produced=(first, last), **(runner or {}))
    engine = VirtualServed(step_s=pause_s, options=options)

    def connect(given: ReplicaConfig, _text: TextModel, _clock: Clock) -> ReplicaClient:
        return engine.client(name=given.name)

    texts = {model.name: text for model in checked.models}
    workers = LocalWorkers(TextContext(dict(texts)))
    running = asyncio.create_task(engine.run())
    loop = virtual_loop()
    sources = Sources(clock=loop.time, unix_time=loop.unix_time)
    async with open_gateway(checked, texts, workers, connect=connect, sources=sources) as gateway:
        await asyncio.sleep(1.0)  # until it is connected
        yield gateway.app, engine
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    engine.service.check()
