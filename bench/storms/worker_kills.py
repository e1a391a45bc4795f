"""Kills gateway workers under load: which requests fail, and how soon is the worker back?

    python -m bench.storms.worker_kills [--workers 3] [--kills 10] [--every 6] [--load 0.8] [--parallel 64]
        -> bench/results/storms/worker-kills.json

The deployment is that of `bench.storms.many_streams`, with an engine that is never the bottleneck. First `--parallel` clients ask one
request after the other: that is the capacity. Then streams arrive at `--load` of it, each on a connection of its own, while every
`--every` seconds the next worker is killed (SIGKILL). A stream that fails is sent again once.

open_at_kill   requests of the killed worker, as its metrics said just before; failed may differ by those that came and went meanwhile
failed         streams without a whole answer, by what their client saw; in all, and those that began after the worker was gone
failed_twice   streams whose second try failed too
first_s        time to the first event of streams that began within a second after a kill, and of all other ones
ready_again_s  from each kill until the new process listened
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
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.storms.common import RESULTS
from bench.storms.failover import quantiles
from bench.storms.many_streams import Deployment, request
from headrace.lab.environment import environment
from headrace.lab.report import write_json

NUM_TOKENS = 16
CALIBRATION_S = 5.0
PATIENCE_S = 60.0
BACK_S = 30.0
NEAR_S = 1.0


@dataclass(slots=True)
class Try:
    """One request as its client saw it. error: empty for a whole answer"""

    began_at: float
    first_s: float = 0.0
    error: str = ""


@dataclass(slots=True)
class Kills:
    times: list[float] = field(default_factory=list)
    gone_times: list[float] = field(default_factory=list)
    open_at_kill: list[int] = field(default_factory=list)
    ready_again_s: list[float] = field(default_factory=list)


async def ask(port: int, seed: int) -> Try:
    found = Try(time.monotonic())
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(request(seed, NUM_TOKENS).encode())
                await _read(reader, found)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError) as error:
        found.error = type(error).__name__
    return found


async def _read(reader: asyncio.StreamReader, found: Try) -> None:
    status, data = "", b""
    while part := await reader.read(1 << 16):
        status = status or part[9:12].decode("latin-1")
        data += part
        if not found.first_s and b"data: {" in data:
            found.first_s = time.monotonic() - found.began_at
    if b"data: [DONE]" not in data:
        found.error = f"status {status}" if status not in ("", "200") else "the connection ended early"


async def capacity(port: int, num_parallel: int) -> float:
    """Requests per second with `num_parallel` clients that ask one after the other."""
    ends_at, num_done = time.monotonic() + CALIBRATION_S, 0

    async def client(number: int) -> None:
        nonlocal num_done
        while time.monotonic() < ends_at:
            found = await ask(port, number)
            if found.error:
                raise SystemExit(f"without any fault: {found.error}")
            num_done += 1

    began = time.monotonic()
    await asyncio.gather(*(client(number) for number in range(num_parallel)))
    return num_done / (time.monotonic() - began)


async def kill_workers(deployment: Deployment, num_kills: int, every_s: float) -> Kills:
    kills = Kills()
    for number in range(num_kills):
        await asyncio.sleep(every_s)
        workers = await asyncio.to_thread(lambda: deployment.workers)
        index = number % len(workers)
        num_open = await asyncio.to_thread(deployment.metric, "headrace_gateway_requests_open", worker=str(index))
        kills.open_at_kill.append(int(num_open))
        num_before = _counts(deployment, index)
        os.kill(workers[index], signal.SIGKILL)
        kills.times.append(time.monotonic())
        await _until(deployment, lambda at=index, before=num_before: _counts(deployment, at)[0] > before[0])
        kills.gone_times.append(time.monotonic())
        await _until(deployment, lambda at=index, before=num_before: _counts(deployment, at)[1] > before[1])
        kills.ready_again_s.append(round(time.monotonic() - kills.times[-1], 2))
    return kills


async def _until(deployment: Deployment, condition: Any) -> None:
    async with asyncio.timeout(BACK_S):
        while not condition():
            await asyncio.sleep(0.02)


def _counts(deployment: Deployment, index: int) -> tuple[int, int]:
    """How often a worker was killed, and how often one listened, as the log says."""
    log = deployment.log
    listened = re.findall(rf'"process":"gateway-{index}"[^\n]*listening on', log)
    return log.count(f"gateway-{index} was killed by SIGKILL"), len(listened)


async def storm(deployment: Deployment, given: argparse.Namespace) -> dict[str, Any]:
    most = await capacity(deployment.port, given.parallel)
    killing = asyncio.create_task(kill_workers(deployment, given.kills, given.every))
    tries: list[asyncio.Task[Try]] = []
    again: list[asyncio.Task[Try]] = []
    began = time.monotonic()
    while not killing.done():
        tries.append(asyncio.create_task(ask(deployment.port, len(tries))))
        tries[-1].add_done_callback(lambda done: _send_again(deployment.port, done, again))
        await asyncio.sleep(max(0.0, began + len(tries) / (given.load * most) - time.monotonic()))
    kills = await killing
    done = list(await asyncio.gather(*tries))
    second = list(await asyncio.gather(*again))
    return summary(done, second, kills) | {"capacity_per_s": round(most, 1), "seconds": round(time.monotonic() - began, 1)}


def _send_again(port: int, done: asyncio.Task[Try], again: list[asyncio.Task[Try]]) -> None:
    if not done.cancelled() and done.result().error:
        again.append(asyncio.create_task(ask(port, 0)))


def summary(done: list[Try], second: list[Try], kills: Kills) -> dict[str, Any]:
    failed = [found for found in done if found.error]
    down = list(zip(kills.gone_times, kills.times, kills.ready_again_s, strict=True))
    later = [found for found in failed if any(gone <= found.began_at <= at + back + NEAR_S for gone, at, back in down)]
    near = [any(0 <= found.began_at - at <= NEAR_S for at in kills.times) for found in done]
    first_s = {
        name: quantiles([found.first_s for found, is_near in zip(done, near, strict=True) if is_near == wanted and not found.error])
        for name, wanted in (("after a kill", True), ("other", False))
    }
    return {
        "streams": len(done),
        "open_at_kill": kills.open_at_kill,
        "failed": dict(Counter(found.error for found in failed)),
        "failed_that_began_after_the_worker_was_gone": dict(Counter(found.error for found in later)),
        "failed_twice": dict(Counter(found.error for found in second if found.error)),
        "first_s": first_s,
        "ready_again_s": kills.ready_again_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--every", type=float, default=6.0)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--parallel", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, ExitStack() as stack:
        deployment = Deployment(Path(folder), argparse.Namespace(streams=2000, workers=given.workers), stack, step_seconds=0.01)
        found = asyncio.run(storm(deployment, given))
    print(json.dumps(found, indent=1))
    write_json(RESULTS / "worker-kills.json", {"environment": asdict(environment()), "arguments": vars(given), **found})


if __name__ == "__main__":
    main()
