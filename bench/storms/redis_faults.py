"""Measures two gateways over one Redis server that fails in every way it can, under load: what clients get, how long they wait, what is
lost.

    python -m bench.storms.redis_faults [--rounds 3] [--fault-s 5] [--heal-s 8] [--faults down stopped ...]
        -> bench/results/storms/redis-faults.json

The gateways have keys in the store, limits and a monthly budget, the response cache, sessions, Idempotency-Keys and kept streams on; a fake
engine answers. Each gateway reaches the server over a link of its own. The server writes its log of changes to the disk.

down       killed (SIGKILL), started again after the fault's time
restarted  ended in order and started again at once
stopped    SIGSTOP
half_open  the links swallow everything; connections stay
slow       each answer comes 120 ms late, so that two calls are within what a request waits and three are not
READONLY   made a replica of a server that is not there
OOM        maxmemory 1 with noeviction
FLUSHALL   everything is gone at once

Callers (`CALLERS`), each at both gateways. `free` and `cached` have no limits and must get every answer. `limited` must get 503 while its
limits cannot be counted, `session` and `idempotent` while theirs cannot be kept; nothing else is allowed.

unexpected  answers with another status than these, and answers of `free` and `cached` that are not 200
waited      of the gateways' headrace_store_wait_seconds: generating requests, those above 250 and above 300 ms, all and by fault
latency_ms  at the client, of requests that began during the fault: the worst of each caller
healed_s    from the fault's end to the beginning of the first request that was answered 200: the worst of each caller
failed_later  requests that failed after that
lost        turns of sessions that were answered and are not in their session; tokens that were answered and are not charged
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.network_faults import CUT, HEALTHY, FaultyLink, LinkFault
from bench.storms.by_hand import MODEL, SOURCE, HandStarted, HandStartedSite, free_port, site_by_hand
from bench.storms.common import RESULTS, redis_program
from headrace.gateway.access.principal import Principal
from headrace.gateway.limits.redis import RedisLimits
from headrace.gateway.limits.rules import rules_of
from headrace.gateway.stores.redis import open_redis
from headrace.lab.environment import environment
from headrace.lab.report import write_json
from headrace.policy.limits.tier import Tier

FAULTS = ("down", "restarted", "stopped", "half_open", "slow", "READONLY", "OOM", "FLUSHALL")
FORGETS = ("FLUSHALL",)
"""Faults after which the server has lost what it held."""

OVER_AT_ONCE = ("FLUSHALL", "restarted")
"""Faults that are over when `fault`'s block begins."""

CALLERS = {
    "free": (200,),
    "cached": (200,),
    "stream": (200,),
    "limited": (200, 503),
    "stored_key": (200, 503),
    "session": (200, 409, 503),
    "idempotent": (200, 409, 503),
}
"""Caller -> the statuses that it may get. 409: an earlier turn, or the first request under the key, still has its claim."""

TURNS = 20
"""Turns of one session; then the caller begins another one. So no session outgrows the model's context."""

PAUSE_S = 0.1
"""Seconds between two requests of one caller."""

LIMITS = {"requests_per_minute": 1_000_000, "monthly_tokens": 1_000_000_000, "max_concurrent_requests": 1000}
METERED = Tier(**LIMITS)  # type: ignore[arg-type]
SLOW = LinkFault(delay_s=0.06)
STEADY_S = 3.0
"""Seconds of load before a fault."""

CHARGED_S = 30.0
"""Seconds within which nothing is held for a caller without requests: an unnamed reservation is charged after ten beats."""

REQUEST_TIMEOUT_S = 20.0
SERVER_START_S = 20.0


@dataclass(frozen=True, slots=True)
class SeenAnswer:
    """One request. began: on the monotonic clock; status 0: the connection broke or nothing came"""

    caller: str
    began: float
    latency_s: float
    status: int
    port: int
    tokens: int = 0


