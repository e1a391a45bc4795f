"""Goodput under overload: a real deployment at once, twice and ten times the rate that saturates it, then at half of it.

    python -m bench.storms.overload [--model headrace-tiny] [--seconds 30] [--ttft-ms 2000] [--tpot-ms 100]
        -> bench/results/storms/overload.json

`headrace serve` with the bundled engine and a key whose tier has the goals. The saturating rate is what `--concurrency` clients that wait
for their answers finish per second, with a key that has no goals. The loads after it are open: requests at random moments, whatever is
still unanswered. The last one begins when the largest load ends. A full run takes about three minutes; each request has PATIENCE_S, and
the rates are bounded by MAX_REQUESTS, so it ends by itself.

goodput        requests per second that were answered whole within both goals; share_of_peak: of the best of these loads
refusal_ms     client's time of the answers 429 and 503; with_retry: the part of them that had Retry-After
normal_after_s seconds after the end of the largest load at which the last request of the small one was refused or late; 0: none was
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.storms.common import Served, served, write_result
from headrace.bundled import DEFAULT_MODEL
from headrace.lab.arrivals import send_times
from headrace.lab.datasets import WorkloadShape, make_requests
from headrace.lab.environment import environment
from headrace.lab.loadgen import LoadTarget, run_load
from headrace.lab.metrics import LoadRecord, Slo, percentile

KEYS = {"goals": "hr-storm-goals-0123456789abcdef", "patient": "hr-storm-patient-0123456789abcdef"}
SHAPE = WorkloadShape(input_tokens=128, output_tokens=32, spread=0.5)
TIMES = (1.0, 2.0, 10.0)
"""The loads, as multiples of the saturating rate."""

TAIL_S = 20.0
"""Seconds of the small load after the largest one."""

PATIENCE_S = 20.0
"""Seconds after which the client gives a request up."""

MAX_REQUESTS = 20_000
"""Most requests of one load: a machine on which this is less than `--seconds` of it gets a shorter load."""


def config(model: str, ttft_ms: float, tpot_ms: float) -> dict[str, Any]:
    """Keys of a file as JSON, which is YAML too."""
    keys = [{"key": key, "tenant": name, "tier": name} for name, key in KEYS.items()]
    return {
        "models": [{"engine": {"model": model}}],
        "tiers": {"goals": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms}, "patient": {}},
        "gateway": {"api_keys": keys},
    }


def target(server: Served, model: str, key: str, max_concurrency: int | None = None) -> LoadTarget:
    url = f"http://127.0.0.1:{server.port}"
    return LoadTarget(url=url, model=model, api_key=KEYS[key], timeout_s=PATIENCE_S, max_concurrency=max_concurrency)


async def saturating_rate(server: Served, model: str, concurrency: int, seconds: float) -> float:
    """Requests per second finished by clients that always wait for an answer. The first, short load is a warm-up and a first guess."""
    rate, num_requests = 0.0, 2 * concurrency
    for seed in range(2):
        requests = make_requests(num_requests, SHAPE, seed=seed)
        records = await run_load(target(server, model, "patient", concurrency), requests, [0.0] * num_requests)
        finished = [record for record in records if record.is_finished]
        if not finished:
            raise RuntimeError(f"nothing was answered: {records[0].error} {records[0].detail}")
        rate = len(finished) / (max(record.end_s for record in records) - records[0].intended_s)
        num_requests = max(2 * concurrency, min(MAX_REQUESTS, int(rate * seconds)))
    return rate


def summary(records: Sequence[LoadRecord], seconds: float, slo: Slo) -> dict[str, Any]:
    refused = [record for record in records if record.was_refused]
    refusal_ms = sorted(1000 * (record.end_s - (record.sent_s or record.intended_s)) for record in refused)
    late = sum(record.is_finished and not slo.is_met_by(record) for record in records)
    ttft = sorted(record.ttft_s for record in records if record.is_finished)
    return {
        "requests": len(records),
        "goodput": round(sum(map(slo.is_met_by, records)) / seconds, 2),
        "throughput": round(sum(record.is_finished for record in records) / seconds, 2),
        "late": late,
        "late_ttft": sum(record.is_finished and record.ttft_s > (slo.ttft_s or math.inf) for record in records),
        "late_tpot": sum(record.is_finished and (record.tpot_s or 0.0) > (slo.tpot_s or math.inf) for record in records),
        "ttft_s": {f"p{part}": round(percentile(ttft, part / 100), 3) for part in (50, 90, 99)} if ttft else {},
        "refused": len(refused),
        "refusal_ms": {f"p{part}": round(percentile(refusal_ms, part / 100), 2) for part in (50, 99)} if refusal_ms else {},
        "with_retry": round(sum(record.retry_after_s is not None for record in refused) / len(refused), 4) if refused else None,
        "errors": dict(Counter(record.error for record in records if record.error is not None and not record.was_refused)),
        "client_lag_p99_ms": round(1000 * percentile(sorted(record.client_lag_s or 0.0 for record in records), 0.99), 2),
    }


async def offered(server: Served, model: str, rate: float, seconds: float, *, seed: int, tail_rate: float = 0.0) -> list[list[LoadRecord]]:
    """The records of an open load of `rate` for `seconds`, and of one of `tail_rate` for TAIL_S that begins when it ends."""
    num_requests, num_tail = min(MAX_REQUESTS, max(2, int(rate * seconds))), int(tail_rate * TAIL_S)
    at = send_times(num_requests, rate=rate, seed=seed)
    if num_tail:
        at += [at[-1] + later for later in send_times(num_tail, rate=tail_rate, seed=seed)]
    records = await run_load(target(server, model, "goals"), make_requests(len(at), SHAPE, seed=100 + seed), at)
    return [records[:num_requests], records[num_requests:]]


def normal_after_s(tail: Sequence[LoadRecord], slo: Slo) -> float:
    """See the module's header."""
    begin = tail[0].intended_s
    return round(max((record.intended_s - begin for record in tail if not slo.is_met_by(record)), default=0.0), 2)


