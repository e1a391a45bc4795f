"""Tests whether a tenant can see what another one has asked: pairs of probes at every cache, compared by the answers and their times.

    python -m bench.storms.cache_probes [--pairs 2000] [--caches prefix,session]     -> bench/results/storms/cache-probes.json

One tenant leaves an entry. Then another tenant sends a pair of probes in a random order: one for that entry, one for an entry that nothing
left. AUC is the probability that the probe whose entry is there took less time; 0.5 is a guess. A cache holds if AUC is within `auc_bound`
of 0.5, and both kinds of probe see the same facts: status, headers, token counts, the fields of the answer. `auc_bound` is the 99 %
interval of a guess by as many pairs. `own` are pairs of one tenant alone, which finds its entries; `hits` is the share of the entries whose
answer says so. Exit status 1: a cache does not hold, or a tenant does not find its own entries.

Each cache is probed by itself, with the others off. Times depend on what else the machine does, which widens both sides alike.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import re
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.storms.common import served, write_result
from headrace.lab.environment import environment

CONFIG = """
models: [{engine: {model: headrace-tiny}}]
gateway:
  port: 0
  cache: {enabled: true}
  api_keys: [{key: key-of-the-first, tenant: first}, {key: key-of-the-other, tenant: other}]
"""
FIRST, OTHER = "key-of-the-first", "key-of-the-other"
CHAT = "/v1/chat/completions"
FILLER = " ".join(f"word{number}" for number in range(60))
NO_FACTS = ("date", "x-request-id", "content-length")
"""Headers that differ from answer to answer. The length is that of the model's text; everything else of the body is compared."""

Z_99 = 2.576
"""Standard deviations on either side of the middle that hold 99 % of a normal distribution."""

SHARED_TOKENS = 64
"""Prompts of one tenant share a beginning of at most this many tokens, the template's."""

HELLO_TOKENS = 15
"""The first prompt of a session has at most this many tokens, and each later one has more."""

