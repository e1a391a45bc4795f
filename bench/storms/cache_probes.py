"""Does a tenant see what another one has asked? Pairs of probes at every cache, told apart by headers and by time.

    python -m bench.storms.cache_probes [--pairs 2000]     writes bench/results/storms/cache-probes.json

One tenant asks a question; another tenant then asks the same one, and one that was never asked, in a random order. AUC is the probability
that the time of a probe whose answer is kept for the first tenant is the shorter one of its pair: 0.5 is a guess. Each cache is probed by
itself: the response cache with its answers on, the prefix cache with it off, and keys of `Idempotency-Key`. `own` are pairs of one tenant
alone, which do find their answers. Times depend on what else the machine does, which widens both sides alike.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.storms.common import RESULTS, served
from headrace.lab.environment import environment
from headrace.lab.report import write_json

CONFIG = """
models: [{engine: {model: headrace-tiny}}]
gateway:
  port: 0
  cache: {enabled: true}
  api_keys: [{key: key-of-the-first, tenant: first}, {key: key-of-the-other, tenant: other}]
"""
SHOWN = ("x-headrace-cache", "age", "idempotent-replayed")
FILLER = " ".join(f"word{number}" for number in range(60))


class Prober:
    """One connection of one tenant."""

    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}

    def ask(self, question: str, kind: str, key: str) -> tuple[float, tuple[str | None, ...]]:
        """Seconds, and the status and the headers that caches make."""
        headers = self._headers | ({"idempotency-key": key} if kind == "idempotency" else {})
        body: dict[str, Any] = {"messages": [{"role": "user", "content": f"{question} {FILLER}"}], "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body | {"cache": kind == "response"}), headers)
        answer = self._connection.getresponse()
        answer.read()
        elapsed_s = time.perf_counter() - began
        return elapsed_s, (str(answer.status), *(answer.headers.get(name) for name in SHOWN))


def auc(present: Sequence[float], absent: Sequence[float]) -> float:
    """Probability that a time of `present` is below one of `absent`, by ranks; ties count half."""
    ranked = sorted([(value, True) for value in present] + [(value, False) for value in absent])
    above = sum(rank for rank, (_, is_present) in enumerate(ranked, start=1) if is_present)
    num, others = len(present), len(absent)
    return round(1 - (above - num * (num + 1) / 2) / (num * others), 4)


def probe(port: int, kind: str, pairs: int, asking: str, rng: random.Random) -> dict[str, Any]:
    first, other = Prober(port, "key-of-the-first"), Prober(port, asking)
    times: dict[bool, list[float]] = {True: [], False: []}
    seen: dict[bool, set[tuple[str | None, ...]]] = {True: set(), False: set()}
    for _ in range(pairs):
        asked, fresh = uuid.uuid4().hex, uuid.uuid4().hex
        first.ask(asked, kind, asked)
        for is_present in rng.sample([True, False], 2):
            question = asked if is_present else fresh
            elapsed_s, shown = other.ask(question, kind, question)
            times[is_present].append(elapsed_s)
            seen[is_present].add(shown)
    return {
        "cache": kind,
        "pairs": pairs,
        "auc": auc(times[True], times[False]),
        "headers_equal": seen[True] == seen[False],
        "p50_ms": {str(is_present): round(1000 * sorted(found)[len(found) // 2], 3) for is_present, found in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=2000)
    pairs = parser.parse_args().pairs
    rng = random.Random(7)
    found: dict[str, list[dict[str, Any]]] = {"cross": [], "own": []}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "headrace.yaml"
        file.write_text(CONFIG, encoding="utf-8")
        with served("--config", str(file)) as server:
            for kind in ("response", "prefix", "idempotency"):
                found["cross"].append(probe(server.port, kind, pairs, "key-of-the-other", rng))
                found["own"].append(probe(server.port, kind, max(20, pairs // 20), "key-of-the-first", rng))
                print(json.dumps({name: rows[-1] for name, rows in found.items()}), flush=True)
    write_json(RESULTS / "cache-probes.json", {"environment": asdict(environment()), "pairs": pairs, **found})


if __name__ == "__main__":
    main()
