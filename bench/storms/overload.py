"""Measures goodput under overload: a real deployment at once, twice and ten times the rate that saturates it, then at half of it.

    python -m bench.storms.overload [--model headrace-tiny] [--seconds 30] [--ttft-ms 2000] [--tpot-ms 100] [--defaults]
        -> bench/results/storms/overload.json

`headrace serve` with the bundled engine and a key whose tier has the goals; with --defaults the tier has none, and the goals are only
measured. The saturating rate is what `--concurrency` clients that wait
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
from collections.abc import Sequence
from typing import Any

from bench.storms.common import Served, write_result
from bench.storms.paced import MAX_REQUESTS, SHAPE, saturating_rate, summary, target_of, tiered_server
from headrace.bundled import DEFAULT_MODEL
from headrace.lab.datasets import make_requests, send_times
from headrace.lab.environment import environment
from headrace.lab.loadgen import run_load
from headrace.lab.metrics import LoadRecord, Slo

GOALS, PATIENT = "goals", "patient"
"""Tenants, and their tiers: one with goals, one without."""

TIMES = (1.0, 2.0, 10.0)
"""The loads, as multiples of the saturating rate."""

TAIL_S = 20.0
"""Seconds of the small load after the largest one."""


async def offered(server: Served, model: str, rate: float, seconds: float, *, seed: int, tail_rate: float = 0.0) -> list[list[LoadRecord]]:
    """The records of an open load of `rate` for `seconds`, and of one of `tail_rate` for TAIL_S that begins when it ends."""
    num_requests, num_tail = min(MAX_REQUESTS, max(2, int(rate * seconds))), int(tail_rate * TAIL_S)
    at = send_times(num_requests, rate=rate, seed=seed)
    if num_tail:
        at += [at[-1] + later for later in send_times(num_tail, rate=tail_rate, seed=seed)]
    records = await run_load(target_of(server, model, GOALS), make_requests(len(at), SHAPE, seed=100 + seed), at)
    return [records[:num_requests], records[num_requests:]]


def normal_after_s(tail: Sequence[LoadRecord], slo: Slo) -> float:
    """See the module's header."""
    begin = tail[0].intended_s
    return round(max((record.intended_s - begin for record in tail if not slo.is_met_by(record)), default=0.0), 2)


async def run(server: Served, given: argparse.Namespace) -> dict[str, Any]:
    slo = Slo(ttft_s=given.ttft_ms / 1000, tpot_s=given.tpot_ms / 1000)
    clients = target_of(server, given.model, PATIENT, max_concurrency=given.concurrency)
    rate = await saturating_rate(clients, min(15.0, given.seconds))
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
    parser.add_argument("--defaults", action="store_true", help="serve without goals")
    parser.add_argument("--caption", default="", help="what else ran on the machine; stands in the result")
    parser.add_argument("--no-file", action="store_true")
    given = parser.parse_args()
    before = environment()
    tiers = {GOALS: {} if given.defaults else {"ttft_ms": given.ttft_ms, "tpot_ms": given.tpot_ms}, PATIENT: {}}
    with tiered_server(given.model, tiers) as server:
        found = asyncio.run(run(server, given))
    print(json.dumps({"saturating_rate": found["saturating_rate"], "share": found["loads"]["10x"]["share_of_peak"]}), flush=True)
    if not given.no_file:
        write_result("overload-defaults" if given.defaults else "overload", {"environment": before, "settings": vars(given), **found})


if __name__ == "__main__":
    main()
