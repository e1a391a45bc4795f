"""Tests tokens drawn by the kernel against the reference implementation's: the same, wherever u does not fall on a border."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from headrace.tensor.kernels.cpu import backend as cpu
from headrace.tensor.kernels.cpu import draw
from headrace.tensor.kernels.cpu.jit import launch
from headrace.tensor.kernels.filters import FilterLimits, Floats
from headrace.tensor.kernels.filters import draw as plain_draw

pytestmark = pytest.mark.pure

NEAR = 1e-5
"""By so little may a running sum miss u times the whole and still be on either side."""


def limits(rows: int, *, temperature: float = 1.0, top_k: int, top_p: float = 1.0, min_p: float = 0.0) -> FilterLimits:
    return FilterLimits(
        np.full(rows, temperature, np.float32), np.full(rows, top_k), np.full(rows, top_p, np.float64), np.full(rows, min_p, np.float32)
    )  # fmt: skip


def both(logits: Floats, u: np.ndarray, asked: FilterLimits) -> tuple[np.ndarray, np.ndarray]:
    peak = logits.max(axis=1)
    return plain_draw(logits, peak, u, asked), cpu.draw_tokens(logits, peak, u, asked)


def shares(logits: Floats, temperature: float) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max(axis=1, keepdims=True)) / temperature)
    sums: np.ndarray = weights.cumsum(axis=1) / weights.sum(axis=1, keepdims=True)
    return sums


@pytest.mark.parametrize("vocab", [1, 7, 255, 256, 257, 3000])
@pytest.mark.parametrize("temperature", [0.05, 0.8, 3.0])
def test_without_filters_the_token_is_where_the_running_sum_passes_u(vocab: int, temperature: float) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (64, vocab)).astype(np.float32)
    u = rng.random(64)
    plain, fast = both(logits, u, limits(64, temperature=temperature, top_k=vocab))
    sums = shares(logits, temperature)
    for row in np.flatnonzero(plain != fast):
        assert abs(sums[row, min(plain[row], fast[row])] - u[row]) < NEAR


@pytest.mark.parametrize("vocab", [5, 300, 20_000])
@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 1}, {"top_k": 3}, {"top_k": 200}, {"top_p": 0.1}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.01}, {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.5}, {"top_k": 40, "top_p": 0.9, "min_p": 0.05}, {"top_p": 0.7, "min_p": 0.2},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["normal", "ties", "peaked", "masked"])
def test_filters_keep_the_same_tokens(vocab: int, asked: dict[str, float], kind: str) -> None:
    """Seventy draws per row: a token that one keeps and the other does not would be drawn by one alone, or move what is drawn."""
    rng = np.random.default_rng(len(str(asked)) + vocab)
    row = rng.normal(0, 2, vocab).astype(np.float32)
    if kind == "ties":
        row = np.round(row)
    elif kind == "peaked":
        row[rng.integers(vocab)] += 15
    elif kind == "masked":
        row[rng.random(vocab) < 0.5] = -np.inf
        row[0] = 1.0
    logits = np.tile(row, (70, 1))
    wanted = limits(70, **{"top_k": vocab, **asked, "temperature": 0.9})  # type: ignore[arg-type]
    wanted = FilterLimits(wanted.temperature, np.minimum(wanted.top_k, vocab), wanted.top_p, wanted.min_p)
    plain, fast = both(logits, rng.random(70), wanted)
    assert (plain != fast).sum() <= 1, "one of seventy may fall on a border"


def test_a_token_does_not_depend_on_its_neighbours_or_the_number_of_threads() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 3, (24, 5000)).astype(np.float32)
    u, peak = rng.random(24), logits.max(axis=1)
    asked = FilterLimits(
        rng.uniform(0.3, 2, 24).astype(np.float32), rng.choice([5, 60, 5000], 24), rng.choice([0.4, 0.95, 1.0], 24),
        rng.choice([0.0, 0.02], 24).astype(np.float32),
    )  # fmt: skip
    before = launch.thread_limit()
    try:
        launch.set_thread_limit(2)
        together = draw.draw(logits, peak, u, asked)
        launch.set_thread_limit(1)
        assert draw.draw(logits, peak, u, asked).tolist() == together.tolist()
    finally:
        launch.set_thread_limit(before)
    for row in range(24):
        one = np.arange(24) == row
        assert draw.draw(logits[one], peak[one], u[one], asked.of(one))[0] == together[row]


def test_what_has_no_weight_is_never_drawn() -> None:
    logits = np.full((4, 600), -np.inf, dtype=np.float32)
    logits[:, [3, 400]] = 0.0
    u = np.array([0.0, 0.4999, 0.5001, np.nextafter(1.0, 0.0)])
    asked = limits(4, top_k=600)
    assert draw.draw(logits, logits.max(axis=1), u, asked).tolist() == [3, 3, 400, 400]
    assert draw.draw(logits, logits.max(axis=1), u, limits(4, top_k=500)).tolist() == [3, 3, 400, 400]


def test_rows_may_lie_apart_and_there_may_be_none() -> None:
    wide = np.random.default_rng(3).normal(0, 2, (6, 900)).astype(np.float32)
    asked, u = limits(6, top_k=20, top_p=0.9), np.linspace(0.05, 0.95, 6)
    apart = wide[:, 100:700]
    want = draw.draw(apart.copy(), apart.max(axis=1), u, limits(6, top_k=20, top_p=0.9))
    assert draw.draw(apart, apart.max(axis=1), u, asked).tolist() == want.tolist()
    nobody = np.zeros(6, dtype=bool)
    assert draw.draw(apart[:0], np.zeros(0, np.float32), u[:0], asked.of(nobody)).tolist() == []


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_the_border_of_a_nucleus_is_the_twins_to_the_token(top_p: float) -> None:
    """u in the middle of each kept token's share: every one of them is drawn, and nobody else."""
    row = np.random.default_rng(8).normal(0, 2, 400).astype(np.float32)
    weights = np.exp(row.astype(np.float64) - row.max())
    order = np.argsort(-weights, kind="stable")
    size = int(np.searchsorted(weights[order].cumsum(), top_p * weights.sum())) + 1
    kept = np.sort(order[:size])
    ends = weights[kept].cumsum() / weights[kept].sum()
    middles = ends - weights[kept] / weights[kept].sum() / 2
    logits = np.tile(row, (size, 1))
    plain, fast = both(logits, middles, limits(size, top_k=400, top_p=top_p))
    assert fast.tolist() == plain.tolist() == kept.tolist()


def test_a_draw_is_carried_out_at_once_wherever_it_is_asked_for() -> None:
    logits = np.full((2, 300), -50.0, dtype=np.float32)
    logits[:, 7] = 0.0
    with cpu.EXECUTOR.deferred(1):
        assert cpu.draw_tokens(logits, logits.max(axis=1), np.full(2, 0.5), limits(2, top_k=300)).tolist() == [7, 7]
