"""Runs examples/two_pools under a mixed load while a replica is killed: nothing may be lost, and nothing billed twice.

    python -m bench.storms.two_pools [--seconds 75] [--clients 32] [--kill-gateway]        (`make servers` installs HAProxy)
        -> bench/results/storms/two-pools.json

Clients send to HAProxy alone: streams, whole answers, turns of sessions, retries of what was answered, questions that the response cache
may answer, and those of a tenant that wants more than its limit. A third through, a replica of the large pool is killed (SIGKILL); with
`--kill-gateway` a gateway too, at two thirds. What a client does not get whole it sends again, with the same `Idempotency-Key`.

killed            processes, and how many requests were open then
lost              requests that never got a whole answer
failures          tries that failed, by what the client wanted and saw; each is to be one that may be sent again (`RETRYABLE`)
different         whole answers whose text is not the one that the same model gave the same request alone, before the load
repeated          answers that were given again under their key; `repeated_different` of them had another text
sessions          turns that were answered, and those of them that are not in their session
unrecorded        answers that no gateway's usage.db has with the tokens that the client was given, and their price
billed_twice      Idempotency-Keys with two records that cost something
unknown_records   records that cost something, of requests that no client sent
recorded_twice    records of a request that has one already
spend             by tenant, tokens and billionths of money: the clients', the records', and what Redis charged
limited           answers of the tenant with `requests_per_minute`, its refusals, and the most that both gateways may answer
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.storms.common import RESULTS
from headrace.cli.config.load import load_settings
from headrace.cli.config.sections import ServeConfig
from headrace.gateway.access.principal import Principal
from headrace.gateway.ledger.ledger import ship_orphaned
from headrace.gateway.ledger.usage_db import FILE
from headrace.gateway.limits.redis import RedisLimits
from headrace.gateway.limits.rules import rules_of
from headrace.gateway.stores.redis import open_redis
from headrace.lab.environment import environment
from headrace.lab.report import write_json
from headrace.policy.limits.price import Price

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_pools"
START_S, STOP_S = 240.0, 60.0
KILLED, KILLED_GATEWAY = "large-1", "gateway-1"
GATEWAYS = ("gateway-1", "gateway-2")
POOLS = ("large", "small")
ASKED = ("large", "large", "small", "assistant")
"""Names that requests draw from; the last is a route to both pools."""
KINDS = ("stream", "keyed stream", "whole", "turn", "cached", "again")
SEEDS = 8
"""Different questions; each has one answer of each model, since engines are deterministic."""
TURNS = 6
"""Of a session; then its client begins another one."""
PATIENCE_S = 60.0
"""Seconds for which a client sends a request again: claims of a gateway that was killed end after 15."""
RETRYABLE = ("409 idempotency_conflict", "409 session_conflict", "429 overloaded", "503 unavailable", "connection", "cut")
CHARGED_S = 40.0
"""Seconds within which nothing is held of callers without requests."""
LIMITED_EVERY_S = 0.5
BILLED = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")
Record = Mapping[str, Any]
"""A row of usage.db."""


@dataclass(slots=True)
class Try:
    """One request over HTTP, as its client saw it. error: "" for a whole answer"""

    request_id: str = ""
    error: str = "cut"
    retry_after_s: float = 0.5
    model: str = ""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    is_kept: bool = False
    """Given again, from the response cache or under its key: it costs nothing."""

    def billed(self, prices: Mapping[str, Price]) -> tuple[int, ...]:
        """What its record is to say in the columns `BILLED`, by the usage that the client was given."""
        if self.is_kept:
            return 0, 0, 0, 0
        counts = {
            "prompt_tokens": self.usage["prompt_tokens"],
            "cached_tokens": (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            "completion_tokens": self.usage["completion_tokens"],
        }
        return *counts.values(), prices[self.model].cost_nanos(**counts)


@dataclass(slots=True)
class Asked:
    """What a client wants, and its tries until one was whole."""

    kind: str
    tenant: str
    body: dict[str, Any]
    headers: dict[str, str]
    tries: list[Try] = field(default_factory=list)

    @property
    def answer(self) -> Try | None:
        return self.tries[-1] if self.tries and not self.tries[-1].error else None

    @property
    def key(self) -> str:
        return self.headers.get("idempotency-key", "")


# -- the example's processes ---------------------------------------------------------------------------------------------------------------


class Example:
    """The running example. url: of its API; folder: with its gateways' state"""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, url: str) -> None:
        self._process, self.folder, self.url = process, folder, url

    def kill(self, name: str) -> None:
        for child in psutil.Process(self._process.pid).children():
            if name in child.cmdline():
                child.send_signal(signal.SIGKILL)
                return
        raise AssertionError(f"{name} does not run")


