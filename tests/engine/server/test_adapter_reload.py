"""Tests how an engine takes another list of adapters while it runs: over a real leash, with an engine that only keeps the list."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.core.adapters import AdapterSource
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.model_info import ModelInfo
from headrace.core.sleep import SleepLevel
from headrace.engine.server.adapter_reload import adapters_of, answering_reloads
from headrace.engine.server.config import load_process_config
from headrace.engine.server.dispatcher import call_unless_closed
from headrace.wire.leash import Leash

pytestmark = pytest.mark.socket

SQL, LAW = AdapterSource(name="sql", path="/a/sql"), AdapterSource(name="law", path="/a/law", is_optional=True)


INFO = ModelInfo(
    architecture="LlamaForCausalLM", vocab_size=8, max_model_len=8, eos_token_ids=(2,), kv_groups=(), block_size=1, num_blocks=(),
    dtype="float32", weight_bytes=1, digests={"model": "ab"},
)  # fmt: skip


class Adapted:
    """refusal: what the next change raises"""

    def __init__(self) -> None:
        self.info = INFO
        self.refusal: Exception | None = None
        self.changes: list[tuple[SleepLevel | None, Future[None]]] = []

    def change_sleep(self, level: SleepLevel | None) -> Future[None]:
        self.changes.append((level, Future()))
        return self.changes[-1][1]

    def set_adapters(self, sources: Sequence[AdapterSource]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.info = self.info.with_adapters({source.name: source.path.encode().hex() for source in sources})


class Asked:
    """The supervisor's end of the leash of an engine."""

    def __init__(self, engine: Adapted, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.engine, self.reader, self.writer = engine, reader, writer
        self.announced: list[dict[str, str]] = []
        self.sources: Sequence[AdapterSource] | ConfigError = ()

    def read(self) -> Sequence[AdapterSource]:
        if isinstance(self.sources, ConfigError):
            raise self.sources
        return self.sources

    async def ask(self, number: int, event: str = "reload", **more: str) -> dict[str, Any]:
        self.say(number, event, **more)
        return await self.heard()

    def say(self, number: int, event: str, **more: str) -> None:
        self.writer.write(json.dumps({"event": event, "id": number, **more}).encode() + b"\n")

    async def heard(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(await self.reader.readline())
        return said


@pytest.fixture
async def asked() -> AsyncIterator[Asked]:
    ours, theirs = socket.socketpair()
    leash, engine = Leash(theirs.detach()), Adapted()
    made = Asked(engine, *await asyncio.open_connection(sock=ours))
    gone = asyncio.Event()
    leash.watch(partial(call_unless_closed, asyncio.get_running_loop(), lambda _: gone.set(), None))
    async with answering_reloads(leash, engine, made.read, lambda: made.announced.append(dict(engine.info.adapters))):
        yield made
    made.writer.close()
    await made.writer.wait_closed()
    await gone.wait()
    leash._socket.close()  # type: ignore[union-attr]  # a process ends with it


async def test_a_change_is_announced_and_answered_with_the_digests(asked: Asked) -> None:
    asked.sources = [SQL, LAW]
    adapters = {"sql": b"/a/sql".hex(), "law": b"/a/law".hex()}
    assert await asked.ask(1) == {"event": "reloaded", "id": 1, "adapters": adapters}
    asked.sources = []
    assert await asked.ask(2) == {"event": "reloaded", "id": 2, "adapters": {}}
    assert asked.announced == [adapters, {}]


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (CheckpointError("/a/sql/adapter_config.json", "r is 64"), "/a/sql/adapter_config.json: r is 64"),
        (RuntimeError("/a/sql is odd"), "the change failed by a fault of this program; its log says more"),
    ],
)
async def test_a_refusal_has_its_reason_and_the_next_change_is_answered(refusal: Exception, reason: str, asked: Asked) -> None:
    asked.sources, asked.engine.refusal = [SQL], refusal
    assert await asked.ask(1) == {"event": "refused", "id": 1, "reason": reason}
    assert asked.announced == []
    asked.sources, asked.engine.refusal = ConfigError("engine.dtype", "cannot change while the engine runs"), None
    assert await asked.ask(2) == {"event": "refused", "id": 2, "reason": "engine.dtype: cannot change while the engine runs"}
    assert (await asked.ask(3, "status"))["event"] == "refused"
    asked.sources = [SQL]
    assert (await asked.ask(4))["event"] == "reloaded"


async def test_sleep_and_wake_are_answered_when_they_are_done_and_a_reload_waits_for_neither(asked: Asked) -> None:
    asked.say(1, "sleep", level="disk")
    asked.say(2, "wake")
    assert (await asked.ask(3))["event"] == "reloaded"
    (deep, slept), (none, woken) = asked.engine.changes
    assert (deep, none) == (SleepLevel.DISK, None)
    slept.set_exception(ConfigError("level", "no packed weights"))
    assert await asked.heard() == {"event": "refused", "id": 1, "reason": "level: no packed weights"}
    woken.set_result(None)
    assert await asked.heard() == {"event": "done", "id": 2}
    assert len(asked.announced) == 3


def test_nothing_but_the_adapters_may_change(tmp_path: Path) -> None:
    file = tmp_path / "e0.json"
    engine = {"model": "m", "enable_lora": True, "lora_modules": [{"name": "sql", "path": "/a/sql"}]}
    content: dict[str, Any] = {"replica": "m-0", "address": "unix:/run/e.sock", "block_key": "ab" * 32, "engine": engine}
    file.write_text(json.dumps(content))
    held = load_process_config(file)

    def read(**changes: Any) -> tuple[AdapterSource, ...]:
        file.write_text(json.dumps({**content, **changes}))
        return adapters_of(lambda: load_process_config(file), held)

    assert read() == (SQL,)
    law = {"name": "law", "path": "/a/law", "is_optional": True}
    assert read(engine={**engine, "lora_modules": [law]}) == (LAW,)
    assert read(engine={**engine, "lora_modules": []}) == ()
    with pytest.raises(ConfigError, match=r"^engine\.max_lora_rank: cannot change while the engine runs"):
        read(engine={**engine, "max_lora_rank": 64})
    with pytest.raises(ConfigError, match=r"^engine\.speculative_config: cannot change while the engine runs"):
        read(engine={**engine, "speculative_config": {"method": "suffix"}})
    with pytest.raises(ConfigError, match=r"^replica: cannot change"):
        read(replica="m-1")