@dataclass(slots=True)
class FaultReport:
    """What one fault did, as the module's docstring names it."""

    fault: str
    requests: int = 0
    statuses: dict[str, dict[int, int]] = field(default_factory=dict)
    unexpected: int = 0
    waited: dict[str, int] = field(default_factory=dict)
    latency_ms: dict[str, float] = field(default_factory=dict)
    healed_s: dict[str, float] = field(default_factory=dict)
    failed_later: int = 0
    lost_turns: int = 0
    lost_tokens: int = 0


# -- the server ------------------------------------------------------------------------------------------------------------------------


class FaultyRedis:
    """A server on a loopback port, and the faults that it can have."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        command = [redis_program(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen([*command, "--appendonly", "yes"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        async with asyncio.timeout(SERVER_START_S):
            while not await self._answers():
                await asyncio.sleep(0.01)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(number)
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def ask(self, *words: str) -> bytes:
        """The first line of the answer. Raises OSError."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words))
            return await reader.readline()
        finally:
            writer.close()

    async def _answers(self) -> bool:
        try:
            return (await self.ask("PING")).startswith(b"+PONG")
        except OSError:
            return False


@asynccontextmanager
async def fault(name: str, server: FaultyRedis, links: Sequence[FaultyLink]) -> AsyncIterator[None]:
    """The server fails in the block, and works again after it."""
    commands = {
        "READONLY": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        "OOM": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        "FLUSHALL": (("FLUSHALL",), ("PING",)),
    }
    if name in commands:
        begin, end = commands[name]
        await server.ask(*begin)
        yield
        await server.ask(*end)
    elif name in ("half_open", "slow"):
        for link in links:
            link.set(CUT if name == "half_open" else SLOW)
        yield
        for link in links:
            link.set(HEALTHY)
    elif name == "stopped":
        server.signal(signal.SIGSTOP)
        yield
        server.signal(signal.SIGCONT)
    elif name == "restarted":
        server.end(signal.SIGTERM)
        await server.start()
        yield
    else:
        server.end()
        yield
        await server.start()


