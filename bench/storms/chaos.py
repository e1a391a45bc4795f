"""Measures availability under faults: a gateway, three engines on links of their own, and now and then a fault on one of them.

    python -m bench.storms.chaos [--minutes 30] [--rate 5] [--every 20] [--gateway-kills 0]  -> bench/results/storms/chaos.json

Engines are started one by one as on several machines (`headrace engine`), each restarted when it ends, as a service manager does. A gateway
reaches each through a link of its own (`bench.network_faults`), and reads its file again on SIGHUP. Requests of every kind of
`bench.storms.failover` arrive at random, `--rate` per second; every second one has a client that tries again, up to three times, when an
answer fails. `--gateway-kills N` also kills the gateway N times; requests that were open then, or came before it was back, are counted
apart.

availability  share of requests with a whole answer, for clients that try again and for those that do not
different     whole answers that are not the one without faults
faults        number of each kind
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.network_faults import CUT, HEALTHY, Direction, FaultyLink, LinkFault
from bench.storms.common import RESULTS
from bench.storms.failover import SEEDS, Answer, ask, kinds
from bench.storms.site import Kept, Site, free_port, running_site, until_ready
from headrace.lab.environment import environment
from headrace.lab.report import write_json

NUM_ENGINES = 3
MAX_TRIES = 4
GATEWAY_START_S = 5.0
"""Seconds after a kill of the gateway for which requests count as hit by it: the service manager's pause, and the gateway's start."""


@dataclass(slots=True)
class Target:
    """The site under test. links: how the gateway reaches each engine, in their order; listed: engines in the gateway's file now"""

    site: Site
    port: int
    gateway: Kept
    engines: list[Kept]
    links: list[FaultyLink]
    listed: list[int]

    def reload(self) -> None:
        self.site.write(self.port, addresses(self.links, self.listed))
        self.gateway.send(signal.SIGHUP)


def addresses(links: list[FaultyLink], listed: list[int]) -> dict[str, int]:
    return {f"engine-{index}": links[index].port for index in listed}


@asynccontextmanager
async def running_target() -> AsyncIterator[Target]:
    async with AsyncExitStack() as stack, running_site() as site:
        ports = [free_port() for _ in range(NUM_ENGINES)]
        links = [await stack.enter_async_context(FaultyLink("127.0.0.1", port)) for port in ports]
        listed, port = list(range(NUM_ENGINES)), free_port()
        gateway = site.gateway(port, addresses(links, listed))
        yield Target(site, port, gateway, [site.engine(port) for port in ports], links, listed)


Fault = Callable[[Target, random.Random], Awaitable[None]]


async def kill(target: Target, draw: random.Random) -> None:
    draw.choice(target.engines).send(signal.SIGKILL)


async def stop(target: Target, draw: random.Random) -> None:
    engine = draw.choice(target.engines)
    if engine.send(signal.SIGSTOP):
        try:
            await asyncio.sleep(draw.uniform(0.5, 10.0))
        finally:
            engine.send(signal.SIGCONT)


async def end(target: Target, draw: random.Random) -> None:
    """A restart in order: the engine drains, moves what does not finish, and comes back."""
    draw.choice(target.engines).send(signal.SIGTERM)


async def delay(target: Target, draw: random.Random) -> None:
    await _link(target, draw, LinkFault(delay_s=0.25))


async def loss(target: Target, draw: random.Random) -> None:
    await _link(target, draw, LinkFault(loss=0.3))


async def partition(target: Target, draw: random.Random) -> None:
    """In both directions, or in one."""
    await _link(target, draw, CUT, *draw.choice([(), (Direction.TO_SERVER,), (Direction.TO_CLIENT,)]))


async def reset(target: Target, draw: random.Random) -> None:
    draw.choice(target.links).reset()


async def _link(target: Target, draw: random.Random, fault: LinkFault, *directions: Direction) -> None:
    link = draw.choice(target.links)
    link.set(fault, *directions)
    try:
        await asyncio.sleep(draw.uniform(1.0, 12.0))
    finally:
        link.set(HEALTHY)


async def remove(target: Target, draw: random.Random) -> None:
    """A configuration with one engine less, and the one before some seconds later."""
    away = draw.choice(target.listed)
    target.listed.remove(away)
    target.reload()
    try:
        await asyncio.sleep(draw.uniform(2.0, 10.0))
    finally:
        target.listed.append(away)
        target.reload()


