"""A site is upgraded from an earlier commit to this one while it serves: gateways first, then once more engines first.

    python -m bench.storms.upgrade --before COMMIT [--parallel 6]  -> bench/results/storms/upgrade.json

Two gateways and two engines of the commit before run as on several machines. Clients send requests of every kind of
`bench.storms.failover` to the gateways that a load balancer would choose: one that is about to be ended gets no new request. Each process
is ended in order (SIGTERM) and started again from this checkout, one after the other, gateways before engines or engines before
gateways, so that both mixtures of versions serve for a while.

failed     requests without a whole answer, by what their client saw
different  whole answers that are not those of the site before
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from bench.storms.common import RESULTS
from bench.storms.failover import SEEDS, Answer, ask, kinds
from bench.storms.site import SOURCE, Kept, free_port, running_site, until_ready
from headrace.lab.environment import environment
from headrace.lab.report import write_json

MIXED_S = 3.0
"""Seconds for which each mixture of versions serves before the next process is upgraded."""


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
        self._session, self._draw = session, random.Random(seed)
        self._unbroken: dict[tuple[str, int], Answer] = {}
        self._ends = False

    async def learn(self) -> None:
        """The answers without any change."""
        for kind, seed in itertools.product(kinds(), range(SEEDS)):
            self._unbroken[kind, seed] = answer = await ask(self._session, self._draw.choice(self.ports), kind, seed)
            if answer.error:
                raise RuntimeError(f"without any change: {kind}: {answer.error}")

    async def run(self, parallel: int) -> None:
        await asyncio.gather(*(self._client() for _ in range(parallel)))

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
            elif answer.parts != self._unbroken[kind, seed].parts:
                self.different[kind] += 1


async def upgrade(before: Path, given: argparse.Namespace, *, gateways_first: bool) -> dict[str, Any]:
    async with running_site() as site, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        addresses = {f"engine-{index}": free_port() for index in range(2)}
        engines = [site.engine(port, source=before) for port in addresses.values()]
        gateways = {port: site.gateway(port, addresses, source=before) for port in (free_port(), free_port())}
        for port in gateways:
            await until_ready(session, port)
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
        return {"requests": load.num, "failed": dict(load.failed), "different": dict(load.different)}


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
