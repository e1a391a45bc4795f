"""Upgrades a site from an earlier commit to this one while it serves: gateways first, then once more engines first.

    python -m bench.storms.upgrade --before COMMIT [--parallel 6]  -> bench/results/storms/upgrade.json

Two gateways and two engines of the commit before run as on several machines. Clients send requests of every kind of
`bench.storms.failover` to the gateways that a load balancer would choose: one that is about to be ended gets no new request. Each process
is ended in order (SIGTERM) and started again from this checkout, one after the other, gateways before engines or engines before
gateways, so that both mixtures of versions serve for a while. The gateways share a state folder which the version before made: a key with
limits, sessions whose turns go to any gateway, and the usage ledger.

failed     requests without a whole answer, by what their client saw
different  whole answers that are not those of the site before; a session that lost a turn is one
clients    requests with a whole answer and their tokens, as the clients' `usage` says
ledger     the same as `headrace usage` of the new version says
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from bench.storms.common import RESULTS
from bench.storms.failover import MODEL, SEEDS, Answer, ask, kinds
from bench.storms.site import SOURCE, Kept, free_port, running_site, until_ready
from headrace.lab.environment import environment
from headrace.lab.report import write_json

MIXED_S = 3.0
"""Seconds for which each mixture of versions serves before the next process is upgraded."""
TURNS = 5
"""Turns of each session; each one's prompt is longer by the turn before it."""
FIRST_START_S = 900.0
"""Seconds for the first start: nothing is compiled yet for the new checkout of the version before."""
LEDGER_S = 10.0
"""Seconds within which the ledger has every request, before it counts as short."""
TENANT = "acme"


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Sources of a commit, in a work tree of their own that is removed afterwards."""
    git = ("git", "-C", str(SOURCE))
    with tempfile.TemporaryDirectory(prefix="headrace-before-") as name:
        tree = Path(name) / "tree"
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree / "src"
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)


class Load:
    """Clients that send requests, one after another, to the gateways in `ports`, until they are stopped."""

    def __init__(self, session: aiohttp.ClientSession, ports: list[int], seed: int) -> None:
        self.ports = ports
        self.num = 0
        self.failed: Counter[str] = Counter()
        self.different: Counter[str] = Counter()
        self.used: Counter[str] = Counter()
        self._session, self._draw = session, random.Random(seed)
        self._unbroken: dict[tuple[str, int], Answer] = {}
        self._conversation: list[str] = []
        self._names = itertools.count()
        self._ends = False

    async def learn(self) -> None:
        """The answers without any change."""
        for kind, seed in itertools.product(kinds(), range(SEEDS)):
            self._unbroken[kind, seed] = answer = await ask(self._session, self._draw.choice(self.ports), kind, seed)
            if answer.error:
                raise RuntimeError(f"without any change: {kind}: {answer.error}")
            self._count(*answer.parts["usage"])
        self._conversation = [await self._turn("learned", number) for number in range(TURNS)]

    async def run(self, parallel: int) -> None:
        await asyncio.gather(self._converse(), *(self._client() for _ in range(parallel)))

    def end(self) -> None:
        """Clients end after the request that they have open."""
        self._ends = True

    async def _client(self) -> None:
        names = list(kinds())
        while not self._ends:
            kind, seed = self._draw.choice(names), self._draw.randrange(SEEDS)
            answer = await ask(self._session, self._draw.choice(self.ports), kind, seed)
            self.num += 1
            if answer.error:
                self.failed[f"{kind}: {answer.error}"] += 1
                continue
            self._count(*answer.parts["usage"])
            if answer.parts != self._unbroken[kind, seed].parts:
                self.different[kind] += 1

    async def _converse(self) -> None:
        """One session after another, each turn at any gateway."""
        while not self._ends:
            name = f"session-{next(self._names)}"
            for number in range(TURNS):
                self.num += 1
                try:
                    answer = await self._turn(name, number)
                except (aiohttp.ClientError, TimeoutError) as error:
                    self.failed[f"session: {error!r}"[:160]] += 1
                    break
                if answer != self._conversation[number]:
                    self.different["session"] += 1

    async def _turn(self, name: str, number: int) -> str:
        """The answer of one turn, and the tokens of its prompt."""
        message = {"role": "user", "content": f"Tell me more of it, part {number}."}
        body = {"model": MODEL, "messages": [message], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        url = f"http://127.0.0.1:{self._draw.choice(self.ports)}/v1/chat/completions"
        async with asyncio.timeout(60), self._session.post(url, json=body, headers={"x-session-id": name}) as response:
            found = await response.json()
            if response.status != 200:
                raise aiohttp.ClientPayloadError(str(found))
        usage = found["usage"]
        self._count(usage["prompt_tokens"], usage["completion_tokens"])
        return f"{usage['prompt_tokens']}: {found['choices'][0]['message']['content']}"

    def _count(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.used.update(requests=1, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)


def command(source: Path, *words: str) -> Any:
    """What a command of the package in `source` prints as JSON."""
    environ = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, "-P", "-m", "headrace", *words, "--json"], env=environ, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


async def ledger(state: Path, wanted: Counter[str]) -> dict[str, int]:
    """What the ledger has of the tenant; asked again until it has as many requests as `wanted`, or `LEDGER_S` are over."""
    deadline = asyncio.get_running_loop().time() + LEDGER_S
    while True:
        rows = await asyncio.to_thread(command, SOURCE, "usage", "--by", "tenant", "--state", str(state))
        found = {name: row[name] for row in rows if row["tenant"] == TENANT for name in wanted}
        if found.get("requests", 0) >= wanted["requests"] or asyncio.get_running_loop().time() > deadline:
            return found
        await asyncio.sleep(0.5)


async def upgrade(before: Path, given: argparse.Namespace, *, gateways_first: bool) -> dict[str, Any]:
    async with running_site() as site, AsyncExitStack() as stack:
        state = site.folder / "state"
        tiers = {"all": {"requests_per_minute": 100_000, "input_tokens_per_minute": 1_000_000_000}}
        settings = {"state": str(state), "tiers": tiers}
        addresses = {f"engine-{index}": free_port() for index in range(2)}
        ports = (free_port(), free_port())
        for port in ports:
            site.write(port, addresses, settings)
        key = command(before, "keys", "create", "--tenant", TENANT, "--tier", "all", "--config", str(site.file(ports[0])))["key"]
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, headers={"authorization": f"Bearer {key}"}))
        engines = [site.engine(port, source=before) for port in addresses.values()]
        gateways = {port: site.gateway(port, addresses, source=before, settings=settings) for port in ports}
        for port in gateways:
            await until_ready(session, port, FIRST_START_S)
        load = Load(session, list(gateways), given.seed)
        await load.learn()
        running = asyncio.create_task(load.run(given.parallel))
        try:
            steps = [_upgrade_gateways(session, load, gateways), _upgrade_engines(session, engines, load)]
            for step in steps if gateways_first else reversed(steps):
                await step
        finally:
            load.end()
            await running
        found = {"requests": load.num, "failed": dict(load.failed), "different": dict(load.different)}
        return {**found, "clients": dict(load.used), "ledger": await ledger(state, load.used)}


async def _upgrade_gateways(session: aiohttp.ClientSession, load: Load, gateways: dict[int, Kept]) -> None:
    for port, gateway in gateways.items():
        load.ports.remove(port)
        await gateway.upgrade(SOURCE)
        await until_ready(session, port)
        load.ports.append(port)
        await asyncio.sleep(MIXED_S)


async def _upgrade_engines(session: aiohttp.ClientSession, engines: list[Kept], load: Load) -> None:
    for engine in engines:
        await engine.upgrade(SOURCE)
        for port in load.ports:
            await until_ready(session, port)
        await asyncio.sleep(MIXED_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="commit of the version before")
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with checkout(given.before) as before:
        for name, gateways_first in (("gateways first", True), ("engines first", False)):
            found[name] = asyncio.run(upgrade(before, given, gateways_first=gateways_first))
    print(json.dumps(found, indent=1))
    write_json(Path(RESULTS / "upgrade.json"), {"environment": asdict(environment()), "arguments": vars(given), **found})


if __name__ == "__main__":
    main()