@asynccontextmanager
async def example(folder: Path) -> AsyncIterator[Example]:
    """Raises AssertionError with what it printed where it does not start. It has ended after the block."""
    words = (sys.executable, str(EXAMPLE / "start.py"), str(folder))
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    printed = ""
    try:
        async with asyncio.timeout(START_S):
            while "ready: " not in printed:
                line = (await process.stdout.readline()).decode()
                assert line, printed
                printed += line
        yield Example(process, folder, printed.rpartition("ready: ")[2].strip())
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), STOP_S)


# -- the load ------------------------------------------------------------------------------------------------------------------------------


def body_of(model: str, seed: int, **more: Any) -> dict[str, Any]:
    """The classifier sends a question to the small model, and code to the large one."""
    text = f"Write a Python function that sorts the sacks of mill {seed}." if seed % 2 else f"Tell me a story about mill number {seed}."
    message = {"role": "user", "content": text}
    return {
        "model": model, "messages": [message], "seed": seed, "temperature": 1.0, "max_tokens": 60 + 10 * seed, "ignore_eos": True, **more
    }  # fmt: skip


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class PoolLoad:
    """Clients that each have one request open at a time. answers: model, seed -> the text that it gave alone"""

    def __init__(self, session: aiohttp.ClientSession, url: str, draw: random.Random) -> None:
        self._session, self._url, self._draw = session, url, draw
        self.asked: list[Asked] = []
        self.limited: Counter[str] = Counter()
        self.texts: dict[tuple[str, int], str] = {}
        self.turns: dict[str, int] = {}

    @property
    def num_open(self) -> int:
        return sum(not one.tries or bool(one.tries[-1].error) for one in self.asked)

    async def learn(self) -> None:
        """Ask each model alone for each answer. Raises AssertionError for one that fails."""
        for model, seed in itertools.product(POOLS, range(SEEDS)):
            one = await self._ask(Asked("alone", "acme", body_of(model, seed, cache=False), {}))
            assert one.answer is not None, one.tries
            assert one.answer.model == model
            self.texts[model, seed] = one.answer.text

    async def run(self, num_clients: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(number, end) for number in range(num_clients)), self._limited_client(end))

    async def _client(self, number: int, end: float) -> None:
        tenant = ("acme", "beta")[number % 2]
        last: Asked | None = None
        for count in itertools.count():
            if time.monotonic() > end:
                return
            kind = self._draw.choice(KINDS)
            if kind == "again":
                if last is not None:
                    await self._ask(Asked("again", tenant, last.body, last.headers))
                continue
            one = await self._ask(self._wanted(kind, tenant, f"{number}-{count // TURNS}"))
            if kind == "turn" and one.answer is not None:
                name = one.headers["x-session-id"]
                self.turns[name] = self.turns.get(name, 0) + 1
            last = one if one.key and kind != "turn" and one.answer is not None else last

    def _wanted(self, kind: str, tenant: str, session_id: str) -> Asked:
        model, seed = self._draw.choice(ASKED), self._draw.randrange(SEEDS)
        headers = {"idempotency-key": str(uuid.UUID(int=self._draw.getrandbits(128)))} if kind in ("keyed stream", "whole", "turn") else {}
        more: dict[str, Any] = {} if kind == "cached" else {"cache": False}
        if "stream" in kind:
            more |= STREAMED
        if kind == "turn":
            headers["x-session-id"] = f"{tenant}-{session_id}"
            more |= {"max_tokens": 40}
        return Asked(kind, tenant, body_of(model, seed, **more), headers)

    async def _ask(self, one: Asked) -> Asked:
        """Send it until it is answered, or for `PATIENCE_S`."""
        self.asked.append(one)
        end = time.monotonic() + PATIENCE_S
        while one.answer is None and time.monotonic() < end:
            one.tries.append(await self._tried(one))
            if one.tries[-1].error:
                await asyncio.sleep(one.tries[-1].retry_after_s)
        return one

    async def _limited_client(self, end: float) -> None:
        """Of the tenant that wants more than its requests per minute: refusals are its answers, and it does not send them again."""
        while time.monotonic() < end:
            one = Asked("limited", "trial", body_of("small", 1, max_tokens=8, cache=False), {})
            found = await self._tried(one)
            self.limited[found.error or "answered"] += 1
            if not found.error:
                one.tries.append(found)
                self.asked.append(one)
            await asyncio.sleep(LIMITED_EVERY_S)

    async def _tried(self, one: Asked) -> Try:
        found = Try()
        headers = {"authorization": f"Bearer two-pools-{one.tenant}", **one.headers}
        try:
            async with self._session.post(f"{self._url}/chat/completions", json=one.body, headers=headers) as response:
                found.request_id = response.headers.get("x-request-id", "")
                found.retry_after_s = float(response.headers.get("retry-after", found.retry_after_s))
                found.is_kept = "idempotent-replayed" in response.headers or response.headers.get("x-headrace-cache") == "hit"
                if response.status != 200:
                    found.error = f"{response.status} {(await response.json())['error']['code']}"
                elif one.body.get("stream"):
                    await _read_stream(response, found)
                else:
                    _add(found, await response.json(), "message")
                    found.error = ""
        except aiohttp.ClientError as error:
            found.error = "cut" if found.request_id else f"connection: {type(error).__name__}"
        return found

    async def lost_turns(self) -> int:
        """Turns that were answered and are not in their session."""
        lost = 0
        for name, count in self.turns.items():
            headers = {"authorization": f"Bearer two-pools-{name.partition('-')[0]}"}
            async with self._session.get(f"{self._url}/sessions/{name}", headers=headers) as response:
                messages = (await response.json())["messages"] if response.status == 200 else []
            lost += max(0, count - sum(message["role"] == "assistant" for message in messages))
        return lost


