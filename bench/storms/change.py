"""Checks that every stream ends, with the unbroken answer to the byte, while the deployment changes under it.

    python -m bench.storms.change [--rounds 200] [--parallel 8] [--workers 1] [--plain]      -> bench/results/storms/change.json

`headrace serve --config FILE` with one model and its own commands, as an operator gives them. A round is one change, in turn:

    rollout       headrace rollout MODEL
    scale         headrace scale MODEL=3, then MODEL=1
    drain         a second replica, then `headrace drain` of the one with more requests, `--within 1`: what has not finished moves
    no surge      a second replica, then `headrace rollout --max-surge 0`, then one replica
    models        a second model in the file, reload; asked; out of it, reload
    keys          a second API key in the file, reload; used; out of it, reload
    options       another max_num_seqs in the file, reload: a rollout
    hangup        the number of replicas in the file, SIGHUP, until it holds

Meanwhile `--parallel` clients send requests of every kind of `bench.storms.failover`, one after another, each compared with its unbroken
answer.

failed           requests without a whole answer, by what their client saw
different        requests whose answer is another one. 0 with `--deterministic`; `--plain` serves without it
refused_changes  rounds whose command did not end with status 0, with its output
change_s         duration of each kind of round
gap_s            longest silence within a stream
left             replicas and processes at the end that should not be there
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.storms.common import RESULTS, Served, served
from bench.storms.failover import MODEL, SEEDS, Answer, ask, kinds, quantiles
from headrace.lab.environment import environment
from headrace.lab.report import write_json

KEY, OTHER_KEY = "sk-of-the-storm-000", "sk-that-comes-and-goes"
GUEST = "guest"
COMMAND_TIMEOUT_S = 300.0
WITHIN_S = 1.0


class Refused(Exception):
    """A command that did not end with status 0, with its output."""


class Site:
    """The deployment, its file, and its operator. `folder` holds both."""

    def __init__(self, folder: Path, flags: argparse.Namespace) -> None:
        self.folder = folder
        self.path = folder / "headrace.yaml"
        self._engine: dict[str, Any] = {"model": MODEL, "max_num_seqs": 32, "num_threads": 1, "num_kv_blocks": 1500}
        if not flags.plain:
            self._engine["deterministic"] = True
        self._gateway: dict[str, Any] = {"api_keys": [{"key": KEY}], "port": 0, "workers": flags.workers}
        self.write()

    def write(self, *, replicas: int = 1, keys: tuple[str, ...] = (KEY,), guests: int = 0, **engine: Any) -> None:
        """The file: a number of replicas, keys, replicas of a second model, and changed options of the first one's engines."""
        self._engine |= engine
        models = [{"name": MODEL, "replicas": replicas, "engine": self._engine}]
        if guests:
            models.append({"name": GUEST, "replicas": guests, "engine": self._engine})
        gateway = {**self._gateway, "api_keys": [{"key": key} for key in keys]}
        content = {"models": models, "gateway": gateway, "run_dir": str(self.folder), "drain_timeout_s": 60}
        self.path.write_text(json.dumps(content, indent=1), encoding="utf-8")  # JSON is YAML

    async def do(self, *words: str) -> str:
        """One command of `headrace`; what it printed. Raises Refused."""
        command = [sys.executable, "-P", "-m", "headrace", *words, "--run-dir", str(self.folder)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            output, _ = await process.communicate()
        if process.returncode:
            raise Refused(f"{' '.join(words)}: status {process.returncode}: {output.decode()[-400:]}")
        return output.decode()

    async def replicas(self) -> list[dict[str, Any]]:
        status = json.loads(await self.do("status", "--json"))
        found: list[dict[str, Any]] = status["models"][0]["replicas"]
        return found


class Changes:
    """One round of each kind. Each leaves the deployment with one replica and one key."""

    def __init__(self, site: Site, server: Served, session: aiohttp.ClientSession) -> None:
        self._site, self._server, self._session = site, server, session
        self._num_seqs = 32
        self.kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "rollout": self.rollout,
            "scale": self.scale,
            "drain": self.drain,
            "no surge": self.no_surge,
            "models": self.models,
            "keys": self.keys,
            "options": self.options,
            "hangup": self.hangup,
        }

    async def rollout(self) -> None:
        await self._site.do("rollout", MODEL)

    async def scale(self) -> None:
        await self._site.do("scale", f"{MODEL}=3")
        await self._site.do("scale", f"{MODEL}=1")

    async def drain(self) -> None:
        await self._site.do("scale", f"{MODEL}=2")
        busiest = max(await self._site.replicas(), key=lambda replica: replica["open"] or 0)
        await self._site.do("drain", busiest["name"], "--within", f"{WITHIN_S:g}")

    async def no_surge(self) -> None:
        await self._site.do("scale", f"{MODEL}=2")
        await self._site.do("rollout", MODEL, "--max-surge", "0")
        await self._site.do("scale", f"{MODEL}=1")

    async def models(self) -> None:
        self._site.write(guests=1)
        await self._site.do("reload")
        await self._expect(200, KEY, GUEST)
        self._site.write()
        await self._site.do("reload")
        await self._expect(404, KEY, GUEST)

    async def keys(self) -> None:
        self._site.write(keys=(KEY, OTHER_KEY))
        await self._site.do("reload")
        await self._expect(200, OTHER_KEY, MODEL)
        self._site.write()
        await self._site.do("reload")
        await self._expect(401, OTHER_KEY, MODEL)

    async def options(self) -> None:
        self._num_seqs = 65 - self._num_seqs
        self._site.write(max_num_seqs=self._num_seqs)
        await self._site.do("reload")

    async def hangup(self) -> None:
        for count in (2, 1):
            self._site.write(replicas=count)
            supervisor = psutil.Process(self._server.gateway_pid).parent()
            assert supervisor is not None
            os.kill(supervisor.pid, signal.SIGHUP)
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                while [replica["phase"] for replica in await self._site.replicas()] != ["serving"] * count:
                    await asyncio.sleep(0.2)

    async def _expect(self, status: int, key: str, model: str) -> None:
        """Raises Refused where a request with this key gets another status."""
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        url = f"http://127.0.0.1:{self._server.port}/v1/chat/completions"
        async with self._session.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as response:
            if response.status != status:
                raise Refused(f"{model} answered {response.status} instead of {status}: {(await response.text())[:200]}")


