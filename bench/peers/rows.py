"""Measures each row of the comparison by one kind of question to an engine: how long do these requests take?"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

LOW_ID, HIGH_ID = 10, 31_000
"""Prompt ids are drawn from here: all shapes have at least 32,000 tokens, and the lowest are control tokens."""
PREFILL_LENGTHS = (128, 512, 2048)
STREAM_COUNTS = (1, 2, 4, 8, 16, 32, 64)
DECODE_TOKENS = 64
LONGEST_DECODE_PROMPT, DECODE_PROMPTS_TOGETHER = 128, 1024
"""Prompt tokens of one stream, and of all streams together: the time of long prompts would drown that of the tokens after them."""
NUM_MIXED = 32
MIXED_PROMPTS, MIXED_ANSWERS = (16, 256), (16, 128)
STARTUP_PROMPT = 16
PREFILL_REPEATS = 3

Ids = list[int]
Ask = Callable[[list[Ids], list[int]], float]
"""(prompts, tokens to generate for each) -> seconds from handing all of them in to the last token."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A row's value, and the single measurements it is made of. load: see `cells.Outcome`."""

    value: float
    unit: str
    samples: tuple[float, ...]
    load: Mapping[str, float | None] = field(default_factory=dict)


def row_names() -> tuple[str, ...]:
    """Rows that are questions. `startup` and `memory` are looked at from outside."""
    return (*(f"prefill-{n}" for n in PREFILL_LENGTHS), *(f"decode-{n}" for n in STREAM_COUNTS), "mixed-32")


def prompt(length: int, rng: random.Random) -> Ids:
    return [rng.randrange(LOW_ID, HIGH_ID) for _ in range(length)]


def decode_prompt(streams: int) -> int:
    """Prompt tokens of each of that many streams."""
    return min(LONGEST_DECODE_PROMPT, DECODE_PROMPTS_TOGETHER // streams)


def measure(row: str, ask: Ask, *, seed: int) -> Figure:
    """Ask what the row needs. Equal seeds give equal requests to every engine."""
    rng = random.Random(seed)
    kind, _, number = row.partition("-")
    if kind == "prefill":
        return _prefill(int(number), ask, rng)
    if kind == "decode":
        return _decode(int(number), ask, rng)
    if row == "mixed-32":
        return _mixed(ask, rng)
    raise ValueError(f"no row {row!r}; known: {', '.join(row_names())}")


def measure_in_turns(row: str, ask: Ask, beside: Ask, *, seed: int) -> tuple[Figure, Figure]:
    """The row of two engines. Each question goes to both before the next one is asked, so that a slow minute meets both."""
    answers: list[float] = []

    def ask_both(prompts: list[Ids], tokens: list[int]) -> float:
        seconds = ask(prompts, tokens)
        answers.append(beside(prompts, tokens))
        return seconds

    figure = measure(row, ask_both, seed=seed)
    given = iter(answers)
    return figure, measure(row, lambda _prompts, _tokens: next(given), seed=seed)


def _prefill(length: int, ask: Ask, rng: random.Random) -> Figure:
    return prefill_figure(length, tuple(ask([prompt(length, rng)], [1]) for _ in range(PREFILL_REPEATS)))


def prefill_figure(length: int, seconds: tuple[float, ...]) -> Figure:
    return Figure(length / statistics.median(seconds), "tok/s", seconds)


def _decode(streams: int, ask: Ask, rng: random.Random) -> Figure:
    """The time of 64 tokens less the time of one: what the remaining 63 took. All are asked with different prompts.

    One is asked before and after, since prompts take as long as the tokens: one of them in a slow second would move the row by a tenth.
    """
    length = decode_prompt(streams)

    def seconds(tokens: int) -> float:
        return ask([prompt(length, rng) for _ in range(streams)], [tokens] * streams)

    before, whole, after = seconds(1), seconds(DECODE_TOKENS), seconds(1)
    return Figure(streams * (DECODE_TOKENS - 1) / (whole - (before + after) / 2), "tok/s", (before, whole, after))


def mixed_requests(rng: random.Random) -> tuple[list[Ids], list[int]]:
    prompts = [prompt(rng.randint(*MIXED_PROMPTS), rng) for _ in range(NUM_MIXED)]
    return prompts, [rng.randint(*MIXED_ANSWERS) for _ in range(NUM_MIXED)]


def _mixed(ask: Ask, rng: random.Random) -> Figure:
    prompts, counts = mixed_requests(rng)
    seconds = ask(prompts, counts)
    return Figure(sum(counts) / seconds, "tok/s", (seconds,))
