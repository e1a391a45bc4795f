"""A deployment changes in every way while streams run, in real processes: no request fails, no stream is cut, every text is the same.

The storm over many rounds and the real engine is `bench/storms/change.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from http_kit import COMPLETIONS, Answer, ask, stream
from server_kit import CROWD, Server, serving_fake

KEY, OTHER_KEY = "sk-of-the-streams-01", "sk-that-comes-and-goes"
NUM_TOKENS = 120
"""A stream takes 1.2 s: changes come in its middle."""
PARALLEL = 6


@pytest.fixture(scope="module")
def site(random_folder: Path) -> Iterator[Server]:
    with serving_fake(
        random_folder, fake={**CROWD, "step_seconds": 0.01, "numerics": {"weights": "w"}}, models={"fake": {}}, gateway=keys(KEY)
    ) as server:
        yield server


def keys(*given: str) -> dict[str, Any]:
    return {"api_keys": [{"key": key} for key in given], "port": 0}


def change_file(site: Server, **changes: Any) -> None:
    path = site.folder / "serve.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


async def headrace(site: Server, *words: str, status: int = 0) -> str:
    """A command as an operator gives it; its output. Fails unless it ends with this status."""
    command = [sys.executable, "-m", "headrace", *words, "--run-dir", str(site.folder)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, f"{words}: {done.stdout}{done.stderr}\n{site.log[-3000:]}"
    return done.stdout + done.stderr


async def replicas(site: Server) -> list[dict[str, Any]]:
    """Of the first model, as `headrace status` has them."""
    found: list[dict[str, Any]] = json.loads(await headrace(site, "status", "--json"))["models"][0]["replicas"]
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
    unbroken = {number: seen(await one(site, number)) for number in range(PARALLEL)}
    found: list[tuple[int, Answer]] = []
    is_over = asyncio.Event()

    async def client(first: int) -> None:
        for number in itertools.count(first):
            if is_over.is_set():
                return
            found.append((number % PARALLEL, await one(site, number % PARALLEL)))

    clients = [asyncio.create_task(client(first)) for first in range(PARALLEL)]
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


async def status_of(site: Server, key: str) -> int:
    return (await ask(site.port, "GET", "/v1/models", key=key)).status


async def test_streams_run_through_every_change(site: Server) -> None:
    async with streams_run(site) as num_done:
        assert "every replica was replaced" in await headrace(site, "rollout", "fake")
        await headrace(site, "scale", "fake=3")
        shown = await headrace(site, "status")
        assert "fake: 3 of 3 replicas ready, revision 1" in shown
        busiest = max(await replicas(site), key=lambda replica: replica["open"])
        assert f"{busiest['name']} has left" in await headrace(site, "drain", busiest["name"], "--within", "0.3")
        await headrace(site, "scale", "fake=1")
        change_file(site, models={"fake": {}, "guest": {"aliases": ["visitor"]}}, gateway=keys(KEY, OTHER_KEY))
        said = await headrace(site, "reload")
        assert OTHER_KEY not in said
        assert KEY not in said
        assert "+ models.guest" in said
        assert seen(await one(site, 0, "visitor"))
        assert (await status_of(site, KEY), await status_of(site, OTHER_KEY)) == (200, 200)
        # The new model takes the place of the first one, name and all.
        change_file(site, models={"guest": {"aliases": ["fake"]}}, gateway=keys(KEY))
        said = await headrace(site, "reload")
        assert "- models.fake" in said
        assert (await status_of(site, KEY), await status_of(site, OTHER_KEY)) == (200, 401)
        refused = await ask(site.port, "POST", COMPLETIONS, {"model": "visitor", "prompt": "x"}, key=KEY)
        assert refused.status == 404
        change_file(site, models={"guest": {"aliases": ["fake"], "engine": {"max_num_seqs": 48}}})
        assert "every replica was replaced" in await headrace(site, "reload"), "changed options of an engine are a rollout"
        change_file(site, models={"late": {}}, gateway={**keys(KEY), "limits": {"max_text_queue": 7}})
        said = await headrace(site, "reload", status=3)
        assert "nothing was changed: limits.max_text_queue: cannot change while the gateway runs" in said
        assert num_done() > PARALLEL
    assert [(replica["phase"], replica["open"]) for replica in await replicas(site)] == [("serving", 0)]