Facts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """elapsed_s: until the first byte of its body"""

    elapsed_s: float
    status: int
    headers: dict[str, str]
    body: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What one probe shows. is_hit: the answer says that an entry was there"""

    elapsed_s: float
    facts: Facts
    is_hit: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """How one cache is probed. Entries are named by a secret; the two requests of a pair differ in it alone.

    leave  leaves an entry;  look  asks for one
    """

    leave: Callable[[Prober, str], Seen]
    look: Callable[[Prober, str], Seen]


class Prober:
    """One connection of one tenant."""

    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}

    def chat(self, content: str = "Hello", headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0, "cache": False, **fields}
        return self.request("POST", CHAT, json.dumps(body), headers or {})

    def request(self, method: str, path: str, body: str = "", headers: dict[str, str] | None = None) -> Answer:
        began = time.perf_counter()
        self._connection.request(method, path, body or None, self._headers | (headers or {}))
        answer = self._connection.getresponse()
        first = answer.read1(1)
        elapsed_s = time.perf_counter() - began
        return Answer(elapsed_s, answer.status, dict(answer.getheaders()), (first + answer.read()).decode())


def seen(answer: Answer, secret: str, *, is_hit: bool) -> Seen:
    """The facts of an answer: its status, its headers, and its body without what the model said."""
    headers = [f"{name.lower()}: {value}" for name, value in answer.headers.items() if name.lower() not in NO_FACTS]
    parts = [line.removeprefix("data: ") for line in answer.body.splitlines()]
    shapes = [json.dumps(shape(json.loads(part))).replace(secret, "SECRET") for part in parts if part.startswith("{")]
    return Seen(answer.elapsed_s, (str(answer.status), *sorted(headers), *shapes), is_hit)


def shape(value: Any, name: str = "") -> Any:
    """JSON without what each answer has anew: its id, its time, and the text that the model made."""
    if isinstance(value, dict):
        return {key: shape(part, key) for key, part in value.items()}
    if isinstance(value, list):
        return [shape(part, name) for part in value]
    return "" if name in ("id", "created", "updated", "content", "finish_reason", "stop_reason") else value


def question(secret: str) -> str:
    """A question of its own, in as many tokens as every other."""
    return " ".join(str(int(digit, 16) % 10) for digit in secret)


def ask_response(tenant: Prober, secret: str) -> Seen:
    answer = tenant.chat(question(secret), cache=True)
    return seen(answer, secret, is_hit=answer.headers["x-headrace-cache"] == "hit")


def ask_prefix(tenant: Prober, secret: str) -> Seen:
    answer = tenant.chat(f"{question(secret)} {FILLER}", stream=True, stream_options={"include_usage": True})
    found = re.search(r'"cached_tokens":(\d+)', answer.body)
    return seen(answer, secret, is_hit=found is not None and int(found.group(1)) > SHARED_TOKENS)


def ask_idempotency(tenant: Prober, secret: str) -> Seen:
    answer = tenant.chat(headers={"idempotency-key": secret})
    return seen(answer, secret, is_hit=answer.headers.get("idempotent-replayed") == "true")


def ask_session(tenant: Prober, secret: str) -> Seen:
    answer = tenant.chat(headers={"x-session-id": secret})
    return seen(answer, secret, is_hit=json.loads(answer.body)["usage"]["prompt_tokens"] > HELLO_TOKENS)


def show_session(tenant: Prober, secret: str) -> Seen:
    answer = tenant.request("GET", f"/v1/sessions/{secret}")
    return seen(answer, secret, is_hit=answer.status == 200)


PROBES = {
    "response": Probe(ask_response, ask_response),
    "prefix": Probe(ask_prefix, ask_prefix),
    "idempotency": Probe(ask_idempotency, ask_idempotency),
    "session": Probe(ask_session, ask_session),
    "session_shown": Probe(ask_session, show_session),
}


def auc(present: Sequence[float], absent: Sequence[float]) -> float:
    """Probability that a time of `present` is below one of `absent`, by ranks; ties count half."""
    ranked = sorted([(value, True) for value in present] + [(value, False) for value in absent])
    above = sum(rank for rank, (_, is_present) in enumerate(ranked, start=1) if is_present)
    num, num_absent = len(present), len(absent)
    return 1 - (above - num * (num + 1) / 2) / (num * num_absent)


def auc_bound(num_pairs: int) -> float:
    """How far from 0.5 the AUC of two equal distributions comes in 99 of 100 runs (Mann-Whitney)."""
    return Z_99 * math.sqrt((2 * num_pairs + 1) / (12 * num_pairs * num_pairs))


def probe(port: int, name: str, pairs: int, asking: str, rng: random.Random) -> dict[str, Any]:
    leaving, looking = Prober(port, FIRST), Prober(port, asking)
    found: dict[bool, list[Seen]] = {True: [], False: []}
    for _ in range(pairs):
        secrets = {True: uuid.UUID(int=rng.getrandbits(128)).hex, False: uuid.UUID(int=rng.getrandbits(128)).hex}
        PROBES[name].leave(leaving, secrets[True])
        for is_present in rng.sample([True, False], 2):
            found[is_present].append(PROBES[name].look(looking, secrets[is_present]))
    times = {is_present: [each.elapsed_s for each in all_seen] for is_present, all_seen in found.items()}
    facts = {is_present: {each.facts for each in all_seen} for is_present, all_seen in found.items()}
    if asking != FIRST and facts[True] != facts[False]:
        print(*sorted(facts[True] ^ facts[False])[:4], sep="\n", file=sys.stderr)
    return {
        "cache": name,
        "pairs": pairs,
        "auc": round(auc(times[True], times[False]), 4),
        "auc_bound": round(auc_bound(pairs), 4),
        "facts_equal": facts[True] == facts[False],
        "hits": sum(each.is_hit for each in found[True]) / pairs,
        "false_hits": sum(each.is_hit for each in found[False]) / pairs,
        "p50_ms": {str(is_present): round(1000 * sorted(each)[pairs // 2], 3) for is_present, each in times.items()},
    }


def holds(row: dict[str, Any], *, is_own: bool) -> bool:
    if is_own:
        return bool(row["hits"] == 1 and row["false_hits"] == 0)
    return bool(row["facts_equal"] and row["hits"] == 0 and abs(row["auc"] - 0.5) <= row["auc_bound"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--caches", default=",".join(PROBES))
    options = parser.parse_args()
    rng = random.Random(7)
    rows: dict[str, list[dict[str, Any]]] = {"cross": [], "own": []}
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "headrace.yaml"
        file.write_text(CONFIG, encoding="utf-8")
        with served("--config", str(file)) as server:
            for name in options.caches.split(","):
                for kind, pairs, asking in (("own", max(20, options.pairs // 20), FIRST), ("cross", options.pairs, OTHER)):
                    row = probe(server.port, name, pairs, asking, rng)
                    row["holds"] = holds(row, is_own=kind == "own")
                    rows[kind].append(row)
                    print(json.dumps({kind: row}), flush=True)
    elapsed_s = round(time.monotonic() - began, 1)
    write_result("cache-probes", {"environment": asdict(environment()), "pairs": options.pairs, "elapsed_s": elapsed_s, **rows})
    sys.exit(0 if all(row["holds"] for kind in rows.values() for row in kind) else 1)


if __name__ == "__main__":
    main()
