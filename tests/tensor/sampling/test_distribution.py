"""Tests that in the long run the sampler's frequencies are the filtered distribution's: chi-square with fixed seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.core.sampling import SamplingParams
from headrace.tensor.backends import load_backend
from headrace.tensor.kernels import Backend
from headrace.tensor.sampling import Sampler

pytestmark = pytest.mark.pure

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DRAWS = 10_000
CHI_SQUARE_999 = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3, 11: 31.3}
"""Degrees of freedom -> value exceeded with probability 0.001."""
PROBABILITIES = np.array([0.02, 0.3, 0.05, 0.2, 0.08, 0.04, 0.15, 0.01, 0.06, 0.03, 0.035, 0.025])


@pytest.fixture(params=["reference", "numba"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "numba":
        pytest.importorskip("numba")
    return load_backend(request.param)


def draw(logits: Floats, make_row: Any, backend: Backend, **changes: Any) -> Ints:
    """DRAWS tokens of one sequence, each at another position: logits [V] are the same every time."""
    sampler = Sampler(len(logits), (), backend.draw)
    sampler.start(make_row(SamplingParams(seed=11, **changes)).started(0))
    repeated = torch.from_numpy(logits.astype(np.float32)).repeat(DRAWS, 1)
    return sampler.sample(repeated, np.zeros(DRAWS, dtype=np.int64), np.arange(DRAWS)).token_ids


def expected(kept: list[int], temperature: float) -> Floats:
    weights = np.zeros(12)
    weights[kept] = PROBABILITIES[kept] ** (1 / temperature)
    share: Floats = weights / weights.sum()
    return DRAWS * share


CASES: list[tuple[dict[str, Any], list[int]]] = [
    ({}, list(range(12))),
    ({"temperature": 1.9}, list(range(12))),
    ({"temperature": 0.5}, list(range(12))),
    ({"top_k": 4}, [1, 3, 6, 4]),
    ({"top_p": 0.7}, [1, 3, 6, 4]),  # 0.30 + 0.20 + 0.15 = 0.65 is not enough
    ({"top_p": 0.64}, [1, 3, 6]),
    ({"min_p": 0.19}, [1, 3, 6, 4, 8]),
    ({"top_k": 5, "top_p": 0.8}, [1, 3, 6]),  # of the five's 0.79: 0.65 of it is 0.82
    ({"top_k": 8, "top_p": 0.95, "min_p": 0.15}, [1, 3, 6, 4, 8, 2]),
    ({"top_p": 0.9, "temperature": 0.5}, [1, 3, 6, 4]),
]


@pytest.mark.parametrize(("changes", "kept"), CASES)
def test_frequencies_follow_the_filtered_distribution(make_row: Any, backend: Backend, changes: dict[str, Any], kept: list[int]) -> None:
    observed = np.bincount(draw(np.log(PROBABILITIES), make_row, backend, **changes), minlength=12)
    wanted = expected(kept, changes.get("temperature", 1.0))
    assert observed[wanted == 0].sum() == 0, "a dropped token was chosen"
    chi_square = ((observed[kept] - wanted[kept]) ** 2 / wanted[kept]).sum()
    assert chi_square < CHI_SQUARE_999[len(kept) - 1]


def test_frequencies_hold_across_the_blocks_of_a_large_vocabulary(make_row: Any, backend: Backend) -> None:
    """300 equally likely tokens, over two blocks of running sums, among as many impossible ones."""
    logits = np.where(np.arange(600) % 2, 0.0, -np.inf)
    observed = np.bincount(draw(logits, make_row, backend), minlength=600)
    assert observed[::2].sum() == 0
    chi_square = ((observed[1::2] - DRAWS / 300) ** 2 / (DRAWS / 300)).sum()
    assert chi_square < 379.0, "299 degrees of freedom: above with probability 0.001"
