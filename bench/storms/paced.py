"""Runs loads that follow a schedule, for storms of overload and of neighbours: `headrace serve` with tenants and tiers, loads, their
summary.

A load is requests of one tenant at given moments, whatever is unanswered (`headrace.lab.loadgen`). `LoadBeside` sends one from a process
of its own, so that thousands of its streams do not delay the client whose times are measured. Both share the machine with the server.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import re
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.gateway_overhead import PRICE, TIER
from bench.storms.common import Served, served
from headrace.lab.datasets import WorkloadShape, make_requests
from headrace.lab.loadgen import LoadTarget, run_load
from headrace.lab.metrics import LoadRecord, Slo, distribution

SHAPE = WorkloadShape(input_tokens=128, output_tokens=32, spread=0.5)
MAX_REQUESTS = 20_000
"""Most requests of one load: a machine on which this is less than the load's seconds gets a shorter load."""

PATIENCE_S = 20.0
"""Seconds after which a client gives its request up."""

OPERATOR = "operator"
"""The tenant whose key reads the metrics of all tenants."""

START_S = 5.0
"""Seconds in which another process is started and has made the requests of its load; where it takes longer, the load begins later."""

SAMPLE_S = 1.0
END_S = 60.0
"""Seconds within which what was left must have ended."""


@contextmanager
def tiered_server(
    model: str,
    tiers: Mapping[str, Mapping[str, object]],
    *,
    tier_of: Mapping[str, str] | None = None,
    engine: Mapping[str, object] | None = None,
    gateway: Mapping[str, object] | None = None,
) -> Iterator[Served]:
    """`headrace serve` of one model; each tenant has a key, and each tier every kind of limit, none of which is reached.

    tier_of  tenant -> its tier. None: one tenant of each tier, with its name
    engine   further keys of the engine;  gateway: of the gateway
    """
    tenants = tier_of or {name: name for name in tiers}
    keys = [{"key": key_of(tenant), "tenant": tenant, "tier": tier} for tenant, tier in tenants.items()]
    keys.append({"key": key_of(OPERATOR), "tenant": OPERATOR, "role": "reader"})
    content = {
        "models": [{"engine": {"model": model, **(engine or {})}}],
        "tiers": {name: {**TIER, **rules} for name, rules in tiers.items()},
        "prices": {Path(model).name: PRICE},
        "gateway": {"api_keys": keys, **(gateway or {})},
    }
    with TemporaryDirectory(prefix="headrace-storm-") as folder:
        path = Path(folder) / "site.yaml"
        path.touch(mode=0o600)
        path.write_text(json.dumps(content), encoding="utf-8")
        with served("--config", str(path)) as server:
            yield server


def key_of(tenant: str) -> str:
    return f"hr-storm-{tenant}-0123456789abcdef"


def target_of(server: Served, model: str, tenant: str, *, max_concurrency: int | None = None, patience_s: float = PATIENCE_S) -> LoadTarget:
    url = f"http://127.0.0.1:{server.port}"
    return LoadTarget(url=url, model=Path(model).name, api_key=key_of(tenant), timeout_s=patience_s, max_concurrency=max_concurrency)


async def saturating_rate(target: LoadTarget, seconds: float) -> float:
    """Requests per second finished by `max_concurrency` clients that always wait for an answer. The first, short load is a warm-up and a
    first guess."""
    assert target.max_concurrency is not None
    least = 2 * target.max_concurrency
    rate, num_requests = 0.0, least
    for seed in range(2):
        records = await run_load(target, make_requests(num_requests, SHAPE, seed=seed), [0.0] * num_requests)
        finished = [record for record in records if record.is_finished]
        if not finished:
            raise RuntimeError(f"nothing was answered: {records[0].error} {records[0].detail}")
        rate = len(finished) / (max(record.end_s for record in records) - records[0].intended_s)
        num_requests = max(least, min(MAX_REQUESTS, int(rate * seconds)))
    return rate


def summary(records: Sequence[LoadRecord], seconds: float, slo: Slo | None = None) -> dict[str, Any]:
    """What became of a load of `seconds`. TTFT is that of whole answers, with the 95 % confidence interval of its p99."""
    slo = slo or Slo()
    refused = [record for record in records if record.was_refused]
    refusal_ms = [1000 * (record.end_s - (record.sent_s or record.intended_s)) for record in refused]
    finished = [record for record in records if record.is_finished]
    return {
        "requests": len(records),
        "goodput": round(sum(map(slo.is_met_by, records)) / seconds, 2),
        "throughput": round(len(finished) / seconds, 2),
        "late": sum(not slo.is_met_by(record) for record in finished),
        "late_ttft": sum(record.ttft_s > (slo.ttft_s or math.inf) for record in finished),
        "late_tpot": sum((record.tpot_s or 0.0) > (slo.tpot_s or math.inf) for record in finished),
        "ttft_s": quantiles((record.ttft_s for record in finished), 4),
        "tpot_s": quantiles((record.tpot_s for record in finished if record.tpot_s is not None), 4),
        "refused": len(refused),
        "refused_as": dict(Counter(record.error for record in refused)),
        "refused_first": refused[0].detail if refused else None,
        "refusal_ms": quantiles(refusal_ms, 2),
        "with_retry": round(sum(record.retry_after_s is not None for record in refused) / len(refused), 4) if refused else None,
        "errors": dict(Counter(record.error for record in records if record.error is not None and not record.was_refused)),
        "client_lag_ms": quantiles((1000 * (record.client_lag_s or 0.0) for record in records), 2),
    }


