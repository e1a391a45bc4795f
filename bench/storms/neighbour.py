"""Measures a noisy neighbour on a real deployment: one tenant's times to the first token, alone and beside another with fifty times its
load.

    python -m bench.storms.neighbour [--model headrace-tiny] [--requests 300] [--rate 4] [--times 50] [--policy priority]
        [--neighbour-tokens 32] [--tpot-ms MS] -> bench/results/storms/neighbour.json (neighbour-POLICY.json of another policy)

`headrace serve` with API keys of two tenants of one tier, which has every kind of limit. The victim sends `--requests` at random moments,
`--rate` a second, and nothing else runs. Then the neighbour sends `--times` as many a second until it has all the open requests that a
tenant may have, and goes on, refused or not, while the victim sends again, at the same moments; then it leaves. It takes three minutes.

quiet, shared     what the victim saw; neighbour: what its neighbour saw, `left` with the requests that it left
ratio             the victim's p99 of the time to the first token, `shared` over `quiet`
most_open         most requests that were open at once, of both; idle_after_s: seconds until all that the neighbour left had ended
broken            promises that were not kept; with one, the exit status is 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from bench.storms.common import Served, write_result
from bench.storms.paced import (
    END_S,
    MAX_REQUESTS,
    SAMPLE_S,
    SHAPE,
    Held,
    Sent,
    load_beside,
    summary,
    target_of,
    tiered_server,
    watched,
)
from headrace.bundled import DEFAULT_MODEL
from headrace.gateway.http.config import Limits
from headrace.gateway.site import SEVERAL_TENANTS_SHARE
from headrace.lab.datasets import make_requests, send_times
from headrace.lab.environment import environment
from headrace.lab.loadgen import run_load
from headrace.lab.metrics import LoadRecord
from headrace.lab.report import to_plain

TIER = "standard"
MAX_OPEN = int(Limits().max_requests * SEVERAL_TENANTS_SHARE)
"""Open requests of one tenant, at most."""

MAX_RATIO = 1.2
MAX_WAIT_S = 600.0
"""`admission.max_wait_s` of the site in seconds: a slow machine too refuses the neighbour for its open requests, not for its wait."""

FILL_S = 40.0
"""Seconds that the neighbour has to fill its part before the victim begins all the same."""

NEIGHBOURS_PATIENCE_S = 300.0
"""Seconds after which the neighbour would give a request up: longer than it is there."""

NUM_WARM_UP, AT_ONCE = 64, 8
"""Requests before anything is measured, and how many of them at a time: the engine learns what its steps cost."""


async def ask(server: Served, given: argparse.Namespace, *, seed: int) -> list[LoadRecord]:
    """The victim's records. seed: of its prompts; the moments are always the same."""
    times = send_times(given.requests, rate=given.rate, seed=0)
    return await run_load(target_of(server, given.model, "victim"), make_requests(given.requests, SHAPE, seed=seed), times)


async def filled(held: Held) -> None:
    """Until the neighbour has as many open requests as it may have, FILL_S at most."""
    ends_s = time.monotonic() + FILL_S
    while held.num_open < MAX_OPEN and time.monotonic() < ends_s:
        await asyncio.sleep(SAMPLE_S / 4)


async def shared(server: Served, given: argparse.Namespace, held: Held) -> tuple[list[LoadRecord], Sent]:
    """Records of the victim beside its neighbour, and of the neighbour."""
    rate = given.times * given.rate
    num_requests = min(MAX_REQUESTS, int(rate * (FILL_S + given.requests / given.rate)))
    target = target_of(server, given.model, "neighbour", patience_s=NEIGHBOURS_PATIENCE_S)
    shape = replace(SHAPE, output_tokens=given.neighbour_tokens)
    with load_beside(target, send_times(num_requests, rate=rate, seed=1), seed=101, shape=shape) as load:
        await asyncio.sleep(load.begins_s - time.monotonic())
        await filled(held)
        return await ask(server, given, seed=2), await load.stop()


async def run(server: Served, given: argparse.Namespace) -> dict[str, Any]:
    warm_up = make_requests(NUM_WARM_UP, SHAPE, seed=3)
    await run_load(target_of(server, given.model, "victim", max_concurrency=AT_ONCE), warm_up, [0.0] * NUM_WARM_UP)
    quiet = await ask(server, given, seed=1)
    async with watched(server) as held:
        beside, flood = await shared(server, given, held)
        idle_after_s = await held.until_idle()
    seconds = given.requests / given.rate
    found: dict[str, Any] = {"quiet": summary(quiet, seconds), "shared": summary(beside, seconds)}
    found["ratio"] = ratio(found)
    found["neighbour"] = {**summary(flood.records, duration_s(flood)), "left": flood.num_left}
    return {**found, **held.summary(), "idle_after_s": idle_after_s}


def ratio(found: dict[str, Any]) -> float | None:
    quiet, beside = (found[part]["ttft_s"].get("p99") for part in ("quiet", "shared"))
    return round(beside / quiet, 3) if quiet and beside else None


def duration_s(sent: Sent) -> float:
    return max((record.end_s for record in sent.records), default=sent.began_s + 1.0) - sent.began_s


def broken_promises(found: dict[str, Any]) -> Iterator[str]:
    """What breaks a promise, one line each."""
    for part in ("quiet", "shared"):
        victim = found[part]
        if victim["refused"] or victim["errors"]:
            yield f"{part}: {victim['refused']} of the victim's requests were refused, errors {victim['errors']}"
    if found["ratio"] is None or found["ratio"] > MAX_RATIO:
        yield f"the victim's p99 is {found['ratio']} times that of the quiet run, more than {MAX_RATIO}"
    neighbour = found["neighbour"]
    if found["most_open"] < MAX_OPEN or not neighbour["refused"]:
        yield f"no flood: {found['most_open']} requests were open at most, {neighbour['refused']} of the neighbour's were refused"
    elif neighbour["with_retry"] < 1:
        yield f"only {neighbour['with_retry']} of the neighbour's refusals had Retry-After"
    if neighbour["errors"]:
        yield f"the neighbour's errors: {neighbour['errors']}"
    if found["idle_after_s"] > END_S:
        yield f"requests that the neighbour left were still open after {END_S:g} s"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--times", type=float, default=50.0)
    parser.add_argument("--policy", default="priority")
    parser.add_argument("--neighbour-tokens", type=int, default=SHAPE.output_tokens)
    parser.add_argument("--tpot-ms", type=float, default=0.0, help="goal of both tenants for further tokens, which bounds steps; 0: none")
    parser.add_argument("--no-file", action="store_true")
    given = parser.parse_args(words)
    before = environment()
    tenants = {"victim": TIER, "neighbour": TIER}
    gateway = {"admission": {"max_wait_s": MAX_WAIT_S}}
    with tiered_server(
        given.model,
        {TIER: {"tpot_ms": given.tpot_ms} if given.tpot_ms else {}},
        tier_of=tenants,
        engine={"queue_policy": given.policy},
        gateway=gateway,
    ) as server:
        found = asyncio.run(run(server, given))
    broken = list(broken_promises(found))
    print(json.dumps(to_plain(found), indent=1), *broken, sep="\n", flush=True)
    if not given.no_file:
        name = "neighbour" if given.policy == "priority" else f"neighbour-{given.policy}"
        write_result(name, {"environment": before, "settings": vars(given), **found, "broken": broken})
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