# -- the load --------------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Load:
    """Callers of one round at all gateways. keys: by caller"""

    ports: Sequence[int]
    keys: dict[str, str]
    round_name: str
    answers: list[SeenAnswer] = field(default_factory=list)
    turns: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            await asyncio.gather(*(self._call(client, port, caller) for port in self.ports for caller in CALLERS))

    async def _call(self, client: aiohttp.ClientSession, port: int, caller: str) -> None:
        number = 0
        while not self.is_over:
            number += 1
            body, headers = self._request(caller, number, port)
            seen = await self._answered(client, port, caller, body, headers)
            self.answers.append(seen)
            if caller == "session" and seen.status == 200:
                self.turns[headers["x-session-id"]] += 1
            await asyncio.sleep(PAUSE_S)

    def _request(self, caller: str, number: int, port: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Body and headers. Prompts of `cached` repeat; two requests of `idempotent` have one key."""
        name = number % 10 if caller == "cached" else number
        text = f"{caller} {name} at {port}" if caller != "session" else f"turn {number}"
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
        headers = {"authorization": f"Bearer {self.keys[caller]}"}
        if caller == "cached":
            body |= {"temperature": 0, "cache": True}
        if caller == "stream":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if caller == "session":
            headers["x-session-id"] = f"{self.round_name}-{port}-{number // TURNS}"
        if caller == "idempotent":
            body["messages"][0]["content"] = f"idempotent {number // 2}"
            headers["idempotency-key"] = f"{self.round_name}-{port}-{number // 2}"
        return body, headers

    async def _answered(
        self, client: aiohttp.ClientSession, port: int, caller: str, body: dict[str, Any], headers: dict[str, str]
    ) -> SeenAnswer:
        began = time.monotonic()
        status, tokens = 0, 0
        try:
            async with client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, headers=headers) as answer:
                text = await answer.text()
                status = answer.status
                tokens = json.loads(text)["usage"]["total_tokens"] if status == 200 and not body.get("stream") else 0
                if body.get("stream") and status == 200 and not text.rstrip().endswith("[DONE]"):
                    status = 0
        except (aiohttp.ClientError, TimeoutError):
            status = 0
        return SeenAnswer(caller, began, time.monotonic() - began, status, port, tokens)


# -- one round -------------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RedisSite:
    """Everything that runs. url: of the server itself"""

    server: FaultyRedis
    links: Sequence[FaultyLink]
    gateways: Sequence[HandStarted]
    config: Path

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server.port}/0"

    async def round(self, name: str, number: int, *, fault_s: float, heal_s: float) -> FaultReport:
        tenant = f"limited-{name}-{number}"
        keys = {caller: config_key("free") for caller in CALLERS}
        keys |= {"limited": config_key(tenant), "stored_key": await asyncio.to_thread(self._create_key)}
        load = Load([gateway.port for gateway in self.gateways], keys, f"{name}-{number}")
        before = [await asyncio.to_thread(_waits, gateway) for gateway in self.gateways]
        running = asyncio.create_task(load.run())
        await asyncio.sleep(STEADY_S)
        began = time.monotonic()
        async with fault(name, self.server, self.links):
            ended = time.monotonic()  # of the faults that are over by now
            await asyncio.sleep(fault_s)
        if name not in OVER_AT_ONCE:
            ended = time.monotonic()
        await asyncio.sleep(heal_s)
        load.is_over = True
        await running
        report = _reported(name, load, began, ended)
        after = [await asyncio.to_thread(_waits, gateway) for gateway in self.gateways]
        report.waited = {key: sum(new[key] - old[key] for old, new in zip(before, after, strict=True)) for key in after[0]}
        if name not in FORGETS:
            report.lost_turns = await self._lost_turns(load)
            report.lost_tokens = await self._lost_tokens(load, tenant)
        return report

    def _create_key(self) -> str:
        words = ["keys", "create", "--tenant", "stored", "--tier", "metered", "--config", str(self.config), "--json"]
        done = subprocess.run([*self.gateways[0].command[:4], *words], check=True, capture_output=True, env=_environ())
        made: str = json.loads(done.stdout)["key"]
        return made

    async def _lost_turns(self, load: Load) -> int:
        """Turns that were answered and are not in their session."""
        lost = 0
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {config_key('free')}"}) as client:
            for session_id, num_turns in load.turns.items():
                async with client.get(f"http://127.0.0.1:{load.ports[0]}/v1/sessions/{session_id}") as answer:
                    messages = (await answer.json())["messages"] if answer.status == 200 else []
                    lost += max(0, num_turns - sum(message["role"] == "assistant" for message in messages))
        return lost

    async def _lost_tokens(self, load: Load, tenant: str) -> int:
        """Tokens that `limited` got and that are not charged, once nothing of it is open."""
        caller, answered = Principal(tenant=tenant, tier=METERED), sum(seen.tokens for seen in load.answers if seen.caller == "limited")
        store = RedisLimits(open_redis(self.url))
        try:
            async with asyncio.timeout(CHARGED_S):
                while True:
                    result = await store.take(None, [rule.claim(None) for rule in rules_of(caller)])
                    used = {rule.name: read.current for rule, read in zip(rules_of(caller), result.readings, strict=True)}
                    if not used["max_concurrent_requests"]:
                        return max(0, answered - used["monthly_tokens"])
                    await asyncio.sleep(0.5)
        finally:
            await store.close()


def _reported(name: str, load: Load, began: float, ended: float) -> FaultReport:
    report = FaultReport(name, requests=len(load.answers))
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    healed: dict[tuple[str, int], float] = {}
    for seen in load.answers:
        counts[seen.caller][seen.status] += 1
        allowed = (*CALLERS[seen.caller], 401) if name in FORGETS and seen.caller == "stored_key" else CALLERS[seen.caller]
        report.unexpected += seen.status not in allowed
        is_during = began <= seen.began <= max(ended, began + 1.0)
        if is_during:
            report.latency_ms[seen.caller] = max(report.latency_ms.get(seen.caller, 0.0), round(1000 * seen.latency_s, 1))
        if seen.began > ended and seen.status == 200 and (seen.caller, seen.port) not in healed:
            healed[seen.caller, seen.port] = round(seen.began - ended, 2)
        report.failed_later += (seen.caller, seen.port) in healed and seen.status not in (200, 401)
    for (caller, _), seconds in healed.items():
        report.healed_s[caller] = max(report.healed_s.get(caller, 0.0), seconds)
    report.statuses = {caller: dict(sorted(found.items())) for caller, found in counts.items()}
    return report


def _waits(gateway: HandStarted) -> dict[str, int]:
    """Generating requests by what they waited for stores, so far."""
    address = f"http://127.0.0.1:{gateway.port}/metrics"
    with urlopen(Request(address, headers={"authorization": f"Bearer {config_key('reader')}"})) as answer:
        text = answer.read().decode()
    counts: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        if family.name == "headrace_store_wait_seconds":
            counts = {sample.labels["le"]: int(sample.value) for sample in family.samples if sample.name.endswith("_bucket")}
    total = counts["+Inf"]
    return {"requests": total, "above_250_ms": total - counts["0.25"], "above_300_ms": total - counts["0.3"]}


# -- the site --------------------------------------------------------------------------------------------------------------------------


def config_key(tenant: str) -> str:
    return f"hr-storm-key-of-{tenant}"


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE)}


@asynccontextmanager
async def redis_site(site: HandStartedSite, tenants: Sequence[str]) -> AsyncIterator[RedisSite]:
    """tenants: with limits, of keys in the configuration"""
    server = FaultyRedis(site.folder)
    await server.start()
    try:
        engine = site.engine("e0", fake={"step_seconds": 0.005})
        await asyncio.to_thread(engine.wait_serving)
        async with FaultyLink("127.0.0.1", server.port) as one, FaultyLink("127.0.0.1", server.port) as other:
            gateways = [_gateway(site, f"g{number}", engine, link.port, tenants) for number, link in enumerate((one, other))]
            for gateway in gateways:
                await asyncio.to_thread(gateway.wait_ready)
            yield RedisSite(server, (one, other), gateways, site.folder / "g0.yaml")
    finally:
        server.end()


def _gateway(site: HandStartedSite, name: str, engine: HandStarted, redis_port: int, tenants: Sequence[str]) -> HandStarted:
    keys = [{"key": config_key("free"), "tenant": "free"}, {"key": config_key("reader"), "tenant": "free", "role": "reader"}]
    keys += [{"key": config_key(tenant), "tenant": tenant, "tier": "metered"} for tenant in tenants]
    return site.gateway(
        name,
        {"e0": engine.address},
        store={"url": f"redis://127.0.0.1:{redis_port}/0"},
        api_keys=keys,
        cache={"enabled": True, "ttl_s": 5.0},
        tiers={"metered": LIMITS},
    )


async def storm(faults: Sequence[str], rounds: int, fault_s: float, heal_s: float) -> list[FaultReport]:
    tenants = [f"limited-{name}-{number}" for name in faults for number in range(rounds)]
    reports = []
    with site_by_hand() as site:
        async with redis_site(site, tenants) as running:
            for number in range(rounds):
                for name in faults:
                    reports.append(await running.round(name, number, fault_s=fault_s, heal_s=heal_s))
                    print(json.dumps(asdict(reports[-1])), flush=True)
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fault-s", type=float, default=5.0)
    parser.add_argument("--heal-s", type=float, default=8.0)
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--out", type=Path, default=RESULTS / "redis-faults.json")
    given = parser.parse_args()
    reports = asyncio.run(storm(given.faults, given.rounds, given.fault_s, given.heal_s))
    total = {
        "requests": sum(report.requests for report in reports),
        "unexpected": sum(report.unexpected for report in reports),
        "waited": {key: sum(report.waited[key] for report in reports) for key in reports[0].waited},
        "healed_s": max((seconds for report in reports for seconds in report.healed_s.values()), default=0.0),
        "failed_later": sum(report.failed_later for report in reports),
        "lost_turns": sum(report.lost_turns for report in reports),
        "lost_tokens": sum(report.lost_tokens for report in reports),
    }
    print(json.dumps(total))
    arguments = {"rounds": given.rounds, "fault_s": given.fault_s, "heal_s": given.heal_s, "faults": given.faults}
    write_json(given.out, {"environment": environment(), "arguments": arguments, "total": total, "faults": reports})


if __name__ == "__main__":
    main()
