"""Checks that every stream ends, unbroken and at an engine that can be reached, while the links between a gateway and its engines
are bad.

    python -m bench.storms.network [--engines 4] [--streams 12] [--seconds 24] [--faults NAME ...] [--fake] [--namespaces]
        -> bench/results/storms/network.json

A gateway reaches each engine over TLS through a link of its own (`bench.network_faults`). `--streams` streams run at any time; their
answers without a fault are known. Each fault (`FAULTS`) is on the first engine's link, or on all where its name says so, for `--seconds`,
and then for a while it is healed. With `--namespaces` each engine and the gateway are in network namespaces of their own, as root, and
the kernel drops packets (`bench.storms.namespaces`).

failed               streams without a whole answer, by what their client saw
different            streams whose answer is another one than without a fault: a token that is lost, repeated or changed
gap_s, first_s       longest silence within a stream; time to its first token
late_at_dead         streams that began more than DEAD_AFTER_S after the link was cut and waited over LATE_S for their first token: they
                     went to an engine that no request can reach. Of faults that cut the link for good
healthy_not_ready    share of the looks at /ready that found an engine with a good link not ready
back_s               from the heal until the gateway calls every engine ready again
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.network_faults import CUT, HEALTHY, Direction, FaultyLink, LinkFault
from bench.storms.common import RESULTS
from bench.storms.failover import SEEDS, Answer, ask, kinds, quantiles
from bench.storms.linked import Link, Linked, linked
from bench.storms.namespaces import has_netem, why_not_usable
from headrace.lab.environment import environment
from headrace.lab.report import write_json

DEAD_AFTER_S = 2.0
"""A request that begins later than this after a link was cut must not go there."""
LATE_S = 1.0
LOOK_S = 0.1
HEALED_S = 12.0
"""Seconds within which every engine must be ready again once its link is good."""
FAKE_KINDS = ("greedy", "sampled", "n", "logprobs", "penalties")
"""Kinds of requests that a fake engine answers: it follows no grammar."""

Driver = Callable[[Link, float], Awaitable[None]]


async def flapping(link: Link, seconds: float) -> None:
    """Gone for a second, back for two: connections are broken off, and new ones are refused."""
    assert isinstance(link, FaultyLink)
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        link.refuses = True
        link.reset()
        await asyncio.sleep(1.0)
        link.refuses = False
        await asyncio.sleep(2.0)


def steady(fault: LinkFault, *directions: Direction) -> Driver:
    """The same fault for the whole time."""

    async def drive(link: Link, seconds: float) -> None:
        link.set(fault, *directions)
        await asyncio.sleep(seconds)
        link.set(HEALTHY)

    return drive


@dataclass(frozen=True, slots=True)
class Fault:
    """drive: changes a link, and heals it when its time is over. is_dead: nothing that is sent arrives. on_all: every link has it."""

    drive: Driver
    is_dead: bool = False
    on_all: bool = False


LOSS, DELAY = LinkFault(loss=0.3), LinkFault(delay_s=0.5)
FAULTS: dict[str, Fault] = {
    "flapping": Fault(flapping),
    "loss": Fault(steady(LOSS)),
    "loss_on_all": Fault(steady(LOSS), on_all=True),
    "delay": Fault(steady(DELAY)),
    "delay_on_all": Fault(steady(DELAY), on_all=True),
    "cut_to_engine": Fault(steady(CUT, Direction.TO_SERVER), is_dead=True),
    "cut_to_gateway": Fault(steady(CUT, Direction.TO_CLIENT), is_dead=True),
    "cut": Fault(steady(CUT), is_dead=True),
}


@dataclass
class Seen:
    """What happened while one fault was on. looks: replica -> how often it was looked at, and how often it was not ready."""

    began_at: float
    done: list[tuple[str, int, Answer]] = field(default_factory=list)
    looks: dict[str, list[int]] = field(default_factory=dict)
    back_s: float | None = None


class Load:
    """Streams at any time, each compared with its answer without a fault."""

    def __init__(self, linked: Linked, session: aiohttp.ClientSession, names: tuple[str, ...], seed: int) -> None:
        self._linked, self._session, self._names = linked, session, names
        self._draw = random.Random(seed)
        self.unbroken: dict[tuple[str, int], Answer] = {}

    async def ask(self, kind: str, seed: int) -> Answer:
        gateway = self._linked.gateway
        return await ask(self._session, gateway.port, kind, seed, host=gateway.place.host)

    async def learn(self) -> None:
        """Raises SystemExit where a stream fails without any fault."""
        asked = list(itertools.product(self._names, range(SEEDS)))
        answers = await asyncio.gather(*(self.ask(kind, seed) for kind, seed in asked))
        self.unbroken = dict(zip(asked, answers, strict=True))
        broken = {key: answer.error for key, answer in self.unbroken.items() if answer.error}
        if broken:
            raise SystemExit(f"without any fault: {broken}")

    async def run(self, num_streams: int, seen: Seen, is_over: asyncio.Event) -> None:
        """`num_streams` at a time until `is_over`; returns when the last one has ended."""

        async def client() -> None:
            while not is_over.is_set():
                kind, seed = self._draw.choice(self._names), self._draw.randrange(SEEDS)
                seen.done.append((kind, seed, await self.ask(kind, seed)))

        await asyncio.gather(*(client() for _ in range(num_streams)))


async def look(linked: Linked, session: aiohttp.ClientSession) -> dict[str, bool]:
    """Replica -> whether the gateway calls it ready."""
    async with session.get(f"{linked.url}/ready") as response:
        return {row["replica"]: row["ok"] for row in (await response.json())["replicas"]}


async def under(fault: Fault, linked: Linked, load: Load, session: aiohttp.ClientSession, num_streams: int, seconds: float) -> Seen:
    """One fault from its beginning until the links are good and every engine is ready."""
    bad = dict(linked.links if fault.on_all else itertools.islice(linked.links.items(), 1))
    seen, is_over = Seen(time.monotonic()), asyncio.Event()

    async def watch() -> None:
        while True:
            for replica, is_ready in (await look(linked, session)).items():
                counts = seen.looks.setdefault(replica, [0, 0])
                counts[0] += 1
                counts[1] += not is_ready
            await asyncio.sleep(LOOK_S)

    running = asyncio.create_task(load.run(num_streams, seen, is_over))
    watching = asyncio.create_task(watch())
    await asyncio.gather(*(fault.drive(link, seconds) for link in bad.values()))
    watching.cancel()
    healed_at = time.monotonic()
    while seen.back_s is None and time.monotonic() - healed_at < HEALED_S:
        await asyncio.sleep(LOOK_S)
        if all((await look(linked, session)).values()):
            seen.back_s = time.monotonic() - healed_at
    is_over.set()
    await running
    seen.looks = {replica: counts for replica, counts in seen.looks.items() if replica not in bad}
    return seen


def summary(fault: Fault, seen: Seen, unbroken: dict[tuple[str, int], Answer]) -> dict[str, Any]:
    whole = [(kind, seed, answer) for kind, seed, answer in seen.done if not answer.error]
    first = [answer.first_at - answer.began_at for _, _, answer in whole]
    late = [
        answer
        for _, _, answer in seen.done
        if answer.began_at > seen.began_at + DEAD_AFTER_S and answer.first_at - answer.began_at > LATE_S and fault.is_dead
    ]
    num_looks, num_not_ready = (sum(column) for column in zip((0, 0), *seen.looks.values(), strict=False))
    return {
        "streams": len(seen.done),
        "failed": dict(Counter(f"{kind}: {answer.error}" for kind, _, answer in seen.done if answer.error)),
        "different": dict(Counter(kind for kind, seed, answer in whole if answer.parts != unbroken[kind, seed].parts)),
        "gap_s": quantiles([answer.gap_s for _, _, answer in whole]),
        "first_s": quantiles(first),
        "late_at_dead": len(late),
        "healthy_not_ready": round(num_not_ready / num_looks, 4) if num_looks else None,
        "back_s": None if seen.back_s is None else round(seen.back_s, 2),
    }


def broken_promises(summaries: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What breaks a promise, one line each."""
    for name, found in summaries.items():
        for key in ("failed", "different", "late_at_dead"):
            if found[key]:
                yield f"{name}: {key} {found[key]}"
        if (found["healthy_not_ready"] or 0.0) > 0.1:
            yield f"{name}: engines with good links were not ready for {found['healthy_not_ready']:.0%} of the time"
        if found["back_s"] is None:
            yield f"{name}: an engine was not ready within {HEALED_S:g} s after its link was good again"


