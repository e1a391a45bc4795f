"""Tests that gateway and engine hold exactly what they held before, after a third of all clients have left at random moments.

The engine counts its blocks and its running and waiting sequences. The operating system and the processes themselves count the file
descriptors, threads and event-loop tasks of both. Clients that stay get their answers, the greedy ones token for token.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from http_kit import CHAT, COMPLETIONS, Connection, ask, request_bytes, stream
from plain_loop import Checkpoint
from results import save_result
from server_kit import KEY, Footprint, Server

pytestmark = pytest.mark.process

LONGEST = 40
AT_ONCE = 24


@dataclass(slots=True)
class Client:
    """One client's plan: what it asks, whether it streams, and when it leaves, if it does.

    leaves_after    events of a stream; None: it stays
    leaves_after_s  seconds into an answer it does not stream; None: it stays
    expected        the text of every choice, where it is greedy
    """

    path: str
    body: dict[str, Any]
    is_stream: bool
    leaves_after: int | None = None
    leaves_after_s: float | None = None
    expected: str | None = None

    @property
    def leaves(self) -> bool:
        return self.leaves_after is not None or self.leaves_after_s is not None


@dataclass(slots=True)
class Storm:
    num_requests: int
    num_left: int = 0
    num_wrong: int = 0
    seconds: float = 0.0
    num_whole: int = 0


def make_clients(checkpoint: Checkpoint, count: int, seed: int) -> list[Client]:
    """Every third one leaves."""
    draw = random.Random(seed)
    return [_make_client(checkpoint, draw, leaves=number % 3 == 0) for number in range(count)]


def _make_client(checkpoint: Checkpoint, draw: random.Random, *, leaves: bool) -> Client:
    prompt = draw.choice(checkpoint.prompts)
    is_greedy, is_chat = draw.random() < 0.5, draw.random() < 0.3
    max_tokens = draw.randint(1, LONGEST) if not leaves else draw.randint(20, 200)
    body: dict[str, Any] = {"model": "random", "max_tokens": max_tokens, "ignore_eos": True, "n": draw.choice([1, 1, 2])}
    body |= {"temperature": 0} if is_greedy else {"temperature": 1.0, "seed": draw.randrange(2**32)}
    body |= {"cache_salt": str(draw.randrange(4))}
    if is_chat:
        body["messages"] = [{"role": "user", "content": draw.choice(["Hello", "What is the capital of France?", "stop STOP end"])}]
    else:
        body["prompt"] = list(prompt)
    client = Client(CHAT if is_chat else COMPLETIONS, body, is_stream=draw.random() < 0.6)
    if leaves and client.is_stream:
        client.leaves_after = draw.choice([0, 1, 2, draw.randint(0, 20)])
    elif leaves:
        client.leaves_after_s = draw.choice([0.0, draw.uniform(0, 0.5)])
    elif is_greedy and not is_chat:
        client.expected = checkpoint.plain.text(checkpoint.plain.greedy(prompt, LONGEST)[:max_tokens])
    return client


async def be(client: Client, server: Server, storm: Storm) -> None:
    if client.leaves:
        storm.num_left += 1
        if client.is_stream:
            await stream(server.port, client.path, client.body, key=KEY, leave_after=client.leaves_after)
        else:
            await _leave_whole(client, server)
        return
    if client.is_stream:
        answer = await stream(server.port, client.path, client.body, key=KEY)
        is_whole = answer.status == 200 and answer.is_done and len(answer.finish) == client.body["n"]
        texts = list(answer.text.values())
    else:
        reply = await ask(server.port, "POST", client.path, client.body, key=KEY)
        is_whole = reply.status == 200
        texts = [choice.get("text") for choice in reply.json().get("choices", ())]
    is_right = client.expected is None or texts == [client.expected] * client.body["n"]
    storm.num_whole += is_whole
    storm.num_wrong += not (is_whole and is_right)


async def _leave_whole(client: Client, server: Server) -> None:
    """Hang up in the middle of an answer that is not streamed (or before it was asked for to the end)."""
    async with Connection(server.port) as connection:
        await connection.send(request_bytes("POST", client.path, client.body, key=KEY))
        await asyncio.sleep(client.leaves_after_s or 0.0)


async def rage(server: Server, clients: list[Client]) -> Storm:
    storm = Storm(len(clients))
    gate = asyncio.Semaphore(AT_ONCE)
    began = time.monotonic()

    async def one(client: Client) -> None:
        async with gate:
            await be(client, server, storm)

    await asyncio.gather(*(one(client) for client in clients))
    storm.seconds = time.monotonic() - began
    return storm


async def settle(server: Server) -> None:
    await server.eventually(lambda: server.load().is_idle)
    await server.eventually(lambda: server.get("/load")[1] == {"server_load": 0})


def excess(before: dict[str, Footprint], after: dict[str, Footprint]) -> dict[str, str]:
    """What a process holds more than before. The gRPC library's own threads come and go; Python's must be the same ones."""
    found = {}
    for name, was in before.items():
        now = after[name]
        new_tasks = Counter(now.tasks) - Counter(was.tasks)
        new_threads = Counter(now.threads) - Counter(was.threads)
        if now.num_fds > was.num_fds or new_tasks or new_threads or now.num_threads > was.num_threads:
            fds, threads = now.num_fds - was.num_fds, now.num_threads - was.num_threads
            found[name] = f"{fds:+d} fds, {threads:+d} threads, tasks {dict(new_tasks)}, Python threads {dict(new_threads)}"
    return found


def cancellations(server: Server) -> float:
    """Sequences the engine gave up for their clients."""
    return server.metric("headrace_sequences_finished_total", reason="cancelled")


async def weather(server: Server, checkpoint: Checkpoint, count: int) -> dict[str, Any]:
    """A small storm to open everything that stays open, the big one, and the comparison. Returns what a result file wants."""
    await rage(server, make_clients(checkpoint, 30, seed=1))
    await settle(server)
    before, pids, cancelled = server.footprint(), server.pids(), cancellations(server)
    storm = await rage(server, make_clients(checkpoint, count, seed=2))
    await settle(server)
    left: dict[str, str] = {"not": "measured"}

    def is_as_before() -> bool:
        nonlocal left
        left = excess(before, server.footprint())
        return not left

    try:
        await server.eventually(is_as_before)
    except AssertionError:
        raise AssertionError(f"still held after the storm: {left}") from None
    assert server.pids() == pids
    assert storm.num_left == -(-count // 3)
    assert storm.num_wrong == 0, storm
    assert cancellations(server) - cancelled > storm.num_left / 4, "most of those who left did so before their answer was complete"
    after = server.footprint()
    return {
        "storm": asdict(storm),
        "before": {name: asdict(held) for name, held in before.items()},
        "after": {name: asdict(held) for name, held in after.items()},
        "engine_after": asdict(server.load()),
    }


async def test_a_client_that_leaves_an_answer_that_is_not_streamed_frees_its_blocks(fake_server: Server) -> None:
    """Left alone, these would run for a minute: five sequences of 3,000 tokens at 50 tokens per second. Streams: test_openai_client.py."""
    body = {"model": "fake", "prompt": [1, 2, 3] * 10, "max_tokens": 3000, "ignore_eos": True, "n": 5}
    before = cancellations(fake_server)
    async with Connection(fake_server.port) as connection:
        await connection.send(request_bytes("POST", COMPLETIONS, body))
        await fake_server.eventually(lambda: fake_server.load().num_running == 5)
    await fake_server.eventually(lambda: cancellations(fake_server) == before + 5)
    await fake_server.eventually(lambda: fake_server.load().is_idle)


async def test_100_requests_a_third_of_which_leave(server: Server, random_checkpoint: Checkpoint) -> None:
    await weather(server, random_checkpoint, 100)


@pytest.mark.slow
async def test_2000_requests_a_third_of_which_leave(server: Server, random_checkpoint: Checkpoint) -> None:
    save_result("storm-2000", await weather(server, random_checkpoint, 2000))
