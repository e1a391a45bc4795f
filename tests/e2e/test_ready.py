"""/ready tells the truth, and what dies is started again, told apart, or taken down in order.

Stopped and killed engines, drains: `headrace serve` with the real engine. Blocked runners and killed supervisors: the same deployment
with engines that compute nothing, because a step of theirs can be made to hang.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from http_kit import COMPLETIONS, Answer, Connection, ask, request_bytes, stream
from lateness import machine_lateness, tries_while_late
from plain_loop import Checkpoint
from real_engine import ROOMY
from server_kit import KEY, Server, is_alive, serving, serving_fake

TOLD_S = 2.5
"""The promise is one second; the rest is for a busy machine."""
LOOK_S = 1.0
"""One look at /ready: whatever the engine does, the gateway answers at once."""
COUNT = 12


def ready(server: Server) -> bool:
    return bool(server.get("/ready")[0] == 200)


def completion(model: str, prompt: tuple[int, ...], max_tokens: int = COUNT, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


# -- the real engine --------------------------------------------------------------------------------------------------------------------


def test_a_stopped_engine_is_not_ready_until_it_goes_on(server: Server) -> None:
    pid = server.pids()["e0"]
    for _ in tries_while_late(3):
        os.kill(pid, signal.SIGSTOP)
        try:
            stop_s = server.until(lambda: not ready(server))
            status, said = server.get("/ready")
            assert (status, said["ok"], said["replicas"][0]["ok"]) == (503, False, False)
            assert server.get("/live")[0] == 200, "the gateway itself is well"
        finally:
            os.kill(pid, signal.SIGCONT)
        back_s = server.until(lambda: ready(server))
        if max(stop_s, back_s) < TOLD_S:
            break
    assert max(stop_s, back_s) < TOLD_S
    assert server.pids()["e0"] == pid


async def test_streams_of_an_engine_that_was_stopped_for_a_moment_go_on(server: Server, random_checkpoint: Checkpoint) -> None:
    prompt = random_checkpoint.plain.clear_one(random_checkpoint.prompts, 300)
    running = asyncio.create_task(stream(server.port, COMPLETIONS, completion("random", tuple(prompt), 300, n=32), key=KEY))
    await server.eventually(lambda: server.load().num_running > 0)
    pid = server.pids()["e0"]
    os.kill(pid, signal.SIGSTOP)
    try:
        await server.eventually(lambda: not ready(server))
        assert not running.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    answer = await running
    assert answer.is_done
    assert dict(answer.text) == dict.fromkeys(range(32), random_checkpoint.plain.text(random_checkpoint.plain.greedy(prompt, 300)))


@pytest.fixture(scope="module")
def doomed(random_folder: Path) -> Iterator[Server]:
    """A server whose engine is killed and which is drained at the end, without failover. It runs one sequence at a time, so that a request
    takes long."""
    engine = {
        "model": str(random_folder),
        "dtype": "float32",
        "kernels": ROOMY["kernels"],
        "num_threads": 1,
        "num_kv_blocks": 48,
        "max_num_seqs": 1,
    }
    config = {
        "models": [{"name": "random", "engine": engine}],
        "gateway": {"api_keys": [{"key": KEY}], "request_log": "off", "timeouts": {"failover_s": 0}},
        "drain_timeout_s": 40,
    }
    with serving(config) as server:
        yield server


async def test_a_killed_engine_is_told_in_band_restarted_and_ready_again(doomed: Server, random_checkpoint: Checkpoint) -> None:
    before, instance = doomed.pids(), doomed.load().instance_id
    body = completion("random", random_checkpoint.prompts[0], 450, n=8)
    async with Connection(doomed.port) as connection:
        await connection.send(request_bytes("POST", COMPLETIONS, {**body, "stream": True}, key=KEY))
        begun, events = Answer((await connection.head())[0]), connection.events()
        while not any(begun.text.values()):
            begun.take(await anext(events))
        streams = [asyncio.create_task(stream(doomed.port, COMPLETIONS, {**body, "cache_salt": str(n)}, key=KEY)) for n in range(2)]
        whole = asyncio.create_task(ask(doomed.port, "POST", COMPLETIONS, body, key=KEY))
        await doomed.eventually(lambda: doomed.load().num_running > 0 and doomed.load().num_open == 4)
        os.kill(before["e0"], signal.SIGKILL)
        async for event in events:
            begun.take(event)
    assert begun.status == 200
    for answer in (begun, *await asyncio.gather(*streams)):
        assert not answer.is_done
        assert answer.error is not None
        assert answer.error["code"] == "unavailable"
        assert "can be sent again" in answer.error["message"]
    lost = await whole
    assert lost.status == 503
    assert lost.headers["retry-after"]
    assert lost.error["code"] == "unavailable"
    assert not await asyncio.to_thread(ready, doomed)
    refused = await ask(doomed.port, "POST", COMPLETIONS, body, key=KEY)
    assert refused.status == 503
    assert refused.headers["retry-after"]
    await doomed.eventually(lambda: ready(doomed), 120.0)
    after = doomed.pids()
    assert after["gateway"] == before["gateway"]
    assert after["e0"] != before["e0"]
    assert doomed.load().instance_id != instance
    prompt = random_checkpoint.prompts[1]
    answer = await stream(doomed.port, COMPLETIONS, completion("random", prompt), key=KEY)
    assert answer.text[0] == random_checkpoint.plain.text(random_checkpoint.plain.greedy(prompt, COUNT))
    await doomed.eventually(lambda: doomed.load().is_idle)


async def test_sigterm_lets_streams_finish_refuses_new_work_and_exits_clean(doomed: Server, random_checkpoint: Checkpoint) -> None:
    """The last of `doomed`: its processes are gone afterwards."""
    prompt = random_checkpoint.plain.clear_one(random_checkpoint.prompts, 300)
    pids = doomed.pids()
    body = request_bytes("POST", COMPLETIONS, completion("random", tuple(prompt), 1), key=KEY, close=False)
    async with Connection(doomed.port) as kept:
        await kept.send(body)
        assert (await kept.reply()).status == 200
        running = asyncio.create_task(stream(doomed.port, COMPLETIONS, completion("random", tuple(prompt), 300, n=16), key=KEY))
        await doomed.eventually(lambda: doomed.load().num_running > 0)
        doomed.process.send_signal(signal.SIGTERM)
        await doomed.eventually(lambda: doomed.get("/ready")[1]["reason"] == "draining")
        refused = await ask(doomed.port, "POST", COMPLETIONS, completion("random", tuple(prompt)), key=KEY)
        assert refused.status == 503
        assert refused.headers["retry-after"]
        answer = await running
    assert answer.is_done
    assert dict(answer.text) == dict.fromkeys(range(16), random_checkpoint.plain.text(random_checkpoint.plain.greedy(prompt, 300)))
    assert await asyncio.to_thread(doomed.process.wait, 60.0) == 0
    assert not [name for name, pid in pids.items() if is_alive(pid)]


# -- engines that compute nothing -------------------------------------------------------------------------------------------------------

STALL_STEP = 40
STALL_S = 8.0


@pytest.fixture(scope="module")
def stalling(random_folder: Path) -> Iterator[Server]:
    """Steps take 5 ms, except one, which takes seconds."""
    fake = {"vocab_size": 345, "step_seconds": 0.005, "stall_after_steps": STALL_STEP, "stall_seconds": STALL_S}
    with serving_fake(random_folder, fake=fake) as server:
        yield server


async def test_a_blocked_runner_is_not_ready_while_its_process_answers(stalling: Server) -> None:
    """The step hangs in the loop's thread; heartbeats come from another one, and tell of the step's age."""
    await stalling.eventually(lambda: ready(stalling))
    began = time.monotonic()
    body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": STALL_STEP + 20, "seed": 3, "ignore_eos": True}
    running = asyncio.create_task(stream(stalling.port, COMPLETIONS, body))
    await stalling.eventually(lambda: stalling.load().num_running == 1)
    running_s = asked_s = time.monotonic()
    looks_s = []

    def is_seen() -> bool:
        nonlocal asked_s
        look_s = time.monotonic()
        with machine_lateness() as lateness:
            is_ready = ready(stalling)
            looks_s.append(time.monotonic() - look_s - lateness.late_s)
        if is_ready:
            asked_s = look_s
        return not is_ready

    await stalling.eventually(is_seen)
    # The last look that found it ready, not the first that did not: a machine that stands still delays looks.
    assert asked_s - running_s < 1.0 + TOLD_S
    assert max(looks_s) < LOOK_S, "a look that itself waits for the engine tells nobody in time"
    said = stalling.get("/ready")[1]["reason"]
    assert "a step has taken" in said
    load = await asyncio.to_thread(stalling.load)
    assert load.num_running == 1, "the engine's process answers"
    answer = await running
    assert answer.is_done
    await stalling.eventually(lambda: ready(stalling))
    assert time.monotonic() - began > STALL_S


def test_nobody_outlives_a_killed_supervisor(stalling: Server) -> None:
    """The last of `stalling`. No signal reaches the children: their leash breaks."""
    pids = stalling.pids()
    assert set(pids) == {"gateway", "e0"}
    sessions = {os.getsid(pid) for pid in pids.values()}
    assert sessions == set(pids.values()), "each leads a session of its own"
    stalling.process.kill()
    stalling.process.wait()
    stalling.until(lambda: not [name for name, pid in pids.items() if is_alive(pid)])
    stalling.until(lambda: not is_listening(stalling.port))


def is_listening(port: int) -> bool:
    return any(c.status == "LISTEN" and c.laddr and c.laddr[1] == port for c in psutil.net_connections("tcp"))
