"""Sends chat completions at a fixed rate for `bench.gateway_overhead`. Each is timed from the moment at which it was to be sent.

python -m bench.overhead.client PORT --rate 100 --seconds 10 [--key KEY]      prints one JSON object
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter

import aiohttp
import uvloop

SPIN_S = 0.001
"""Seconds before a request's moment at which its task stops sleeping and yields instead, as timers come up to this much late."""

MAX_SPINNING_RATE = 100.0
"""Requests per second above which nothing spins: at 500 a second it would keep half a core from the gateway, which shares them."""

BODY = json.dumps(
    {
        "model": "paced",
        "messages": [{"role": "system", "content": "You answer shortly."}, {"role": "user", "content": "What is a headrace?"}],
        "max_tokens": 16,
    }
).encode()
WHOLE = b'"completion_tokens"'
"""In every whole answer: its usage, which stands at its end."""

TIMEOUT_S = 30.0
WARM_REQUESTS = 50


def percentiles(values: list[float]) -> dict[str, float]:
    """Milliseconds. values: seconds; what failed is infinite"""
    ranked = sorted(values)
    return {name: round(1000 * ranked[min(len(ranked) - 1, int(share * len(ranked)))], 3) for name, share in SHARES.items()}


SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


async def load(url: str, key: str, rate: float, seconds: float) -> dict[str, object]:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    statuses: Counter[str] = Counter()
    latencies: list[float] = []
    lags: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=timeout) as session:

        async def ask() -> bool:
            try:
                async with session.post(url, data=BODY) as response:
                    body = await response.read()
                    statuses[str(response.status)] += 1
                    return response.status == 200 and WHOLE in body
            except (aiohttp.ClientError, TimeoutError) as error:
                statuses[type(error).__name__] += 1
                return False

        spin_s = SPIN_S if rate <= MAX_SPINNING_RATE else 0.0

        async def timed(at: float) -> None:
            await asyncio.sleep(max(0.0, at - time.perf_counter() - spin_s))
            while spin_s and time.perf_counter() < at:
                await asyncio.sleep(0)
            lags.append(time.perf_counter() - at)
            is_whole = await ask()
            latencies.append(time.perf_counter() - at if is_whole else float("inf"))

        for _ in range(WARM_REQUESTS):
            await ask()
        statuses.clear()
        begin = time.perf_counter() + 0.1
        tasks = []
        for number in range(int(rate * seconds)):
            at = begin + number / rate
            tasks.append(asyncio.create_task(timed(at)))
            if number % 64 == 63:  # tasks are made as they are needed
                await asyncio.sleep(max(0.0, at - time.perf_counter() - 0.5))
        await asyncio.gather(*tasks)
    whole = sum(latency != float("inf") for latency in latencies)
    return {
        "rate": rate,
        "seconds": seconds,
        "sent": WARM_REQUESTS + len(latencies),
        "whole": whole,
        "share_whole": round(whole / len(latencies), 6),
        "statuses": dict(statuses),
        "latency_ms": percentiles(latencies),
        "client_lag_ms": percentiles(lags),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--key", default="")
    given = parser.parse_args()
    print(json.dumps(uvloop.run(load(f"http://127.0.0.1:{given.port}/v1/chat/completions", given.key, given.rate, given.seconds))))


if __name__ == "__main__":
    main()