async def _read_stream(response: aiohttp.ClientResponse, found: Try) -> None:
    async for raw in response.content:
        if raw.startswith(b"data: [DONE]"):
            found.error = ""
        elif raw.startswith(b"data: {"):
            event = json.loads(raw[6:])
            if "error" in event:
                found.error = f"503 {event['error']['code']}"
                return
            _add(found, event, "delta")


def _add(found: Try, content: dict[str, Any], part: str) -> None:
    found.model = content["model"]
    found.usage = content.get("usage") or found.usage
    found.text += "".join(choice[part].get("content") or "" for choice in content["choices"])


# -- what was charged ----------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Spend:
    """What a tenant used. money: in billionths"""

    tokens: int = 0
    money: int = 0

    def add(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, cost_nanos: int) -> None:
        self.tokens += prompt_tokens + completion_tokens
        self.money += cost_nanos


async def charged_in_redis(config: ServeConfig) -> dict[str, Spend]:
    """Tenant -> what the limits have charged, once nothing of it is open. Raises TimeoutError."""
    store, found = RedisLimits(open_redis(config.gateway.store.url)), {}
    try:
        for key in config.gateway.api_keys:
            rules = rules_of(Principal(tenant=key.tenant, tier=config.tiers[key.tier]))
            async with asyncio.timeout(CHARGED_S):
                while True:
                    result = await store.take(None, [rule.claim(None) for rule in rules])
                    used = {rule.name: reading.current for rule, reading in zip(rules, result.readings, strict=True)}
                    if not used["max_concurrent_requests"]:
                        break
                    await asyncio.sleep(0.2)
            found[key.tenant] = Spend(used["monthly_tokens"], used["monthly_budget"])
    finally:
        await store.close()
    return found


def records(folder: Path) -> Iterator[Record]:
    """All usage records of both gateways, which have ended."""
    for name in GATEWAYS:
        ship_orphaned(folder / name)
        with sqlite3.connect(folder / name / FILE) as connection:
            connection.row_factory = sqlite3.Row
            yield from map(dict, connection.execute("SELECT * FROM usage"))


