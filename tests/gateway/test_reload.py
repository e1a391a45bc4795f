"""A gateway whose configuration changes while requests run: what is applied, what is refused, and what running requests notice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from gateway_kit import MODEL, SAID, TestBench, events_of, eventually, gateway_config, open_bench, some_replicas

from headrace.core.errors import ConfigError
from headrace.gateway.config import GatewayConfig
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState
from headrace.wire.leash import ReplicaStatus


def replicas(*names: str, **changes: Any) -> GatewayConfig:
    """One model with these replicas."""
    [model] = some_replicas(0)
    model["replicas"] = [{"name": name, "address": f"unix:/nowhere/{name}"} for name in names]
    return gateway_config(models=[model], **changes)


async def apply(bench: TestBench, config: GatewayConfig) -> None:
    await bench.reloader.reload(lambda: config)


def names(bench: TestBench) -> Sequence[str]:
    return [replica.name for replica in bench.gateway.service.models.get(MODEL).upstream.replicas()]


async def test_replicas_come_and_go(text: TextModel) -> None:
    async with open_bench(text, models=[config_model("r0")]) as bench:
        await apply(bench, replicas("r0", "r1"))
        assert names(bench) == ["r0", "r1"]
        bench.replicas["r0"].state = ConnectionState.DOWN
        assert (await bench.chat()).status_code == 200
        assert len(bench.replicas["r1"].requests) == 1
        await apply(bench, replicas("r1"))
        assert names(bench) == ["r1"]
        assert (await bench.chat()).status_code == 200


def config_model(*replica_names: str) -> dict[str, Any]:
    [model] = some_replicas(0)
    return {**model, "replicas": [{"name": name, "address": f"unix:/nowhere/{name}"} for name in replica_names]}


async def test_a_retired_replica_finishes_its_streams_and_gets_no_new_one(text: TextModel) -> None:
    async with open_bench(text, models=[config_model("r0")]) as bench:
        old = bench.replicas["r0"]
        old.go.clear()
        running = asyncio.create_task(bench.chat(stream=True))
        await eventually(lambda: old.num_open == 1)
        await apply(bench, replicas("r1"))
        assert bench.reloader.status() == {MODEL: {"r0": ReplicaStatus(False, "retired", 1), "r1": ReplicaStatus(True, "", 0)}}
        assert (await bench.chat()).status_code == 200
        assert (len(old.requests), len(bench.replicas["r1"].requests)) == (1, 1)
        old.go.set()
        events = events_of((await running).text)
        assert "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"]) == SAID
        await eventually(lambda: set(bench.reloader.status()[MODEL]) == {"r1"})
        assert old.is_closed


async def test_what_cannot_change_is_refused_by_name_and_nothing_is_changed(text: TextModel) -> None:
    async with open_bench(text, models=[config_model("r0")]) as bench:
        with pytest.raises(ConfigError, match=r"^salt_key: cannot change while the gateway runs"):
            await apply(bench, replicas("r0", "r1", salt_key="ab" * 16))
        assert names(bench) == ["r0"]
        assert bench.reloader.config.salt_key == ""


async def test_a_file_with_a_fault_changes_nothing(text: TextModel) -> None:
    def read() -> GatewayConfig:
        raise ConfigError("models", "is empty")

    async with open_bench(text, models=[config_model("r0")]) as bench:
        with pytest.raises(ConfigError, match=r"models: is empty"):
            await bench.reloader.reload(read)
        assert (await bench.chat()).status_code == 200