async def run(server: Served, given: argparse.Namespace) -> dict[str, Any]:
    slo = Slo(ttft_s=given.ttft_ms / 1000, tpot_s=given.tpot_ms / 1000)
    rate = await saturating_rate(server, given.model, given.concurrency, min(15.0, given.seconds))
    found: dict[str, Any] = {"saturating_rate": round(rate, 2), "loads": {}}
    for seed, times in enumerate(TIMES):
        is_largest = times == max(TIMES)
        part = await offered(server, given.model, times * rate, given.seconds, seed=seed, tail_rate=rate / 2 if is_largest else 0.0)
        seconds = len(part[0]) / (times * rate)
        found["loads"][f"{times:g}x"] = summary(part[0], seconds, slo)
        print(f"{times:g}x", json.dumps(found["loads"][f"{times:g}x"]), flush=True)
        if is_largest:
            found["after"] = {**summary(part[1], TAIL_S, slo), "normal_after_s": normal_after_s(part[1], slo)}
            print("after", json.dumps(found["after"]), flush=True)
    peak = max(load["goodput"] for load in found["loads"].values())
    for load in found["loads"].values():
        load["share_of_peak"] = round(load["goodput"] / peak, 3) if peak else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    parser.add_argument("--caption", default="", help="what else ran on the machine; stands in the result")
    parser.add_argument("--no-file", action="store_true")
    given = parser.parse_args()
    before = environment()
    with TemporaryDirectory(prefix="headrace-overload-") as folder:
        path = Path(folder) / "site.yaml"
        path.write_text(json.dumps(config(given.model, given.ttft_ms, given.tpot_ms)), encoding="utf-8")
        path.chmod(0o600)
        with served("--config", str(path)) as server:
            found = asyncio.run(run(server, given))
    print(json.dumps({"saturating_rate": found["saturating_rate"], "share": found["loads"]["10x"]["share_of_peak"]}), flush=True)
    if not given.no_file:
        write_result("overload", {"environment": before, "settings": vars(given), **found})


if __name__ == "__main__":
    main()
