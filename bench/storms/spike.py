"""Measures the share of premium requests that meet their tier's goals on a real deployment during spikes of low priority.

    python -m bench.storms.spike [--model headrace-tiny] [--spikes 3] [--spike-s 20] [--calm-s 15] [--times 12] [--premium 0.25]
        [--low 0.25] [--ttft-ms 2000] [--tpot-ms 100] -> bench/results/storms/spike.json

`headrace serve` with a tenant of class premium, whose tier has the goals, and one of class batch; both tiers have every kind of limit. The
saturating rate is what `--concurrency` clients that wait for their answers finish per second. Premium requests come at `--premium` of it,
always; low ones at `--low` of it, and `--times` as many for `--spike-s` after each `--calm-s`. It takes three minutes.

premium     requests within both goals over all of them: `share`; of those that began in a spike or up to AFTER_S behind it: `in_spikes`
missed      the first premium requests that were late, refused or failed: seconds since the begin, TTFT, TPOT, error
low         what the low ones saw;  left: requests that were left at the end
broken      promises that were not kept; with one, the exit status is 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.storms.common import Served, write_result
from bench.storms.paced import (
    END_S,
    SHAPE,
    Sent,
    load_beside,
    saturating_rate,
    summary,
    target_of,
    tiered_server,
    watched,
)
from headrace.bundled import DEFAULT_MODEL
from headrace.lab.datasets import make_requests, send_times
from headrace.lab.environment import environment
from headrace.lab.loadgen import run_load
from headrace.lab.metrics import LoadRecord, Slo
from headrace.lab.report import to_plain

PREMIUM, LOW = "gold", "nightly"
"""Tenants, and their tiers."""

MIN_SHARE = 0.999
"""Of the premium requests, within both goals."""

AFTER_S = 10.0
"""Seconds after a spike that count as its: what it left behind is still served."""

SATURATE_S = 10.0
MAX_MISSED = 20
"""Missed requests that are listed."""


def low_times(given: argparse.Namespace, rate: float) -> list[float]:
    """Moments of the low requests: `rate` per second, `given.times` as many in the spikes."""
    times: list[float] = []
    for number, (begin_s, end_s) in enumerate(phases(given)):
        of_phase = rate * (given.times if number % 2 else 1.0)
        times += [begin_s + at for at in send_times(round((end_s - begin_s) * of_phase), rate=of_phase, seed=number)]
    return times


def phases(given: argparse.Namespace) -> list[tuple[float, float]]:
    """Begin and end of each calm and each spike in turn, in seconds since the begin."""
    found, at = [], 0.0
    for number in range(2 * given.spikes + 1):
        begin, at = at, at + (given.spike_s if number % 2 else given.calm_s)
        found.append((begin, at))
    return found


async def run(server: Served, given: argparse.Namespace) -> dict[str, Any]:
    rate = await saturating_rate(target_of(server, given.model, LOW, max_concurrency=given.concurrency), SATURATE_S)
    seconds = phases(given)[-1][1]
    num_premium = round(given.premium * rate * seconds)
    async with watched(server) as held:
        with load_beside(target_of(server, given.model, LOW), low_times(given, given.low * rate), seed=101) as load:
            requests = make_requests(num_premium, SHAPE, seed=100)
            await asyncio.sleep(load.begins_s - time.monotonic())
            premium = await run_load(
                target_of(server, given.model, PREMIUM), requests, send_times(num_premium, rate=given.premium * rate, seed=1)
            )
            low = await load.stop()
        idle_after_s = await held.until_idle()
    found = {"saturating_rate": round(rate, 2), "premium": of_premium(premium, low, given)}
    found["missed"] = list(missed(premium, low, given))
    found["low"] = {**summary(low.records, seconds), "left": low.num_left}
    return {**found, **held.summary(), "idle_after_s": idle_after_s}


def of_premium(records: Sequence[LoadRecord], low: Sent, given: argparse.Namespace) -> dict[str, Any]:
    spikes = [(low.began_s + begin, low.began_s + end + AFTER_S) for begin, end in phases(given)[1::2]]
    within = [record for record in records if any(begin <= record.intended_s < end for begin, end in spikes)]
    return {
        **summary(records, phases(given)[-1][1], slo_of(given)),
        "share": share(records, given),
        "in_spikes": {"requests": len(within), "share": share(within, given)},
    }


def slo_of(given: argparse.Namespace) -> Slo:
    return Slo(ttft_s=given.ttft_ms / 1000, tpot_s=given.tpot_ms / 1000)


def share(records: Sequence[LoadRecord], given: argparse.Namespace) -> float | None:
    """None: there are none."""
    slo = slo_of(given)
    return round(sum(map(slo.is_met_by, records)) / len(records), 5) if records else None


def missed(records: Sequence[LoadRecord], low: Sent, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    slo = slo_of(given)
    for record in [record for record in records if not slo.is_met_by(record)][:MAX_MISSED]:
        yield {
            "at_s": round(record.intended_s - low.began_s, 2),
            "ttft_s": record.ttft_s,
            "tpot_s": record.tpot_s,
            "error": record.error,
        }


def broken_promises(found: dict[str, Any]) -> Iterator[str]:
    """What breaks a promise, one line each."""
    premium, low = found["premium"], found["low"]
    for name, part in (("all", premium), ("in spikes", premium["in_spikes"])):
        if part["share"] is None or part["share"] < MIN_SHARE:
            yield f"premium, {name}: {part['share']} of {part['requests']} requests met their goals, less than {MIN_SHARE}"
    if premium["refused"] or premium["errors"]:
        yield f"premium: {premium['refused']} requests were refused, errors {premium['errors']}"
    if low["refused"] and low["with_retry"] < 1:
        yield f"only {low['with_retry']} of the low requests' refusals had Retry-After"
    if set(low["errors"]) - {"timeout"}:
        yield f"low requests' errors: {low['errors']}"
    if found["idle_after_s"] > END_S:
        yield f"requests that were left were still open after {END_S:g} s"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--spikes", type=int, default=3)
    parser.add_argument("--spike-s", type=float, default=20.0)
    parser.add_argument("--calm-s", type=float, default=15.0)
    parser.add_argument("--times", type=float, default=12.0)
    parser.add_argument("--premium", type=float, default=0.25)
    parser.add_argument("--low", type=float, default=0.25)
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--no-file", action="store_true")
    given = parser.parse_args(words)
    before = environment()
    tiers = {PREMIUM: {"class": "premium", "weight": 4.0, "ttft_ms": given.ttft_ms, "tpot_ms": given.tpot_ms}, LOW: {"class": "batch"}}
    with tiered_server(given.model, tiers) as server:
        found = asyncio.run(run(server, given))
    broken = list(broken_promises(found))
    print(json.dumps(to_plain(found), indent=1), *broken, sep="\n", flush=True)
    if not given.no_file:
        write_result("spike", {"environment": before, "settings": vars(given), **found, "broken": broken})
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
