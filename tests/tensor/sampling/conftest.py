"""A sampler with sequences in its slots, and the slow per-row choice it is compared with."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch

from headrace.core.ids import SlotId
from headrace.core.plan import Started
from headrace.core.sampling import SamplingParams
from headrace.tensor.kernels import load_backend
from headrace.tensor.kernels.filters import Draw
from headrace.tensor.sampling import Purpose, Sampled, Sampler, uniform

EOS = (2, 5)


@dataclass
class Row:
    """One sequence: what it asked for and what it holds so far."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [1, 3, 3])
    outputs: list[int] = field(default_factory=list)
    index: int = 0

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.outputs)

    def started(self, slot: int) -> Started:
        return Started(SlotId(slot), array("i", [*self.prompt, *self.outputs]), len(self.prompt), self.params, self.index)

    @property
    def u(self) -> float:
        seeds = np.array([(self.params.seed or 0) & (2**64 - 1)], dtype=np.uint64)
        return float(uniform(seeds, np.array([self.index]), np.array([self.position]), Purpose.SAMPLE)[0])


def sample_rows(logits: np.ndarray, rows: Sequence[Row], slots: Sequence[int] | None = None, *, draw: Draw) -> Sampled:
    """One call of a fresh sampler over a copy of the logits [N, V]."""
    places = np.array(range(len(rows)) if slots is None else slots, dtype=np.int64)
    sampler = Sampler(logits.shape[1], EOS, draw)
    for slot, row in zip(places.tolist(), rows, strict=True):
        sampler.start(row.started(slot))
    return sampler.sample(torch.from_numpy(logits.astype(np.float32)), places, np.array([row.position for row in rows]))


def slow_choice(logits: Sequence[float], row: Row) -> int:
    """The documented choice for one row, in plain Python and double precision, one step after another."""
    p, seen = row.params, Counter(row.outputs)
    x = [float(value) for value in logits]
    for token, bias in p.logit_bias.items():
        x[token] += bias
    if len(row.outputs) < p.min_tokens:
        for token in (*p.stop_token_ids, *(() if p.ignore_eos else EOS)):
            x[token] = -math.inf
    for token in {*row.prompt, *row.outputs}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token, count in seen.items():
        x[token] -= p.frequency_penalty * count + p.presence_penalty
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if p.temperature < 1e-5:
        return order[0]
    weight = {token: math.exp((x[token] - x[order[0]]) / p.temperature) for token in order}
    kept = order[: p.top_k] if p.top_k > 0 else order
    kept = _nucleus(kept, weight, p.top_p)
    kept = sorted(token for token in kept if weight[token] >= p.min_p)
    target = row.u * math.fsum(weight[token] for token in kept)
    for token in kept:
        target -= weight[token]
        if target < 0:
            return token
    return kept[-1]


def _nucleus(order: list[int], weight: dict[int, float], top_p: float) -> list[int]:
    if top_p == 1.0:
        return order
    wanted, mass = top_p * math.fsum(weight[token] for token in order), 0.0
    for size, token in enumerate(order, start=1):
        mass += weight[token]
        if mass >= wanted:
            return order[:size]
    return order


@pytest.fixture
def make_row() -> type[Row]:
    return Row


@pytest.fixture(params=["reference", "numba"])
def sample(request: pytest.FixtureRequest) -> Callable[..., Sampled]:
    if request.param == "numba":
        pytest.importorskip("numba")
    return partial(sample_rows, draw=load_backend(request.param).draw)


@pytest.fixture
def slow() -> Callable[[Sequence[float], Row], int]:
    return slow_choice
