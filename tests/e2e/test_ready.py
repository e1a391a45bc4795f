"""Tests /ready while real processes are stopped and killed: it tells the truth in the right order, and what dies is started again.

How soon each of it happens is asserted on virtual time in tests/gateway/test_readiness_time.py and tests/engine. The end of a deployment is
in test_gateway_workers.py (SIGTERM) and test_change.py (a killed supervisor).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest
from http_kit import COMPLETIONS, Answer, Connection, ask, request_bytes, stream
from plain_loop import Checkpoint
from server_kit import CROWD, PATIENCE_S, Server

from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.lab.fake_runner import FakeOptions, fake_answer

pytestmark = pytest.mark.process

PROMPT = (5, 6, 7, 8)


def ready(server: Server) -> bool:
    return bool(server.get("/ready")[0] == 200)


def completion(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": list(PROMPT), "max_tokens": max_tokens, "seed": 3, "ignore_eos": True, **more}


def expected_text(checkpoint: Checkpoint, num_tokens: int) -> str:
    request = EngineRequest(request_id=RequestId("x"), prompt_ids=PROMPT, params=SamplingParams(seed=3))
    return checkpoint.plain.text(fake_answer(request, 0, num_tokens, FakeOptions(**CROWD)))


async def test_a_stopped_engine_is_not_ready_and_its_streams_go_on_when_it_is_ready_again(
    fake_server: Server, random_checkpoint: Checkpoint
) -> None:
    server, num_tokens = fake_server, 75
    pids = server.pids()
    async with asyncio.timeout(2 * PATIENCE_S), Connection(server.port) as connection:
        await connection.send(request_bytes("POST", COMPLETIONS, {**completion(num_tokens), "stream": True}))
        answer, events = Answer((await connection.head())[0]), connection.events()
        answer.take(await anext(events))
        os.kill(pids["e0"], signal.SIGSTOP)
        try:
            await server.eventually(lambda: not ready(server))
            status, said = server.get("/ready")
            assert (status, said["ok"], said["replicas"][0]["ok"]) == (503, False, False)
            assert server.get("/live")[0] == 200, "the gateway itself is well"
        finally:
            os.kill(pids["e0"], signal.SIGCONT)
        await server.eventually(lambda: ready(server))
        async for event in events:
            answer.take(event)
    assert answer.is_done
    assert answer.text[0] == expected_text(random_checkpoint, num_tokens)
    assert server.pids() == pids


async def test_a_killed_engine_is_told_in_band_started_again_and_ready_again(fake_server: Server, random_checkpoint: Checkpoint) -> None:
    """Started again it ends at once, until it has been seen that requests are refused meanwhile."""
    server, options = fake_server, fake_server.folder / "fake.json"
    before, instance, given = server.pids(), server.load().instance_id, options.read_text()
    body = completion(3000)
    async with Connection(server.port) as connection:
        await connection.send(request_bytes("POST", COMPLETIONS, {**body, "stream": True}))
        begun, events = Answer((await connection.head())[0]), connection.events()
        while not any(begun.text.values()):
            begun.take(await anext(events))
        streams = [asyncio.create_task(stream(server.port, COMPLETIONS, {**body, "n": 2})) for _ in range(2)]
        whole = asyncio.create_task(ask(server.port, "POST", COMPLETIONS, body))
        await server.eventually(lambda: server.load().num_open == 4)
        options.write_text(json.dumps({**json.loads(given), "die": True}))
        os.kill(before["e0"], signal.SIGKILL)
        async for event in events:
            begun.take(event)
    assert begun.status == 200
    for answer in (begun, *await asyncio.gather(*streams)):
        assert not answer.is_done
        assert answer.error is not None
        assert answer.error["code"] == "unavailable"
        assert "can be sent again" in answer.error["message"]
    for lost in (await whole, await ask(server.port, "POST", COMPLETIONS, body)):
        assert lost.status == 503
        assert lost.headers["retry-after"]
        assert lost.error["code"] == "unavailable"
    assert not ready(server)
    options.write_text(given)
    await server.eventually(lambda: ready(server))
    after = server.pids()
    assert after["gateway"] == before["gateway"]
    assert after["e0"] != before["e0"]
    assert server.load().instance_id != instance
    again = await stream(server.port, COMPLETIONS, completion(12))
    assert again.text[0] == expected_text(random_checkpoint, 12)
    await server.eventually(lambda: server.load().is_idle)