FAULTS: dict[str, Fault] = {fault.__name__: fault for fault in (kill, stop, end, delay, loss, partition, reset, remove)}


@dataclass(slots=True)
class Counts:
    """What became of the requests of one sort of client. errors: of failed requests, with the fault of that time"""

    num: int = 0
    num_whole: int = 0
    num_different: int = 0
    num_tries: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        availability = round(self.num_whole / self.num, 5) if self.num else None
        return {**asdict(self), "errors": dict(self.errors), "availability": availability}


class Storm:
    def __init__(self, target: Target, session: aiohttp.ClientSession, given: argparse.Namespace) -> None:
        self._target, self._session, self._given = target, session, given
        self._draw = random.Random(given.seed)
        self._fault = "none"
        self._unbroken: dict[tuple[str, int], Answer] = {}
        self.kinds = list(kinds())
        self.faults: Counter[str] = Counter()
        self.counts = {"tries again": Counts(), "does not": Counts(), "during a kill of the gateway": Counts()}
        self._gateway_kills: list[float] = []

    async def run(self) -> None:
        for kind, seed in itertools.product(self.kinds, range(SEEDS)):
            self._unbroken[kind, seed] = answer = await ask(self._session, self._target.port, kind, seed)
            if answer.error:
                raise SystemExit(f"without any fault: {kind}: {answer.error}")
        faults = [asyncio.create_task(self._inject()), asyncio.create_task(self._kill_gateways())]
        end = time.monotonic() + 60 * self._given.minutes
        requests: set[asyncio.Task[None]] = set()
        for number in itertools.count():
            await asyncio.sleep(self._draw.expovariate(self._given.rate))
            if time.monotonic() > end:
                break
            kind, seed = self._draw.choice(self.kinds), self._draw.randrange(SEEDS)
            task = asyncio.create_task(self._client(kind, seed, tries_again=number % 2 == 0))
            requests.add(task)
            task.add_done_callback(requests.discard)
        for task in faults:
            task.cancel()
        await asyncio.gather(*faults, *requests, return_exceptions=True)

    async def _client(self, kind: str, seed: int, *, tries_again: bool) -> None:
        began, fault = time.monotonic(), self._fault
        for num_tries in itertools.count(1):
            answer = await ask(self._session, self._target.port, kind, seed)
            if not answer.error or not tries_again or num_tries == MAX_TRIES:
                break
            await asyncio.sleep(0.5 * 2**num_tries * self._draw.uniform(0.5, 1.0))
        hit = any(began - GATEWAY_START_S <= moment <= time.monotonic() for moment in self._gateway_kills)
        counts = self.counts["during a kill of the gateway" if hit else "tries again" if tries_again else "does not"]
        counts.num += 1
        counts.num_tries += num_tries
        if answer.error:
            counts.errors[f"{kind}, fault {fault} to {self._fault}: {answer.error}"] += 1
            return
        counts.num_whole += 1
        counts.num_different += answer.parts != self._unbroken[kind, seed].parts

    async def _inject(self) -> None:
        while True:
            for fault in self._draw.sample(list(FAULTS), len(FAULTS)):
                began = time.monotonic()
                self._fault = fault
                self.faults[fault] += 1
                await FAULTS[fault](self._target, self._draw)
                await asyncio.sleep(max(0.0, began + self._given.every - time.monotonic()))

    async def _kill_gateways(self) -> None:
        for _ in range(self._given.gateway_kills):
            await asyncio.sleep(60 * self._given.minutes / (self._given.gateway_kills + 1))
            self._gateway_kills.append(time.monotonic())
            self._target.gateway.send(signal.SIGKILL)


async def run(given: argparse.Namespace) -> dict[str, Any]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with running_target() as target, aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await until_ready(session, target.port)
        storm = Storm(target, session, given)
        await storm.run()
        return {"faults": dict(storm.faults), "clients": {name: counts.report() for name, counts in storm.counts.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--gateway-kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = asyncio.run(run(given))
    print(json.dumps(found, indent=1))
    write_json(Path(RESULTS / "chaos.json"), {"environment": asdict(environment()), "arguments": vars(given), **found})


if __name__ == "__main__":
    main()
