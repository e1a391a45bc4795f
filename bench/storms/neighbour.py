"""A noisy neighbour on a real deployment: one tenant's times to the first token, alone and beside another with fifty times its load.

    python -m bench.storms.neighbour [--model headrace-tiny] [--rate 0.5] [--seconds 60] [--times 50] [--policies priority,fcfs]
        -> bench/results/storms/neighbour-POLICY.json

`headrace serve` with two API keys of one tier. The victim asks at random moments, `--rate` requests a second on average; the neighbour asks
`--times` as often, whatever it has open already. A run is the victim alone, then both, at the same moments of the victim. What the
neighbour is refused with 429 is counted: it is load too.

quiet, shared   the victim's seconds to the first token (p50, p99), and the errors that it saw
ratio           p99 of `shared` divided by that of `quiet`
neighbour       its requests by outcome
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from bench.storms.common import Served, served, write_result
from headrace.bundled import DEFAULT_MODEL
from headrace.lab.environment import environment

KEYS = {"victim": "hr-storm-victim-0123456789abcdef", "neighbour": "hr-storm-neighbour-0123456789abcdef"}
PATIENCE_S = 120.0


@dataclass(slots=True)
class Outcome:
    """What one tenant saw. first_s: seconds to the first token, of answers that have one; ends: how many requests ended how"""

    first_s: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.first_s)
        found = {f"p{part}_s": round(ordered[min(len(ordered) - 1, len(ordered) * part // 100)], 4) for part in (50, 99)} if ordered else {}
        return {**found, "requests": sum(self.ends.values()), "ends": dict(self.ends)}


def config(model: str, policy: str) -> dict[str, Any]:
    """Keys of a file as JSON, which is YAML too. The neighbour may fill the gateway: what is refused then is counted."""
    keys = [{"key": key, "tenant": tenant, "tier": "standard"} for tenant, key in KEYS.items()]
    return {
        "models": [{"engine": {"model": model, "queue_policy": policy, "max_waiting": 100_000}}],
        "gateway": {"api_keys": keys},
    }


async def ask(session: aiohttp.ClientSession, port: int, tenant: str, seed: int, outcome: Outcome) -> None:
    words = " ".join(f"mill{seed}-{i}" for i in range(20 + seed % 20))
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 16 + seed % 48, "ignore_eos": True, "stream": True}
    began = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE_S):
            url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"authorization": f"Bearer {KEYS[tenant]}"}
            async with session.post(url, json=body, headers=headers) as response:
                outcome.ends[await _read(response, began, outcome)] += 1
    except (aiohttp.ClientError, TimeoutError) as error:
        outcome.ends[type(error).__name__] += 1


async def _read(response: aiohttp.ClientResponse, began: float, outcome: Outcome) -> str:
    """How the answer ended. Notes the time of its first text."""
    if response.status != 200:
        await response.read()
        return str(response.status)
    is_first = True
    async for raw in response.content:
        line = raw.strip()
        if line == b"data: [DONE]":
            return "whole"
        if is_first and line.startswith(b"data: ") and _has_text(json.loads(line[6:])):
            outcome.first_s.append(time.monotonic() - began)
            is_first = False
    return "cut"


def _has_text(chunk: dict[str, Any]) -> bool:
    return any(choice["delta"].get("content") for choice in chunk.get("choices", ()))


async def load(session: aiohttp.ClientSession, port: int, tenant: str, rate: float, seconds: float) -> Outcome:
    """Requests at random moments; all of them are awaited at the end."""
    draw, outcome = random.Random(tenant), Outcome()
    asking: list[asyncio.Task[None]] = []
    begin, at = time.monotonic(), 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
        asking.append(asyncio.create_task(ask(session, port, tenant, len(asking), outcome)))
    if tenant == "neighbour":
        for task in asking:
            task.cancel()
        outcome.ends["left"] = sum(isinstance(end, BaseException) for end in await asyncio.gather(*asking, return_exceptions=True))
    else:
        await asyncio.gather(*asking)
    return outcome


async def run(server: Served, rate: float, times: float, seconds: float) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        await load(session, server.port, "victim", 1.0, 5.0)  # the engine learns what its steps cost
        quiet = await load(session, server.port, "victim", rate, seconds)
        neighbour = asyncio.create_task(load(session, server.port, "neighbour", times * rate, seconds + 5))
        await asyncio.sleep(5)
        shared = await load(session, server.port, "victim", rate, seconds)
        flood = await neighbour
    found = {"quiet": quiet.summary(), "shared": shared.summary(), "neighbour": flood.summary()}
    if quiet.first_s and shared.first_s:
        found["ratio"] = round(found["shared"]["p99_s"] / found["quiet"]["p99_s"], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=50.0)
    parser.add_argument("--policies", default="priority,fcfs")
    parser.add_argument("--no-file", action="store_true")
    given = parser.parse_args()
    before = environment()
    for policy in given.policies.split(","):
        with TemporaryDirectory(prefix="headrace-neighbour-") as folder:
            path = Path(folder) / "site.yaml"
            path.write_text(json.dumps(config(given.model, policy)), encoding="utf-8")
            path.chmod(0o600)
            with served("--config", str(path)) as server:
                found = asyncio.run(run(server, given.rate, given.times, given.seconds))
        print(policy, json.dumps(found), flush=True)
        if not given.no_file:
            write_result(f"neighbour-{policy}", {"environment": before, "settings": vars(given), **found})


if __name__ == "__main__":
    main()