def report(load: PoolLoad, recorded: list[Record], charged: dict[str, Spend], prices: Mapping[str, Price]) -> dict[str, Any]:
    """What the module's docstring names, but for kills, sessions and the limited tenant."""
    by_id = {record["request_id"]: record for record in recorded}
    tries_of_keys: dict[str, set[str]] = {}
    for one in load.asked:
        if one.key:
            tries_of_keys.setdefault(one.key, set()).update(each.request_id for each in one.tries)
    answered = [(one.tenant, one.answer) for one in load.asked if one.answer is not None]
    known = {each.request_id for one in load.asked for each in one.tries}
    again = [one for one in load.asked if one.kind == "again" and one.answer is not None and one.answer.is_kept]
    spend = {tenant: {"clients": Spend(), "records": Spend(), "redis": spent} for tenant, spent in charged.items()}
    for record in recorded:
        spend[record["tenant"]]["records"].add(*_billed(record))
    for tenant, answer in answered:
        spend[tenant]["clients"].add(*answer.billed(prices))
    return {
        "requests": len(load.asked),
        "by_kind": dict(Counter(one.kind for one in load.asked)),
        "by_model": dict(Counter(f"{one.body['model']} by {one.answer.model}" for one in load.asked if one.answer is not None)),
        "lost": len(load.asked) - len(answered),
        "failures": dict(Counter(f"{one.kind}: {each.error}" for one in load.asked for each in one.tries if each.error)),
        "different": sum(_is_different(load, one) for one in load.asked),
        "repeated": len(again),
        "repeated_different": sum(_is_different(load, one) for one in again),
        "unrecorded": sum(_billed(by_id.get(answer.request_id, {})) != answer.billed(prices) for _, answer in answered),
        "billed_twice": sum(sum(any(_billed(by_id.get(each, {}))) for each in ids) > 1 for ids in tries_of_keys.values()),
        "unknown_records": sum(any(_billed(record)) and record["request_id"] not in known for record in recorded),
        "recorded_twice": len(recorded) - len(by_id),
        "spend": {tenant: {name: asdict(each) for name, each in found.items()} for tenant, found in spend.items()},
    }


def _billed(record: Record) -> tuple[int, ...]:
    """Without a record: no tuple that an answer is billed."""
    return tuple(record[name] for name in BILLED if name in record)


def _is_different(load: PoolLoad, one: Asked) -> bool:
    """Turns of a session have a history, and no answer to compare with."""
    answer, seed = one.answer, one.body["seed"]
    return one.kind not in ("turn", "limited") and answer is not None and answer.text != load.texts[answer.model, seed]


def broken_promises(found: dict[str, Any], *, is_gateway_killed: bool) -> Iterator[str]:
    """What breaks a promise, one line each.

    A gateway that is killed has no records of its open requests, whose use the other one charges, and loses those of requests that have
    just ended (docs/usage.md).
    """
    for name in ("lost", "different", "repeated_different", "recorded_twice", "unrecorded", "billed_twice", "unknown_records"):
        if found[name] > (found["killed"].get(KILLED_GATEWAY, 0) if name == "unrecorded" else 0):
            yield f"{name}: {found[name]}"
    for failure in found["failures"]:
        if not failure.partition(": ")[2].startswith(RETRYABLE):
            yield f"a failure that may not be sent again: {failure}"
    if found["limited"]["answered"] > found["limited"]["most"]:
        yield f"limited: {found['limited']}"
    if found["sessions"]["lost"]:
        yield f"sessions: {found['sessions']}"
    for tenant, spend in found["spend"].items():
        if spend["redis"] != spend["records"] and not (is_gateway_killed and spend["redis"]["tokens"] >= spend["records"]["tokens"]):
            yield f"{tenant}: {spend}"


async def storm(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    config, timeout = load_settings(EXAMPLE / "gateway.yaml", {}), aiohttp.ClientTimeout(total=120)
    async with example(folder) as running, aiohttp.ClientSession(timeout=timeout) as session:
        load = PoolLoad(session, running.url, random.Random(given.seed))
        await load.learn()
        loading = asyncio.create_task(load.run(given.clients, given.seconds))
        await asyncio.sleep(given.seconds / 3)
        killed = {KILLED: load.num_open}
        running.kill(KILLED)
        await asyncio.sleep(given.seconds / 3)
        if given.kill_gateway:
            killed[KILLED_GATEWAY] = load.num_open
            running.kill(KILLED_GATEWAY)
        await loading
        sessions = {"turns": sum(load.turns.values()), "lost": await load.lost_turns()}
        charged = await charged_in_redis(config)
    limit = config.tiers["trial"].requests_per_minute or 0
    return {
        "killed": killed,
        **report(load, list(records(folder)), charged, config.prices),
        "sessions": sessions,
        "limited": {**load.limited, "most": round(limit * (1 + given.seconds / 60))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kill-gateway", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "two-pools.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        found = asyncio.run(storm(Path(folder), given))
    broken = list(broken_promises(found, is_gateway_killed=given.kill_gateway))
    print(json.dumps(found, indent=1), *(broken or ["every promise was kept"]), sep="\n")
    arguments = {name: value for name, value in vars(given).items() if name != "out"}
    write_json(given.out, {"environment": asdict(environment()), "arguments": arguments, **found, "broken": broken})


if __name__ == "__main__":
    main()
