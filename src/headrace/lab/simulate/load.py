"""Makes the arrivals of a simulation, from a seed or a trace."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.lab.datasets import HIGH_ID, LOW_ID, WorkloadShape, draw_requests

MAX_LINE_BYTES = 1 << 20

TRACE_BLOCK_TOKENS = 512
"""Tokens that one entry of `hash_ids` stands for where a line has no `block_size`."""

MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Arrival:
    """at: seconds after the start; session: empty: none"""

    at: float
    prompt_ids: tuple[int, ...]
    output_tokens: int
    session: str = ""


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


def read_trace(file: Path, *, seed: int = 0, low_id: int = LOW_ID, high_id: int = HIGH_ID) -> Iterator[Arrival]:
    """JSON lines: `timestamp` (milliseconds), `input_length`, `output_length`, and `hash_ids` of the blocks of `block_size` tokens that the
    prompt begins with. Equal ids become equal tokens, drawn from [low_id, high_id). Raises ConfigError.
    """
    tokens = _Tokens(seed, tuple(range(low_id, high_id)))
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
            arrival = _arrival(line, where, number, tokens)
            if arrival.at < last:
                raise ConfigError(where, "is earlier than the line before it", "Sort the trace by timestamp.")
            last = arrival.at
            yield arrival


def _arrival(line: bytes, where: str, number: int, tokens: _Tokens) -> Arrival:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(where, "is not JSON") from None
    if not isinstance(entry, dict):
        raise ConfigError(where, "is not a JSON object")
    num_prompt, num_output = (_count(entry, name, where) for name in ("input_length", "output_length"))
    block_size = _count(entry, "block_size", where) if "block_size" in entry else TRACE_BLOCK_TOKENS
    hashes = entry.get("hash_ids") or []
    if not isinstance(hashes, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in hashes):
        raise ConfigError(f"{where}: hash_ids", "must be a list of integers")
    timestamp = entry.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e12:
        raise ConfigError(f"{where}: timestamp", "must be a number of milliseconds from 0 on")
    return Arrival(timestamp / 1000, tokens.prompt(num_prompt, hashes, block_size, number), num_output)


def _count(entry: dict[str, object], name: str, where: str) -> int:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise ConfigError(f"{where}: {name}", f"must be an integer from 1 to {MAX_TOKENS}")
    return value


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Draws a trace's tokens: the same for the same name, and others for each seed."""

    seed: int
    vocabulary: Sequence[int]

    def prompt(self, num_tokens: int, hashes: Sequence[int], block_size: int, number: int) -> tuple[int, ...]:
        """number: of the line, which the tokens that no hash stands for are made of"""
        ids: list[int] = []
        for each in hashes:
            if len(ids) >= num_tokens:
                break
            ids += self._drawn(f"hash {each}", min(block_size, num_tokens - len(ids)))
        return (*ids, *self._drawn(f"line {number}", num_tokens - len(ids)))

    def _drawn(self, name: str, count: int) -> list[int]:
        return random.Random(f"{self.seed}, {name}").choices(self.vocabulary, k=count) if count else []
