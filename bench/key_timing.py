"""Tests whether the time in which a wrong key is refused shows how much of the key is right: Welch's t over many timings, as in dudect.

    python -m bench.key_timing [--timings 1000000] [--paths configured,known,asked]     -> bench/results/MACHINE/key-timing.json

There are two classes of wrong keys, in a random order: keys that begin as a valid one does, and keys of random characters. The timed part
is the whole of `Authenticator.principal`, from the request's headers to the refusal, on each of three paths:

configured  the server has keys of the configuration alone
known       it has keys of the store, and the wrong ones are remembered as absent
asked       the same, and every wrong key is new, so that the store's file is asked

`right` is how much of the first class's keys is right: "all but 4" characters, the most that many different keys can have in common; the
first "12" bytes, more than lists of keys show; "none": both classes are random, which shows what the measurement itself gives.

Timings above a percentile of both classes together are left out, for each of several percentiles: an interrupt would hide a difference of
nanoseconds. The criterion is dudect's: every |t| is below 4.5. The exit status is 1 if one is not. (Reparaz, Balasch, Verbauwhede: Dude, is
my code constant time? 2017.)
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.machine import results_file
from headrace.core.clock import Clock
from headrace.core.errors import Unauthorized, Unavailable
from headrace.gateway.access.administration import PREFIX, Administration, NewKey
from headrace.gateway.access.auth import Authenticator
from headrace.gateway.access.key_store import FILE, SqliteKeys
from headrace.gateway.access.principal import ApiKey, digest_of
from headrace.gateway.access.stored_keys import StoredKeys
from headrace.gateway.http.asgi import OPENAI
from headrace.lab.environment import environment
from headrace.lab.report import write_json
from headrace.policy.limits.tier import BUILT_IN_TIERS

LIMIT_T = 4.5
PERCENTILES = (100, 99, 90, 75, 50)
BATCH = 10_000
"""Requests that are made at a time, before they are timed."""

REPEATS = 10
"""How often a wrong key is sent on the path `known`, after it was sent once to be remembered. Each batch has new keys: few keys would be
timed for what they are, such as where their entry lies in memory, not for their class."""

ASKED_DIVISOR = 4
"""The path `asked` is timed 1/N as often as the others: each refusal takes thirty times as long."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
NUM_RIGHT = {"all but 4": -4, "12": 12, "none": len(PREFIX)}
NUM_KEYS = 200
"""Valid keys that the server has."""

Request = tuple[int, Sequence[tuple[bytes, bytes]]]
"""Class and headers."""


def wrong_key(valid: str, num_right: int, rng: random.Random) -> str:
    """The same work for every `num_right`, so that the classes lie in memory alike."""
    drawn = rng.choices(LETTERS, k=len(valid))
    return "".join([right if number < num_right else other for number, (right, other) in enumerate(zip(valid, drawn, strict=True))])


def batch_of(valid: str, num_right: int, num_keys: int, rng: random.Random) -> list[Request]:
    """BATCH requests in a random order. Class 0 has keys of `num_right` right characters, class 1 random ones."""
    lengths = num_right, len(PREFIX)
    keys = [(number, wrong_key(valid, lengths[number], rng)) for number in rng.choices((0, 1), k=num_keys)] * (BATCH // num_keys)
    rng.shuffle(keys)
    return [(number, ((b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode()))) for number, key in keys]


async def timings(
    authenticator: Authenticator, path: str, make: Callable[[int], list[Request]], count: int
) -> tuple[array[int], array[int]]:
    """Nanoseconds of each refusal, by class. make: a batch with as many different keys"""
    taken = array("q"), array("q")
    clock = time.perf_counter_ns
    while len(taken[0]) + len(taken[1]) < count:
        batch = make(BATCH // REPEATS if path == "known" else BATCH)
        if path == "known":
            for headers in {headers for _, headers in batch}:
                with suppress(Unauthorized, Unavailable):
                    await authenticator.principal(headers, OPENAI)
        gc.collect()
        gc.disable()
        for number, headers in batch:
            began = clock()
            try:
                await authenticator.principal(headers, OPENAI)
            except Unauthorized:
                taken[number].append(clock() - began)
            except Unavailable:  # the store took longer than a request waits for it: other work held up the machine
                continue
        gc.enable()
        await asyncio.sleep(0)
    return taken


def welch_t(one: Sequence[int], other: Sequence[int]) -> float:
    error = math.sqrt(statistics.variance(one) / len(one) + statistics.variance(other) / len(other))
    return (statistics.fmean(one) - statistics.fmean(other)) / error


def t_by_percentile(one: Sequence[int], other: Sequence[int]) -> dict[str, float]:
    """t of the timings up to each percentile of both classes together."""
    together = sorted([*one, *other])
    found: dict[str, float] = {}
    for percentile in PERCENTILES:
        most = together[len(together) * percentile // 100 - 1]
        kept = [[taken for taken in each if taken <= most] for each in (one, other)]
        found[str(percentile)] = round(welch_t(kept[0], kept[1]), 3)
    return found


async def measure(path: str, right: str, count: int, state: Path, rng: random.Random) -> dict[str, Any]:
    """right: a row of NUM_RIGHT;  state: an empty folder"""
    admin = Administration(SqliteKeys(str(state / FILE)), tiers=BUILT_IN_TIERS, unix_time=time.time, actor="bench")
    issued = [(await admin.create_key(NewKey(tenant="bench"))).key for _ in range(NUM_KEYS)]
    await admin.close()
    valid = issued[NUM_KEYS // 2]
    make = partial(batch_of, valid, NUM_RIGHT[right] % len(valid), rng=rng)
    if path == "configured":
        keys = [ApiKey(sha256=digest_of(key.encode()).hex(), tenant="bench") for key in issued]
        taken = await timings(Authenticator(keys, {}), path, make, count)
    else:
        clock: Clock = (lambda: 0.0) if path == "known" else time.monotonic  # what is remembered stays so
        async with StoredKeys(SqliteKeys(str(state / FILE)), clock=clock, unix_time=time.time) as stored:
            taken = await timings(Authenticator((), {}, stored), path, make, count)
    found = t_by_percentile(*taken)
    return {
        "path": path,
        "right": right,
        "timings": sum(map(len, taken)),
        "p50_ns": [int(statistics.median(each)) for each in taken],
        "t": found,
        "passes": max(map(abs, found.values())) < LIMIT_T,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timings", type=int, default=1_000_000)
    parser.add_argument("--paths", default="configured,known,asked")
    options = parser.parse_args()
    rng, rows = random.Random(7), list[dict[str, Any]]()
    for path in options.paths.split(","):
        for right in NUM_RIGHT:
            count = options.timings // (ASKED_DIVISOR if path == "asked" else 1)
            with TemporaryDirectory() as folder:
                rows.append(asyncio.run(measure(path, right, count, Path(folder), rng)))
            print(json.dumps(rows[-1]), flush=True)
    write_json(results_file("key-timing"), {"environment": asdict(environment()), "limit_t": LIMIT_T, "cases": rows})
    sys.exit(0 if all(row["passes"] for row in rows) else 1)


if __name__ == "__main__":
    main()
