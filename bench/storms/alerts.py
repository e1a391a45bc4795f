"""Makes faults real on a live deployment, one after another, and times the shipped alerts: from fault to firing, then to silence.

    PYTHONPATH=tests/support python -m bench.storms.alerts [FAULT ...]        (`make servers` installs Prometheus and ClickHouse)
        -> bench/results/storms/alerts.json

`headrace serve` with the bundled model, a small KV cache, budgets, and ClickHouse for usage records; Prometheus scrapes it each second. Its
rules are the shipped ones, in which SHORTENED replaces what would take longer than a fault lasts. A fault ends when its alerts fire, or
after FAULT_S; the next one begins when none fires. A full run takes about ten minutes.

pending_s, firing_s  from the begin of the fault; pending_s is null for an alert without `for`
silent_s             from the end of the fault; null: it still fired after FAULT_S
others               alerts that fired too, by fault
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from clickhouse_kit import ClickHouseServer
from prometheus_kit import RULES, Prometheus
from server_kit import Server, serving

from bench.storms.common import write_result
from bench.storms.failover import MODEL, ask
from headrace.core.strict_decode import plain
from headrace.lab.environment import environment

FAULT_S = 240.0
SHORTENED = {r"\b(5|10)m\b": "30s", r"\b16777216\b": "16384"}
"""In the copy of the rules. Windows and waits of 1, 2, 15 and 30 minutes and of hours stay as they are."""
NUM_CLIENTS = 120
LOG_CLIENTS = 8
ENGINE = {"model": MODEL, "max_model_len": 512, "max_num_seqs": 32, "num_kv_blocks": 288, "num_threads": 1}
"""32 sequences of `failover.ask` need about 480 KV blocks. In an overload about `max_num_seqs` sequences wait; more are refused."""
HUGE_BUDGET = 1e6
FIFO_READ_BYTES = 1 << 16


@dataclass(slots=True)
class Site:
    server: Server
    prometheus: Prometheus
    clickhouse: ClickHouseServer
    log: LogReader
    config: dict[str, Any]
    session: aiohttp.ClientSession

    async def reload(self, daily_budget: float) -> None:
        self.config["gateway"]["limits"]["daily_budget"] = daily_budget
        (self.server.folder / "config.yaml").write_text(json.dumps(self.config))
        self.server.process.send_signal(signal.SIGHUP)
        await self.server.eventually(lambda: self.server.metric("headrace_budget") == daily_budget)

    async def ask_briefly(self) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
        with suppress(aiohttp.ClientError):
            async with self.session.post(f"http://127.0.0.1:{self.server.port}/v1/chat/completions", json=body) as reply:
                await reply.read()

    async def ask_for_nothing(self) -> None:
        """Of a path that there is not: a line in the log, and little work."""
        async with self.session.get(f"http://127.0.0.1:{self.server.port}/v1/nothing") as reply:
            await reply.read()


class LogReader:
    """Reads the request log from a FIFO, until it is stopped and again when it goes on."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.is_stopped = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            with suppress(BlockingIOError):
                while not self.is_stopped and os.read(self._fd, FIFO_READ_BYTES):
                    pass


