"""A deployment changes in every way while streams run, in real processes: no request fails, no stream is cut, every text is the same.

What a command prints is in tests/cli/admin/test_control.py. The last test kills the supervisor.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from http_kit import COMPLETIONS, Answer, ask, stream
from server_kit import CROWD, CROWD_ENGINE, Server, is_alive, serving_fake

from headrace.cli.admin.client import AdminClient

pytestmark = pytest.mark.process

KEY, OTHER_KEY = "sk-of-the-streams-01", "sk-that-comes-and-goes"
NUM_TOKENS = 40
"""A stream takes 0.8 s: changes come in its middle."""
PARALLEL = 3
WORKERS = 2


@pytest.fixture(scope="module")
def site(random_folder: Path) -> Iterator[Server]:
    fake = {**CROWD, "step_seconds": 0.02, "numerics": {"weights": "w"}}
    with serving_fake(random_folder, fake=fake, engine=CROWD_ENGINE, models={"fake": {}}, gateway=gateway(KEY)) as server:
        yield server


def gateway(*keys: str) -> dict[str, Any]:
    return {"api_keys": [{"key": key} for key in keys], "port": 0, "workers": WORKERS}


def change_file(site: Server, **changes: Any) -> None:
    path = site.folder / "serve.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


async def do(site: Server, command: str, **body: Any) -> tuple[str, list[str]]:
    """A command of the operator to its end: how it ended, and what it said meanwhile. `reason` of a refusal comes last."""
    said = await asyncio.to_thread(lambda: list(AdminClient(site.run_dir).command(command, body)))
    return said[-1]["event"], [each.get("text", each.get("reason", "")) for each in said]


async def replicas(site: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await asyncio.to_thread(AdminClient(site.run_dir).status))["models"][0]["replicas"]
    return found


def seen(answer: Answer) -> object:
    assert (answer.status, answer.error) == (200, None)
    assert answer.is_done
    return dict(answer.text), dict(answer.finish), answer.usage


def one(site: Server, number: int, model: str = "fake") -> Any:
    fields: dict[str, Any] = {"model": model, "prompt": f"Story {number}:", "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number}
    fields["n"] = 1 + number % 2
    return stream(site.port, COMPLETIONS, {**fields, "stream_options": {"include_usage": True}}, key=KEY)


@asynccontextmanager
async def streams_run(site: Server) -> AsyncIterator[Callable[[], int]]:
    """Streams one after another in PARALLEL clients until the block ends; all of them must be whole. Gives their number so far."""
    unbroken = [seen(answer) for answer in await asyncio.gather(*(one(site, number) for number in range(PARALLEL)))]
    found: list[tuple[int, Answer]] = []
    is_over = asyncio.Event()

    async def client(number: int) -> None:
        while not is_over.is_set():
            found.append((number, await one(site, number)))

    clients = [asyncio.create_task(client(number)) for number in range(PARALLEL)]
    try:
        yield lambda: len(found)
        is_over.set()
        await asyncio.gather(*clients)
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    for number, answer in found:
        assert seen(answer) == unbroken[number]


async def statuses(site: Server, key: str) -> set[int]:
    """Of many connections, so that each worker has some."""
    return {answer.status for answer in await asyncio.gather(*(ask(site.port, "GET", "/v1/models", key=key) for _ in range(20)))}


async def test_streams_run_through_every_change(site: Server) -> None:
    async with streams_run(site) as num_done:
        ended, said = await do(site, "rollout", model="fake", max_surge=1, allow_outage=False)
        assert (ended, any("every replica was replaced" in line for line in said)) == ("done", True), said
        assert (await do(site, "scale", model="fake", replicas=2))[0] == "done"
        busiest, other = sorted(await replicas(site), key=lambda replica: -replica["open"])
        ended, said = await do(site, "drain", replica=busiest["name"], within_s=0.3, allow_outage=False)
        assert (ended, any(f"{busiest['name']} has left" in line for line in said)) == ("done", True), said
        assert other["name"] in [replica["name"] for replica in await replicas(site)]
        change_file(site, models={"fake": {}, "guest": {"aliases": ["visitor"]}}, gateway=gateway(KEY, OTHER_KEY))
        ended, said = await do(site, "reload")
        assert (ended, "+ models.guest" in "\n".join(said)) == ("done", True), said
        assert not any(key in line for line in said for key in (KEY, OTHER_KEY))
        assert seen(await one(site, 0, "visitor"))
        assert (await statuses(site, KEY), await statuses(site, OTHER_KEY)) == ({200}, {200})
        # The new model takes the place of the first one, name and all, with other options.
        change_file(site, models={"guest": {"aliases": ["fake"], "engine": {"max_num_seqs": 48}}}, gateway=gateway(KEY))
        ended, said = await do(site, "reload")
        assert (ended, "- models.fake" in "\n".join(said)) == ("done", True), said
        assert any("every replica was replaced" in line for line in said), "changed options of an engine are a rollout"
        assert (await statuses(site, KEY), await statuses(site, OTHER_KEY)) == ({200}, {401})
        refused = await ask(site.port, "POST", COMPLETIONS, {"model": "visitor", "prompt": "x"}, key=KEY)
        assert refused.status == 404
        change_file(site, models={"late": {}}, gateway={**gateway(KEY), "sessions": {"ttl_s": 7}})
        ended, said = await do(site, "reload")
        assert (ended, "gateway.sessions: cannot change while the deployment runs" in said[-1]) == ("refused", True), said
        assert num_done() > PARALLEL
    assert [(replica["phase"], replica["open"]) for replica in await replicas(site)] == [("serving", 0)]


async def test_nothing_is_left_when_the_supervisor_is_killed(site: Server) -> None:
    """The last of `site`. No signal reaches the children: their leash breaks."""
    pids = site.pids()
    assert {os.getsid(pid) for pid in pids.values()} == set(pids.values()), "each leads a session of its own"
    running = [asyncio.create_task(cut_stream(site, seed)) for seed in range(8)]
    [replica] = await replicas(site)
    [engine] = [name for name, pid in pids.items() if pid in replica["pids"]]
    await site.eventually(lambda: site.load(engine).num_running == 8)
    children = psutil.Process(site.process.pid).children(recursive=True)
    assert len(children) >= WORKERS + 1 + 2 * WORKERS, "workers, their text workers, and the engine"
    site.process.kill()
    await site.eventually(lambda: not any(is_alive(child.pid) for child in children))
    assert not any(await asyncio.gather(*running))
    assert not is_listening(site.port)


async def cut_stream(site: Server, seed: int) -> bool:
    """Whether the stream came to its end."""
    body = {"model": "fake", "prompt": [5, 6], "max_tokens": 3000, "seed": seed, "ignore_eos": True}
    try:
        return (await stream(site.port, COMPLETIONS, body, key=KEY)).is_done
    except (OSError, asyncio.IncompleteReadError):
        return False


def is_listening(port: int) -> bool:
    return any(c.status == "LISTEN" and c.laddr and c.laddr[1] == port for c in psutil.net_connections("tcp"))
