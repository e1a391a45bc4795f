"""Provides a sampler with sequences in its slots, and the slow per-row choice it is compared with."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from plain_choice import PlainChoice

from headrace.core.ids import SlotId
from headrace.core.plan import Started
from headrace.core.sampling import MAX_STOP_TOKEN_IDS, SamplingParams
from headrace.engine.runner.batch import upload_each
from headrace.engine.runner.device.choice import SlotChoice, read_chosen
from headrace.engine.runner.slots import SlotState
from headrace.tensor.backends import load_backend
from headrace.tensor.kernels import Backend
from headrace.tensor.kernels.choice import NUM_FIELDS, RowTensors, SlotTensors
from headrace.tensor.kernels.filters import Words, num_words
from headrace.tensor.sampling import RowMasks, Sampled, Sampler, uniform

EOS = (2, 5)


@dataclass
class Row:
    """One sequence: what it asked for and what it holds so far. allowed: the tokens that its grammar allows; None: no grammar."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [1, 3, 3])
    outputs: list[int] = field(default_factory=list)
    index: int = 0
    allowed: frozenset[int] | None = None

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.outputs)

    def started(self, slot: int) -> Started:
        return Started(SlotId(slot), array("i", [*self.prompt, *self.outputs]), len(self.prompt), self.params, self.index)

    @property
    def u(self) -> float:
        seeds = np.array([(self.params.seed or 0) & (2**64 - 1)], dtype=np.uint64)
        return float(uniform(seeds, np.array([self.index]), np.array([self.position]))[0])


def words_of(allowed: Collection[int], vocab: int) -> Words:
    """A mask [num_words(vocab)] that allows these tokens; the bits beyond the vocabulary are set."""
    words = np.zeros(num_words(vocab), dtype=np.uint32)
    for token in (*allowed, *range(vocab, 32 * len(words))):
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def row_masks(rows: Sequence[Row], vocab: int) -> RowMasks:
    masked = [(i, words_of(row.allowed, vocab)) for i, row in enumerate(rows) if row.allowed is not None]
    words = np.array([mask for _, mask in masked], dtype=np.uint32).reshape(len(masked), num_words(vocab))
    return RowMasks(np.array([i for i, _ in masked], dtype=np.int64), words)


def sample_rows(logits: np.ndarray, rows: Sequence[Row], slots: Sequence[int] | None = None, *, backend: Backend) -> Sampled:
    """One call of a fresh sampler over a copy of the logits [N, V]."""
    places = np.array(range(len(rows)) if slots is None else slots, dtype=np.int64)
    sampler = Sampler(logits.shape[1], EOS, backend.draw, backend.mask)
    for slot, row in zip(places.tolist(), rows, strict=True):
        sampler.start(row.started(slot))
    given, positions = torch.from_numpy(logits.astype(np.float32)), np.array([row.position for row in rows])
    return sampler.sample(given, places, positions, row_masks(rows, logits.shape[1]))


def sample_on_device(logits: np.ndarray, rows: Sequence[Row], slots: Sequence[int] | None = None) -> Sampled:
    """`sample_rows` by the plain choice of devices, from the matrix of rows that it reads."""
    vocab, places = logits.shape[1], np.array(range(len(rows)) if slots is None else slots, dtype=np.int64)
    num_slots, count = int(places.max(initial=0)) + 1, len(rows)
    state = SlotState(num_slots, 1024, 0, 16)
    tensors = SlotTensors.zeros(num_slots, (0, 1), vocab, len(EOS) + MAX_STOP_TOKEN_IDS, "cpu")
    choice = SlotChoice(state, tensors, partial(upload_each, device="cpu"), EOS)
    for slot, row in zip(places.tolist(), rows, strict=True):
        for part in (state, choice):
            part.start(row.started(slot))
    choice.send(places)
    masks = row_masks(rows, vocab)
    mask_places = np.full(count, -1)
    mask_places[masks.rows] = np.arange(len(masks.rows))
    fields = np.zeros((NUM_FIELDS, count), dtype=np.int32)
    kind = choice.fill(fields, places, np.array([row.position for row in rows]), mask_places)
    on_device = RowTensors.zeros(count, vocab, "cpu")
    on_device.masks[: len(masks.rows)] = torch.from_numpy(masks.words.view(np.int32))
    PlainChoice().choose(torch.from_numpy(logits.astype(np.float32)), torch.from_numpy(fields), tensors, on_device, kind)
    return read_chosen(on_device.chosen.numpy(), choice.num_top(places), vocab)


def slow_choice(logits: Sequence[float], row: Row) -> int:
    """The documented choice for one row, in plain Python and double precision, one step after another."""
    p, seen = row.params, Counter(row.outputs)
    x = [float(value) for value in logits]
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in {*row.prompt, *row.outputs}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token, count in seen.items():
        x[token] -= p.frequency_penalty * count + p.presence_penalty
    if row.allowed is not None:
        x = [value if token in row.allowed else -math.inf for token, value in enumerate(x)]
    ends = {*p.stop_token_ids, *(() if p.ignore_eos else EOS)}
    if len(row.outputs) < p.min_tokens and any(value > -math.inf for token, value in enumerate(x) if token not in ends):
        x = [-math.inf if token in ends else value for token, value in enumerate(x)]
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


@pytest.fixture(params=["reference", "numba", "device"])
def sample(request: pytest.FixtureRequest) -> Callable[..., Sampled]:
    if request.param == "device":
        return sample_on_device
    if request.param == "numba":
        pytest.importorskip("numba")
    return partial(sample_rows, backend=load_backend(request.param))


@pytest.fixture
def slow() -> Callable[[Sequence[float], Row], int]:
    return slow_choice