def quantiles(samples: Iterable[float], num_digits: int) -> dict[str, Any]:
    """p50, p90, p99 and p99_interval; nothing without samples."""
    found = distribution(samples)
    if not found.count:
        return {}
    shown = {name: round(found.quantiles[name], num_digits) for name in ("p50", "p90", "p99")}
    return {**shown, "p99_interval": [round(bound, num_digits) for bound in found.intervals["p99"]]}


# -- a load from another process ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sent:
    """What a load that was stopped came to.

    began_s   monotonic time of its begin, by which `send_times_s` are counted
    records   of the requests that had ended;  num_left: requests that had not, and were left
    """

    began_s: float
    records: list[LoadRecord]
    num_left: int


class LoadBeside:
    """A load that another process sends, from START_S after its making until `stop`, or until all of it has ended."""

    def __init__(self, target: LoadTarget, send_times_s: Sequence[float], *, seed: int, shape: WorkloadShape = SHAPE) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.begins_s = time.monotonic() + START_S
        self._process = context.Process(target=_send, args=(theirs, target, list(send_times_s), self.begins_s, seed, shape), daemon=True)
        self._process.start()
        theirs.close()

    async def stop(self) -> Sent:
        """Leave what has not ended. Raises EOFError where the other process failed; its trace is on stderr."""
        self._pipe.send(None)
        found: Sent = await asyncio.to_thread(self._pipe.recv)
        await asyncio.to_thread(self._process.join)
        return found

    def close(self) -> None:
        """The process ends even where `stop` was not reached."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextmanager
def load_beside(target: LoadTarget, send_times_s: Sequence[float], *, seed: int, shape: WorkloadShape = SHAPE) -> Iterator[LoadBeside]:
    load = LoadBeside(target, send_times_s, seed=seed, shape=shape)
    try:
        yield load
    finally:
        load.close()


def _send(pipe: Connection, target: LoadTarget, send_times_s: list[float], begin_s: float, seed: int, shape: WorkloadShape) -> None:
    pipe.send(asyncio.run(_send_until_stopped(pipe, target, send_times_s, begin_s, seed, shape)))


async def _send_until_stopped(
    pipe: Connection, target: LoadTarget, send_times_s: list[float], begin_s: float, seed: int, shape: WorkloadShape
) -> Sent:
    requests, records = make_requests(len(send_times_s), shape, seed=seed), list[LoadRecord]()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), stopped.set)  # also where the process that measures is gone
    await asyncio.sleep(begin_s - time.monotonic())
    began_s = time.monotonic()
    sending = asyncio.create_task(run_load(target, requests, send_times_s, on_end=records.append))
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
    num_sent = sum(began_s + at <= time.monotonic() for at in send_times_s)
    if sending.done():
        await sending
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await stopping
    return Sent(began_s, records, max(0, num_sent - len(records)))


# -- what the server holds ----------------------------------------------------------------------------------------------------------------


def metric(server: Served, name: str) -> float:
    """Sum of a metric's samples."""
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers={"authorization": f"Bearer {key_of(OPERATOR)}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))


@dataclass(slots=True)
class Held:
    """What the gateway holds. idle_mb, peak_mb: resident memory, in millions of bytes"""

    server: Served
    idle_mb: float
    num_open: int = 0
    most_open: int = 0
    peak_mb: float = 0.0

    async def look(self) -> None:
        self.num_open = int(await asyncio.to_thread(metric, self.server, "headrace_gateway_requests_open"))
        self.most_open = max(self.most_open, self.num_open)
        self.peak_mb = max(self.peak_mb, self.server.rss_mb)

    async def until_idle(self) -> float:
        """Seconds until no request is open; infinite: not within END_S."""
        began = time.monotonic()
        while time.monotonic() - began < END_S:
            await self.look()
            if not self.num_open:
                return round(time.monotonic() - began, 2)
            await asyncio.sleep(SAMPLE_S / 4)
        return math.inf

    def summary(self) -> dict[str, Any]:
        return {"most_open": self.most_open, "idle_mb": self.idle_mb, "peak_mb": self.peak_mb}


@asynccontextmanager
async def watched(server: Served) -> AsyncIterator[Held]:
    """What the gateway holds, looked at every SAMPLE_S inside the block."""
    held = Held(server, server.rss_mb)

    async def watch() -> None:
        while True:
            await held.look()
            await asyncio.sleep(SAMPLE_S)

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        yield held
        watching.cancel()
