"""Makes the arrivals of a simulation, from a seed or a trace."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.lab.datasets import WorkloadShape, draw_requests

MAX_LINE_BYTES = 1 << 20

TRACE_BLOCK_TOKENS = 512
"""Tokens that one entry of `hash_ids` stands for."""

MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Arrival:
    """at: seconds after the start"""

    at: float
    prompt_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Spike:
    begin_s: float
    seconds: float
    factor: float


def drawn(rate: float, duration_s: float, shape: WorkloadShape, *, seed: int = 0, spike: Spike | None = None) -> Iterator[Arrival]:
    """Poisson arrivals, one by one, so that only prompts of open requests are in memory."""
    for at, request in zip(_times(rate, duration_s, spike, random.Random(seed)), draw_requests(shape, seed=seed), strict=False):
        yield Arrival(at, request.prompt_ids, request.output_tokens)


def _times(rate: float, duration_s: float, spike: Spike | None, draw: random.Random) -> Iterator[float]:
    begin, end = (min(each, duration_s) for each in ((spike.begin_s, spike.begin_s + spike.seconds) if spike else (duration_s, duration_s)))
    for start, stop, factor in ((0.0, begin, 1.0), (begin, end, spike.factor if spike else 1.0), (end, duration_s, 1.0)):
        at = start
        while (at := at + draw.expovariate(rate * factor)) < stop:
            yield at


def expected_requests(rate: float, duration_s: float, spike: Spike | None) -> float:
    begin, end = (min(each, duration_s) for each in ((spike.begin_s, spike.begin_s + spike.seconds) if spike else (0.0, 0.0)))
    return rate * (duration_s + (end - begin) * ((spike.factor if spike else 1.0) - 1.0))


def read_trace(file: Path) -> Iterator[Arrival]:
    """JSON lines: `timestamp` (milliseconds), `input_length`, `output_length`, `hash_ids`. Raises ConfigError."""
    try:
        stream = file.open("rb")
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read ({error.strerror})") from None
    with stream:
        last, number = -1.0, 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{file}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise ConfigError(where, f"is longer than {MAX_LINE_BYTES} bytes")
            if not line.strip():
                continue
            arrival = _arrival(line, where, number)
            if arrival.at < last:
                raise ConfigError(where, "is earlier than the line before it", "Sort the trace by timestamp.")
            last = arrival.at
            yield arrival


def _arrival(line: bytes, where: str, number: int) -> Arrival:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(where, "is not JSON") from None
    if not isinstance(entry, dict):
        raise ConfigError(where, "is not a JSON object")
    num_prompt, num_output = (_count(entry, name, where) for name in ("input_length", "output_length"))
    hashes = entry.get("hash_ids") or []
    if not isinstance(hashes, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in hashes):
        raise ConfigError(f"{where}: hash_ids", "must be a list of integers")
    timestamp = entry.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e12:
        raise ConfigError(f"{where}: timestamp", "must be a number of milliseconds from 0 on")
    return Arrival(timestamp / 1000, _prompt(num_prompt, hashes, number), num_output)


def _count(entry: dict[str, object], name: str, where: str) -> int:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise ConfigError(f"{where}: {name}", f"must be an integer from 1 to {MAX_TOKENS}")
    return value


def _prompt(num_tokens: int, hashes: list[int], number: int) -> tuple[int, ...]:
    """Token ids of a prompt: equal hashes give equal tokens."""
    ids: list[int] = []
    for each in hashes:
        ids += [1 + (each * 1_000_003 + place) % 2_000_000_011 for place in (0, 1)] * (TRACE_BLOCK_TOKENS // 2)
        if len(ids) >= num_tokens:
            return tuple(ids[:num_tokens])
    own = 1 + (number * 7_368_787) % 2_000_000_011
    return tuple(ids + [own] * (num_tokens - len(ids)))