async def storm(
    names: list[str], *, num_engines: int, num_streams: int, seconds: float, is_fake: bool, in_namespaces: bool = False, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Fault -> its summary."""
    found = {}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with (
        linked(num_engines, is_fake=is_fake, in_namespaces=in_namespaces) as site,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
    ):
        load = Load(site, session, FAKE_KINDS if is_fake else tuple(kinds()), seed)
        await load.learn()
        for name in names:
            seen = await under(FAULTS[name], site, load, session, num_streams, seconds)
            found[name] = summary(FAULTS[name], seen, load.unbroken)
            print(name, json.dumps(found[name]), flush=True)
    return found


def faults_of_namespaces() -> list[str]:
    """Names of the faults that packets between namespaces can have here. Raises SystemExit where there are none."""
    if reason := why_not_usable():
        raise SystemExit(reason)
    cuts = [name for name, fault in FAULTS.items() if fault.is_dead]
    return [*cuts, "loss", "loss_on_all", "delay", "delay_on_all"] if has_netem() else cuts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS))
    parser.add_argument("--namespaces", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fake", action="store_true")
    given = parser.parse_args()
    names = given.faults or (faults_of_namespaces() if given.namespaces else list(FAULTS))
    sizes = {"num_engines": given.engines, "num_streams": given.streams, "seconds": given.seconds, "seed": given.seed}
    found = asyncio.run(storm(names, **sizes, is_fake=given.fake, in_namespaces=given.namespaces))
    broken = list(broken_promises(found))
    print("\n".join(broken) or "every promise was kept")
    path = Path(RESULTS / f"network{'-fake' if given.fake else ''}{'-namespaces' if given.namespaces else ''}.json")
    write_json(path, {"environment": asdict(environment()), "arguments": vars(given), "faults": found, "broken": broken})


if __name__ == "__main__":
    main()