async def storm(site: Site, server: Served, given: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(given.seed)
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers={"authorization": f"Bearer {KEY}"}) as session:
        unbroken = {(kind, seed): await ask(session, server.port, kind, seed) for kind in kinds() for seed in range(SEEDS)}
        broken = {key: answer.error for key, answer in unbroken.items() if answer.error}
        if broken:
            raise SystemExit(f"without any change: {broken}")
        done: list[tuple[str, int, Answer]] = []
        is_over = asyncio.Event()

        async def client() -> None:
            while not is_over.is_set():
                kind, seed = draw.choice([*kinds()]), draw.randrange(SEEDS)
                done.append((kind, seed, await ask(session, server.port, kind, seed)))

        clients = [asyncio.create_task(client()) for _ in range(given.parallel)]
        changes = Changes(site, server, session)
        change_s, refused = await _rounds(changes, given.rounds)
        is_over.set()
        await asyncio.gather(*clients)
        left = [replica for replica in await site.replicas() if replica["open"] or replica["phase"] != "serving"]
    return {**_summary(done, unbroken), "refused_changes": refused, "change_s": change_s, "left": left}


async def _rounds(changes: Changes, rounds: int) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Each kind in turn; the seconds that each took, and what was refused."""
    seconds: dict[str, list[float]] = defaultdict(list)
    refused: list[str] = []
    for number in range(rounds):
        kind = [*changes.kinds][number % len(changes.kinds)]
        began = time.monotonic()
        try:
            await changes.kinds[kind]()
        except (Refused, TimeoutError) as error:
            refused.append(f"round {number}, {kind}: {error!r}")
        seconds[kind].append(time.monotonic() - began)
        print(f"round {number + 1} of {rounds}: {kind}, {seconds[kind][-1]:.1f} s", file=sys.stderr, flush=True)
    return {kind: quantiles(found) for kind, found in seconds.items()}, refused


def _summary(done: list[tuple[str, int, Answer]], unbroken: dict[tuple[str, int], Answer]) -> dict[str, Any]:
    return {
        "requests": len(done),
        "by_kind": dict(Counter(kind for kind, _, _ in done)),
        "failed": dict(Counter(f"{kind}: {answer.error}" for kind, _, answer in done if answer.error)),
        "different": dict(Counter(k for k, seed, answer in done if not answer.error and answer.parts != unbroken[k, seed].parts)),
        "gap_s": quantiles([answer.gap_s for _, _, answer in done if not answer.error]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        site = Site(Path(folder), given)
        with served("--config", str(site.path)) as server:
            found = asyncio.run(storm(site, server, given))
    print(json.dumps(found, indent=1))
    with suppress(OSError):
        RESULTS.mkdir(parents=True, exist_ok=True)
    name = f"change{'-plain' if given.plain else ''}{f'-{given.workers}-workers' if given.workers > 1 else ''}.json"
    write_json(Path(RESULTS / name), {"environment": asdict(environment()), "arguments": vars(given), **found})


if __name__ == "__main__":
    main()