@asynccontextmanager
async def repeated(num_clients: int, request: Callable[[], Awaitable[object]], pause_s: float = 0.0) -> AsyncIterator[None]:
    """Clients that ask again and again inside the block."""

    async def client() -> None:
        while True:
            await request()
            await asyncio.sleep(pause_s)

    tasks = [asyncio.create_task(client()) for _ in range(num_clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def overload(site: Site) -> AbstractAsyncContextManager[None]:
    return repeated(NUM_CLIENTS, lambda: ask(site.session, site.server.port, "sampled", 0), pause_s=1.0)


@asynccontextmanager
async def engine_stopped(site: Site) -> AsyncIterator[None]:
    with site.server.stopped("e0"):
        async with repeated(4, site.ask_briefly, pause_s=1.0):
            yield


@asynccontextmanager
async def gateway_stopped(site: Site) -> AsyncIterator[None]:
    with site.server.stopped("gateway"):
        yield


@asynccontextmanager
async def log_unread(site: Site) -> AsyncIterator[None]:
    site.log.is_stopped = True
    try:
        async with repeated(LOG_CLIENTS, site.ask_for_nothing):
            yield
    finally:
        site.log.is_stopped = False


@asynccontextmanager
async def clickhouse_gone(site: Site) -> AsyncIterator[None]:
    site.clickhouse.stop()
    async with repeated(4, site.ask_briefly, pause_s=0.2):
        yield
    await asyncio.to_thread(site.clickhouse.start)


@asynccontextmanager
async def budget_used(site: Site) -> AsyncIterator[None]:
    await site.ask_briefly()
    await site.server.eventually(lambda: site.server.metric("headrace_budget_used") > 0)
    await site.reload(round(site.server.metric("headrace_budget_used") / 0.95, 9))
    yield
    await site.reload(HUGE_BUDGET)


@dataclass(frozen=True, slots=True)
class Fault:
    what: str
    alerts: tuple[str, ...]
    made: Callable[[Site], AbstractAsyncContextManager[None]]


FAULTS = {
    "overload": Fault(
        f"{NUM_CLIENTS} clients of an engine that runs 32 sequences and has KV blocks for 19",
        ("HeadraceTtftHigh", "HeadraceQueueLong", "HeadraceKvCacheFull", "HeadracePreemptions"),
        overload,
    ),
    "engine": Fault(
        "the only engine stopped (SIGSTOP), 4 requests a second",
        ("HeadraceNoReadyReplica", "HeadraceErrorsHigh", "HeadraceErrorBudgetFastBurn"),
        engine_stopped,
    ),
    "gateway": Fault("the gateway stopped (SIGSTOP)", ("HeadraceGatewayDown",), gateway_stopped),
    "budget": Fault("95 % of the day's budget used", ("HeadraceBudgetNearlyUsed",), budget_used),
    "log": Fault("what reads the request log stopped", ("HeadraceRequestLogLoss",), log_unread),
    "clickhouse": Fault("ClickHouse killed, requests go on", ("HeadraceUsageLag",), clickhouse_gone),
}


class Watch:
    """When each alert was seen pending, firing and gone, in seconds since the watch began."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self._began = time.monotonic()
        self.first: dict[tuple[str, str], float] = {}
        self.last: dict[str, float] = {}

    @property
    def firing(self) -> set[str]:
        return {alert for alert, state in self.first if state == "firing"}

    async def until(self, condition: Callable[[set[str]], bool]) -> set[str]:
        """Look until `condition` holds for the alerts that fire now, or FAULT_S have passed. Returns those that fire then."""
        begin = self.now()
        while True:
            firing = set()
            for alert in (await asyncio.to_thread(self._prometheus.get, "alerts"))["alerts"]:
                name = alert["labels"]["alertname"]
                self.first.setdefault((name, alert["state"]), self.now())
                if alert["state"] == "firing":
                    firing.add(name)
                    self.last[name] = self.now()
            if condition(firing) or self.now() - begin > FAULT_S:
                return firing
            await asyncio.sleep(0.25)

    def now(self) -> float:
        return time.monotonic() - self._began


async def shown(site: Site, name: str) -> dict[str, Any]:
    fault, watch = FAULTS[name], Watch(site.prometheus)
    async with fault.made(site):
        await watch.until(lambda _: watch.firing >= set(fault.alerts))
        ended_at = watch.now()
    still = await watch.until(lambda firing: not firing)
    found: dict[str, Any] = {"fault": fault.what, "lasted_s": round(ended_at, 1), "alerts": {}}
    for alert in fault.alerts:
        pending, firing = (watch.first.get((alert, state)) for state in ("pending", "firing"))
        last = watch.last.get(alert)
        found["alerts"][alert] = {
            "pending_s": _rounded(pending),
            "firing_s": _rounded(firing),
            "silent_s": _rounded(last - ended_at) if last is not None and alert not in still else None,
        }
    return found | {"others": sorted(watch.firing - set(fault.alerts))}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds), 1)


def shortened_rules(folder: Path) -> tuple[Path, ...]:
    copies = []
    for file in RULES:
        text = file.read_text()
        for pattern, replacement in SHORTENED.items():
            text = re.sub(pattern, replacement, text)
        copies.append(folder / file.name)
        copies[-1].write_text(text)
    return tuple(copies)


def configuration(clickhouse: ClickHouseServer, log: Path) -> dict[str, Any]:
    """`hang_timeout_s` of 0: what stands still stays so, as a process that the supervisor cannot help."""
    return {
        "models": [{"engine": ENGINE}],
        "gateway": {"request_log": str(log), "limits": {"daily_budget": HUGE_BUDGET}},
        "prices": {MODEL: {"input": 1.0, "output": 1.0}},
        "usage": {"clickhouse": plain(clickhouse.config)},
        "hang_timeout_s": 0,
    }


async def run(names: Iterable[str], stack: ExitStack) -> dict[str, Any]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-alerts-")))
    clickhouse = ClickHouseServer(folder / "clickhouse")
    clickhouse.start()
    stack.callback(clickhouse.stop)
    log = LogReader(folder / "requests.fifo")
    config = configuration(clickhouse, folder / "requests.fifo")
    server = stack.enter_context(serving(config))
    prometheus = Prometheus(folder, server.port, shortened_rules(folder))
    stack.callback(prometheus.stop)
    found = {}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        site = Site(server, prometheus, clickhouse, log, config, session)
        reading = asyncio.create_task(log.run())
        await server.eventually(lambda: bool(prometheus.series("headrace_replica_ready == 1")))
        for name in names:
            found[name] = await shown(site, name)
            print(name, json.dumps(found[name]), flush=True)
        reading.cancel()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", choices=[*FAULTS, []], metavar="FAULT", help=f"some of {', '.join(FAULTS)}; all without one")
    given = parser.parse_args()
    before = environment()
    with ExitStack() as stack:
        found = asyncio.run(run(given.faults or FAULTS, stack))
    if not given.faults:
        write_result("alerts", {"environment": asdict(before), "shortened": SHORTENED, **found})


if __name__ == "__main__":
    main()
