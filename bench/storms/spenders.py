"""Checks that no more is spent than a budget has, while many spenders race for it through several gateways over one Redis and
gateways die.

    python -m bench.storms.spenders [--gateways 2] [--spenders 64] [--operations 100000] [--kills 20]
        -> bench/results/storms/spenders.json

A gateway here is a process with the real limiter and no engine: each of its spenders reserves the most that a request may use, uses a part
of it, and has it charged. What a request uses is written to a file of its process as it is used, as an engine would have made it; that is
the truth that the book in Redis is compared with. One of a hundred requests runs for seconds, so that its count is saved. Every few
hundred operations a gateway is killed (SIGKILL) wherever it is, and started anew; the other one charges what it left.

operations   requests that were admitted or refused
overspent    tokens used beyond the budget; at most MAX_TOKENS, one reservation
not_charged  tokens used that the book does not have
overcharged  tokens that the book has and no request used: the tails of killed requests, at most a reservation of each
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from bench.storms.common import RESULTS, redis_program
from headrace.core.errors import Unavailable
from headrace.core.ids import RequestId
from headrace.gateway.access.principal import Principal
from headrace.gateway.http.config import Limits
from headrace.gateway.http.errors import RateLimitExceeded
from headrace.gateway.limits.limiter import Limiter
from headrace.gateway.limits.redis import RedisLimits
from headrace.gateway.limits.reservation import LimitReservation
from headrace.gateway.limits.rules import rules_of
from headrace.gateway.stores.redis import open_redis
from headrace.gateway.upstream.seam import Prepared, TokenUsage
from headrace.lab.environment import environment
from headrace.lab.report import write_json
from headrace.policy.limits.book import LEASE_S
from headrace.policy.limits.price import FREE
from headrace.policy.limits.tier import Tier

PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 10, 90
MAX_TOKENS = PROMPT_TOKENS + MAX_OUTPUT_TOKENS
"""Tokens of one reservation. Requests use 55 of them on average."""

SLOW_PART = 0.01
"""Part of the requests that run for seconds."""

LOOK_S = 0.1
END_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendingPlan:
    """budget_part: budget, as part of what all operations would use if each were admitted"""

    gateways: int = 2
    spenders: int = 64
    operations: int = 100_000
    kills: int = 20
    budget_part: float = 0.5

    @property
    def budget(self) -> int:
        return int(self.operations * self.budget_part * (MAX_TOKENS + PROMPT_TOKENS) / 2)


@dataclass(slots=True)
class SpendingCounts:
    """What the processes' files and the book say in the end."""

    operations: int = 0
    admitted: int = 0
    spent: int = 0
    charged: int = 0
    overspent: int = 0
    not_charged: int = 0
    overcharged: int = 0
    still_open: int = 0
    kills: int = 0
    wall_s: float = 0.0

    def check(self, plan: SpendingPlan) -> None:
        assert self.operations >= plan.operations
        assert self.kills == plan.kills
        assert self.overspent <= MAX_TOKENS, "at most one reservation is overspent"
        assert self.not_charged <= MAX_TOKENS
        assert self.overcharged <= MAX_TOKENS * self.kills * -(-plan.spenders // plan.gateways)
        assert not self.still_open


def principal(budget: int) -> Principal:
    return Principal(tenant="acme", tier=Tier(monthly_tokens=budget, max_concurrent_requests=10_000))


# -- one gateway ----------------------------------------------------------------------------------------------------------------------


async def run_gateway(url: str, truth: Path, budget: int, spenders: int) -> None:
    """Spend until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    caller = principal(budget)
    with truth.open("ab", buffering=0) as file:
        async with Limiter.running(RedisLimits(open_redis(url)), clock=time.monotonic) as limiter:
            await asyncio.gather(*(spend(limiter, file, caller, stop) for _ in range(spenders)))


async def spend(limiter: Limiter, truth: BinaryIO, caller: Principal, stop: asyncio.Event) -> None:
    while not stop.is_set():
        try:
            async with limiter.admit(RequestId(os.urandom(12).hex()), caller, Limits()) as reservation:
                await use(reservation, truth)
            truth.write(b"ended\n")
        except RateLimitExceeded:
            truth.write(b"refused\n")
            await asyncio.sleep(random.random() * 0.02)
        except Unavailable:  # Redis took more than a request waits
            await asyncio.sleep(0.1)


def _no_stream() -> NoReturn:
    raise NotImplementedError("a spender counts by itself")


RESERVED = Prepared(
    stream=_no_stream,
    prompts=(),
    prompt_tokens=PROMPT_TOKENS,
    max_prompt_tokens=PROMPT_TOKENS,
    max_output_tokens=MAX_OUTPUT_TOKENS,
    num_sequences=1,
    seed=None,
)
"""What a spender reserves."""


async def use(reservation: LimitReservation, truth: BinaryIO) -> None:
    """Reserve, and then use a part of it, piece by piece."""
    await reservation.reserve(FREE, RESERVED, highest=FREE)
    output = 0
    reservation.follow(lambda: TokenUsage(PROMPT_TOKENS, output, 0))
    truth.write(b"%d\n" % PROMPT_TOKENS)
    is_slow, wanted = random.random() < SLOW_PART, random.randint(0, MAX_OUTPUT_TOKENS)
    piece = 2 if is_slow else 40
    while output < wanted:
        await asyncio.sleep(0.05 if is_slow else random.random() * 0.005)
        new = min(piece, wanted - output)
        truth.write(b"%d\n" % new)
        output += new
    reservation.count(TokenUsage(PROMPT_TOKENS, output, 0))


# -- the storm ------------------------------------------------------------------------------------------------------------------------


def storm(plan: SpendingPlan) -> SpendingCounts:
    """Run it. Needs a Redis or Valkey server on the path."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hr-") as name, ExitStack() as stack:
        folder = Path(name)
        url = stack.enter_context(redis(folder))
        fleet = [stack.enter_context(_Process(url, folder / f"truth-{index}", plan)) for index in range(plan.gateways)]
        for number in range(1, plan.kills + 1):
            _wait_for(fleet, number * plan.operations // (plan.kills + 1))
            fleet[number % len(fleet)].kill()
        _wait_for(fleet, plan.operations)
        for process in fleet:
            process.end()
        counts = _counts(fleet, plan)
        counts.charged, counts.still_open = asyncio.run(_book(url, plan.budget))
    counts.overspent = max(0, counts.spent - plan.budget)
    counts.not_charged, counts.overcharged = max(0, counts.spent - counts.charged), max(0, counts.charged - counts.spent)
    counts.wall_s = round(time.monotonic() - began, 1)
    return counts


class _Process:
    """One gateway, started anew after each kill. Its file has what all of them used."""

    def __init__(self, url: str, truth: Path, plan: SpendingPlan) -> None:
        self.truth = truth
        self.kills = 0
        spenders = -(-plan.spenders // plan.gateways)
        self._arguments = ["--url", url, "--truth", str(truth), "--budget", str(plan.budget), "--spenders", str(spenders)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Process:
        self.truth.touch()
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)

    def kill(self) -> None:
        self.end(signal.SIGKILL)
        self.kills += 1
        self._start()

    def end(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(END_S)
            self._process = None

    def num_operations(self) -> int:
        said = self.truth.read_bytes()
        return said.count(b"ended") + said.count(b"refused")

    def _start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "bench.storms.spenders", *self._arguments], stdin=subprocess.DEVNULL)


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """A server of our own on a Unix socket, without a disk; its URL."""
    socket = folder / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    server = subprocess.Popen([redis_program(), *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            assert server.poll() is None
            time.sleep(0.01)
        yield f"unix://{socket}"
    finally:
        server.terminate()
        server.wait(END_S)


def _wait_for(fleet: list[_Process], num_operations: int) -> None:
    while sum(process.num_operations() for process in fleet) < num_operations:
        time.sleep(LOOK_S)


def _counts(fleet: list[_Process], plan: SpendingPlan) -> SpendingCounts:
    counts = SpendingCounts(kills=sum(process.kills for process in fleet))
    for process in fleet:
        lines = process.truth.read_bytes().splitlines()
        counts.admitted += lines.count(b"ended")
        counts.operations += lines.count(b"ended") + lines.count(b"refused")
        counts.spent += sum(int(line) for line in lines if line.isdigit())
    return counts


async def _book(url: str, budget: int) -> tuple[int, int]:
    """Tokens that the book has charged, and requests that it holds open, once a survivor has charged what the last kills left."""
    store = RedisLimits(open_redis(url))
    async with Limiter.running(store, clock=time.monotonic):
        await asyncio.sleep(LEASE_S + 3.0)
        result = await store.take(None, [rule.claim(None) for rule in rules_of(principal(budget))])
    used = {rule.name: reading.current for rule, reading in zip(rules_of(principal(budget)), result.readings, strict=True)}
    return used["monthly_tokens"], used["max_concurrent_requests"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plan = SpendingPlan()
    for name, default in asdict(plan).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    for name, kind in (("url", str), ("truth", Path), ("budget", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "spenders.json")
    given = parser.parse_args()
    if given.url:
        asyncio.run(run_gateway(given.url, given.truth, given.budget, given.spenders))
        return
    plan = SpendingPlan(**{name: getattr(given, name) for name in asdict(plan)})
    counts = storm(plan)
    print(json.dumps(asdict(counts)))
    write_json(given.out, {"environment": environment(), "plan": plan, "budget": plan.budget, "counts": counts})
    counts.check(plan)


if __name__ == "__main__":
    main()
