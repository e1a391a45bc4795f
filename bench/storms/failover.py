"""Checks that every stream ends, with the unbroken answer to the byte, while engines are killed or stopped.

    python -m bench.storms.failover [--streams 2000] [--parallel 16] [--replicas 2] [--fault kill|stop] [--every 4] [--plain]
        -> bench/results/storms/failover-FAULT-REPLICAS.json

Every kind of request (`kinds`) is first answered alone, without faults, for each of its seeds. Then `--streams` of them run, `--parallel`
at a time, while every `--every` seconds, more or less, an engine chosen at random is killed (SIGKILL), or stopped and continued 1 to 4
seconds later. What a client can see of an answer is compared with the unbroken one: text, log-probabilities, tool calls, finish reasons,
usage.

failed           streams without a whole answer, by what their client saw
different        streams whose answer is another one. 0 with `--deterministic`; `--plain` serves without it
gap_s            longest silence within a stream while it ran, for streams during which there was a fault, and for the others
ready_again_s    from each kill until the killed replica was ready again
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.storms.common import RESULTS, Served, served
from headrace.lab.environment import environment
from headrace.lab.report import write_json

MODEL = "headrace-tiny"
SEEDS = 8
"""Answers of each kind that are compared: a stream takes one of these seeds."""
PATIENCE_S = 180.0
"""A stream that has not ended after this time counts as failed."""

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 3, "maxItems": 6},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def kinds() -> dict[str, dict[str, Any]]:
    """Fields of a chat request by kind; each has a long answer, so that a fault falls into it."""
    long: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    return {
        "greedy": {**long, "temperature": 0},
        "sampled": {**long, "temperature": 1.0, "top_p": 0.95},
        "n": {**long, "temperature": 1.0, "n": 3},
        "logprobs": {**long, "temperature": 0.8, "logprobs": True, "top_logprobs": 3},
        "penalties": {**long, "temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
        "stop": {"max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "n": 2, "stop": [" the end", ". A", "river"]},
        "min_tokens": {"max_tokens": 250, "min_tokens": 120, "temperature": 1.0},
        "schema": {
            "max_tokens": 300,
            "temperature": 1.0,
            "response_format": RESPONSE_FORMAT,
        },
        "tool": {"max_tokens": 200, "temperature": 1.0, "tools": [TOOL], "tool_choice": "required"},
    }


def body_of(kind: str, seed: int) -> dict[str, Any]:
    text = f"Tell me a long story about mill number {seed}."
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 100 + seed,
        **kinds()[kind],
    }


@dataclass(slots=True)
class Answer:
    """What a client saw. error: "" for a whole answer. pieces_at: when each piece came. gap_s: the longest time between two of them"""

    error: str = "no end"
    parts: dict[str, Any] = field(default_factory=dict)
    began_at: float = 0.0
    pieces_at: list[float] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def first_at(self) -> float:
        return self.pieces_at[0] if self.pieces_at else 0.0

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.pieces_at)]

    @property
    def gap_s(self) -> float:
        return max(self.gaps_s, default=0.0)


async def ask(session: aiohttp.ClientSession, port: int, kind: str, seed: int, *, host: str = "127.0.0.1") -> Answer:
    return await streamed(session, port, body_of(kind, seed), host=host)


async def streamed(
    session: aiohttp.ClientSession, port: int, body: dict[str, Any], *, host: str = "127.0.0.1", answer: Answer | None = None
) -> Answer:
    """body: of a chat request with `stream`; answer: a new one, for a caller that looks at it meanwhile"""
    answer = answer or Answer()
    answer.began_at = time.monotonic()
    try:
        url = f"http://{host}:{port}/v1/chat/completions"
        async with asyncio.timeout(PATIENCE_S), session.post(url, json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status} {(await response.text())[:120]}"
            else:
                await _read(response, answer)
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = type(error).__name__
    answer.ended_at = time.monotonic()
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for raw in response.content:
        line = raw.strip()
        if not line.startswith(b"data: "):
            continue
        answer.pieces_at.append(time.monotonic())
        if line == b"data: [DONE]":
            answer.error = ""
            return
        chunk = json.loads(line[6:])
        if "error" in chunk:
            answer.error = str(chunk["error"]["message"])[:120]
            return
        _add(answer.parts, chunk)


def _add(parts: dict[str, Any], chunk: dict[str, Any]) -> None:
    if chunk.get("usage"):
        usage = chunk["usage"]
        parts["usage"] = (usage["prompt_tokens"], usage["completion_tokens"])
    for choice in chunk["choices"]:
        part = parts.setdefault(str(choice["index"]), {"text": "", "calls": {}, "logprobs": [], "finish": None})
        delta = choice["delta"]
        part["text"] += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            made = part["calls"].setdefault(str(call["index"]), {"name": "", "arguments": ""})
            made["name"] += call["function"].get("name") or ""
            made["arguments"] += call["function"].get("arguments") or ""
        if choice.get("logprobs"):
            part["logprobs"] += choice["logprobs"]["content"]
        part["finish"] = choice["finish_reason"] or part["finish"]


class Faults:
    """Kills or stops engines of a server until it is told to end. times: moments of the faults"""

    def __init__(self, server: Served, fault: str, every_s: float, draw: random.Random) -> None:
        self._server, self._fault, self._every_s, self._draw = server, fault, every_s, draw
        self.times: list[float] = []
        self.ready_again_s: list[float] = []

    async def run(self, session: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.sleep(self._every_s * self._draw.uniform(0.5, 1.5))
            engines = self._server.engine_pids
            if not engines:
                continue
            pid = self._draw.choice(engines)
            self.times.append(time.monotonic())
            if self._fault == "kill":
                os.kill(pid, signal.SIGKILL)
                await self._until_ready(session)
            else:
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(self._draw.uniform(1.0, 4.0))
                finally:
                    os.kill(pid, signal.SIGCONT)

    async def _until_ready(self, session: aiohttp.ClientSession) -> None:
        began = time.monotonic()
        await asyncio.sleep(0.3)
        while time.monotonic() - began < 60:
            async with session.get(f"http://127.0.0.1:{self._server.port}/ready?strict") as response:
                if response.status == 200:
                    self.ready_again_s.append(round(time.monotonic() - began, 2))
                    return
            await asyncio.sleep(0.05)


async def storm(server: Served, given: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(given.seed)
    names = list(kinds())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)) as session:
        unbroken = {(kind, seed): await ask(session, server.port, kind, seed) for kind, seed in itertools.product(names, range(SEEDS))}
        broken = {key: answer.error for key, answer in unbroken.items() if answer.error}
        if broken:
            raise SystemExit(f"without any fault: {broken}")
        faults = Faults(server, given.fault, given.every, draw)
        task = asyncio.create_task(faults.run(session))
        todo = iter([(draw.choice(names), draw.randrange(SEEDS)) for _ in range(given.streams)])
        done: list[tuple[str, int, Answer]] = []

        async def client() -> None:
            for kind, seed in todo:
                done.append((kind, seed, await ask(session, server.port, kind, seed)))

        await asyncio.gather(*(client() for _ in range(given.parallel)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return summary(done, unbroken, faults)


def summary(done: Sequence[tuple[str, int, Answer]], unbroken: dict[tuple[str, int], Answer], faults: Faults) -> dict[str, Any]:
    failed = Counter(f"{kind}: {answer.error}" for kind, _, answer in done if answer.error)
    different = Counter(kind for kind, seed, answer in done if not answer.error and answer.parts != unbroken[kind, seed].parts)
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for _, _, answer in done:
        gaps[any(answer.began_at <= moment <= answer.ended_at for moment in faults.times)].append(answer.gap_s)
    return {
        "streams": len(done),
        "by_kind": dict(Counter(kind for kind, _, _ in done)),
        "faults": len(faults.times),
        "streams_during_a_fault": len(gaps[True]),
        "failed": dict(failed),
        "different": dict(different),
        "gap_s": {("during a fault" if hit else "other"): quantiles(found) for hit, found in gaps.items()},
        "ready_again_s": faults.ready_again_s,
    }


def quantiles(found: list[float]) -> dict[str, float]:
    if not found:
        return {}
    ordered = sorted(found)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
        "max": round(ordered[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--fault", choices=("kill", "stop"), default="kill")
    parser.add_argument("--every", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    flags = ["--replicas", str(given.replicas), "--max-num-seqs", "32", *([] if given.plain else ["--deterministic"])]
    with served(MODEL, *flags) as server:
        found = asyncio.run(storm(server, given))
    print(json.dumps(found, indent=1))
    name = f"failover-{given.fault}-{given.replicas}{'-plain' if given.plain else ''}.json"
    write_json(Path(RESULTS / name), {"environment": asdict(environment()), "arguments": vars(given), **found})


if __name__ == "__main__":
    main()
