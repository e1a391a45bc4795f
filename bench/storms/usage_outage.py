"""Sends requests through a gateway whose ClickHouse is gone for minutes: what do they notice, and is their usage there afterwards?

A real gateway process ships its usage to Debian's ClickHouse and answers from a paced fake engine. Requests come at a fixed rate (open
loop) before, while and after the server is away: it hangs for the first half of that time, then it is killed, then it is started again.
Every request that was answered must be in ClickHouse once (FINAL) at the end. Latency is from when a request was due to the end of its
answer, so that a gateway that stands still is seen in all that came meanwhile.

    PYTHONPATH=tests/support python -m bench.storms.usage_outage --down-s 120 [--rate 20] [--record]
        -> bench/results/storms/usage-outage.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from bench.storms.common import RESULTS
from bench.storms.usage_archive import ids_in_clickhouse
from headrace.core.strict_decode import plain
from headrace.lab.environment import environment
from headrace.lab.report import write_json

BODY = {"model": "fox", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
FAKE = {"vocab_size": 345, "step_seconds": 0.002}
DRAIN_S = 60.0


class Load:
    """Requests at a fixed rate. answered: their ids;  latencies_s: by phase, in the order of their ends"""

    def __init__(self, session: aiohttp.ClientSession, url: str, rate: float) -> None:
        self._session, self._url, self._rate = session, f"{url}/v1/chat/completions", rate
        self.answered: list[str] = []
        self.num_failed = 0
        self.latencies_s: dict[str, list[float]] = {}

    async def run(self, phase: str, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        async with asyncio.TaskGroup() as group:
            for number in range(int(seconds * self._rate)):
                due = began + number / self._rate
                await asyncio.sleep(max(0.0, due - clock()))
                group.create_task(self._ask(phase, due))

    async def _ask(self, phase: str, due: float) -> None:
        async with self._session.post(self._url, json=BODY) as answer:
            await answer.read()
            if answer.status != 200:
                self.num_failed += 1
                return
        self.answered.append(answer.headers["x-request-id"])
        self.latencies_s.setdefault(phase, []).append(asyncio.get_running_loop().time() - due)


def percentiles_ms(latencies_s: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(latencies_s, n=100)
    return {"requests": len(latencies_s), "p50_ms": round(cuts[49] * 1000, 2), "p99_ms": round(cuts[98] * 1000, 2)}


async def storm(url: str, server: Any, *, rate: float, quiet_s: float, down_s: float) -> Load:
    """quiet_s: before and after"""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        load = Load(session, url, rate)
        await load.run("warm-up", 5.0)
        await load.run("before", quiet_s)
        server.hang()
        await load.run("hangs", down_s / 2)
        server.stop()
        await load.run("killed", down_s / 2)
        await asyncio.to_thread(server.start)
        await load.run("after", quiet_s)
    return load


def ids_in_time(server: Any, expected: set[str]) -> list[str]:
    """Rows as FINAL shows them, once all are there; after DRAIN_S those that are."""
    deadline = time.monotonic() + DRAIN_S
    while not expected <= set(found := ids_in_clickhouse(server.config)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def run_storm(*, rate: float, quiet_s: float, down_s: float) -> dict[str, object]:
    import text_kit
    from clickhouse_kit import ClickHouseServer
    from gateway_processes import site

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp")))
        server = ClickHouseServer(folder / "clickhouse")
        server.start()
        stack.callback(server.stop)
        state = folder / "state"
        state.mkdir(mode=0o700)
        changes: dict[str, Any] = {"state": str(state), "usage": {"clickhouse": plain(server.config)}, "prices": {"fox": {"output": 1.0}}}
        running = stack.enter_context(site(folder, text_kit.save_byte_level(folder / "model"), FAKE, **changes))
        load = asyncio.run(storm(running.url, server, rate=rate, quiet_s=quiet_s, down_s=down_s))
        expected = set(load.answered)
        found = ids_in_time(server, expected)
        phases = {phase: percentiles_ms(latencies) for phase, latencies in load.latencies_s.items() if phase != "warm-up"}
        return {
            "answered": len(expected),
            "failed": load.num_failed,
            "phases": phases,
            "clickhouse": {"lost": len(expected - set(found)), "duplicates": len(found) - len(set(found))},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--quiet-s", type=float, default=60.0, help="seconds before, and after")
    parser.add_argument("--down-s", type=float, default=120.0, help="seconds for which ClickHouse is away")
    parser.add_argument("--record", action="store_true", help=f"write the result to {RESULTS}")
    options = parser.parse_args()
    result = run_storm(rate=options.rate, quiet_s=options.quiet_s, down_s=options.down_s)
    print(json.dumps(result, indent=2))
    if options.record:
        write_json(RESULTS / "usage-outage.json", {"environment": asdict(environment()), "arguments": vars(options), **result})


if __name__ == "__main__":
    main()
