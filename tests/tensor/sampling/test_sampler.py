"""Tests the sampler against a slow per-row choice, against itself alone, and at its edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.plan import NO_LOGPROBS
from headrace.core.sampling import SamplingParams
from headrace.tensor.kernels.filters import draw
from headrace.tensor.sampling import Sampled, Sampler
from headrace.tensor.sampling import sampler as sampler_module

pytestmark = pytest.mark.pure

Sample = Callable[..., Sampled]
VOCAB = 700


def mixed_params(seed: int) -> list[SamplingParams]:
    """32 requests that between them use everything."""
    given: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 699, "temperature": 1.5},
        {"top_p": 0.1},
        {"top_p": 0.9, "temperature": 1.7},
        {"top_p": 1e-9},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5, "temperature": 0.0},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"presence_penalty": -2.0, "temperature": 0.0},
        {"logit_bias": {4: 5.0, 600: -100.0}},
        {"logit_bias": {2: 100.0}, "min_tokens": 9, "temperature": 0.0},
        {"logit_bias": {2: 100.0}, "min_tokens": 2, "temperature": 0.0},
        {"logit_bias": {2: 100.0}, "min_tokens": 9, "ignore_eos": True},
        {"logit_bias": {9: 100.0}, "min_tokens": 9, "stop_token_ids": (9,), "temperature": 0.0},
        {"temperature": 1e-4},
        {"frequency_penalty": 2.0, "repetition_penalty": 1.1, "top_p": 0.95, "temperature": 0.8},
    ]
    given += [{"temperature": 1.0 + i / 10, "top_p": 0.99} for i in range(8)]
    return [SamplingParams(seed=seed * 1000 + i, **changes).checked(vocab_size=VOCAB) for i, changes in enumerate(given)]


def mixed_rows(make_row: Any, seed: int, *, masked: bool = False) -> list[Any]:
    """masked: two of three rows have a grammar, which allows one token, a few, or most."""
    rng = np.random.default_rng(seed)
    rows = [
        make_row(params, prompt=rng.integers(0, VOCAB, 20).tolist(), outputs=rng.integers(0, VOCAB, 4).tolist(), index=i % 3)
        for i, params in enumerate(mixed_params(seed))
    ]
    for i, row in enumerate(rows):
        if masked and i % 3:
            num_allowed = (1, 9, 600)[(i + seed) % 3]
            row.allowed = frozenset(rng.choice(VOCAB, num_allowed, replace=False).tolist())
    return rows


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_what_the_slow_choice_gives(make_row: Any, sample: Sample, slow: Callable[..., int], seed: int, masked: bool) -> None:
    rows = mixed_rows(make_row, seed, masked=masked)
    logits = np.random.default_rng(100 + seed).normal(0, 3, (len(rows), VOCAB)).astype(np.float32)
    assert sample(logits, rows).token_ids.tolist() == [slow(logits[i], row) for i, row in enumerate(rows)]


@pytest.mark.parametrize("seed", range(4))
def test_coarse_logits_with_many_ties_follow_the_slow_choice(make_row: Any, sample: Sample, slow: Callable[..., int], seed: int) -> None:
    """bfloat16 logits tie often: equal weights are ranked by id, so top_k keeps exactly k."""
    rows = mixed_rows(make_row, seed, masked=seed > 1)
    logits = np.round(np.random.default_rng(200 + seed).normal(0, 2, (len(rows), VOCAB))).astype(np.float32)
    assert sample(logits, rows).token_ids.tolist() == [slow(logits[i], row) for i, row in enumerate(rows)]


@pytest.mark.parametrize("vocab", [64, 255, 256, 257, 4096, 50257])
def test_a_row_alone_and_among_31_others_gives_the_same_token(make_row: Any, sample: Sample, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 2, (32, vocab)).astype(np.float32)
    shapes: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.01}, {"repetition_penalty": 1.2}, {"temperature": 0.0}]
    for step in range(4):
        rows = [
            make_row(SamplingParams(seed=31 * step + i, logprobs=i % 3, **shapes[(i + step) % len(shapes)]), prompt=[1, i])
            for i in range(32)
        ]
        together = sample(logits, rows)
        for i in range(32):
            alone = sample(logits[i : i + 1], [rows[i]], slots=[5])
            assert alone.token_ids[0] == together.token_ids[i]
            assert alone.logprobs.entries()[0] == together.logprobs.entries()[i], "bit for bit"


def test_the_choice_changes_with_seed_index_and_position_only(make_row: Any, sample: Sample) -> None:
    logits = np.zeros((1, 5000), dtype=np.float32)

    def token(seed: int, index: int, prompt: int) -> int:
        return int(sample(logits, [make_row(SamplingParams(seed=seed), prompt=[0] * prompt, index=index)]).token_ids[0])

    assert token(1, 0, 3) == token(1, 0, 3)
    assert len({token(1, 0, 3), token(2, 0, 3), token(-1, 0, 3), token(1, 1, 3), token(1, 0, 4)}) == 5


def test_greedy_prefers_the_lowest_id_among_equals(make_row: Any, sample: Sample) -> None:
    logits = np.zeros((2, 300), dtype=np.float32)
    logits[1, [280, 17]] = 4.0
    row = make_row(SamplingParams(temperature=0.0, seed=0))
    assert sample(logits, [row, row]).token_ids.tolist() == [0, 17]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"repetition_penalty": 1.5, "logprobs": 2}])
def test_a_poisoned_row_fails_alone(make_row: Any, sample: Sample, poison: float, changes: dict[str, Any]) -> None:
    logits = np.random.default_rng(1).normal(size=(3, 500)).astype(np.float32)
    rows = [make_row(SamplingParams(seed=i, **changes)) for i in range(3)]
    clean = sample(logits, rows)
    logits[1, 77] = poison
    poisoned = sample(logits, rows)
    assert poisoned.failed.tolist() == [False, True, False]
    assert poisoned.token_ids[1] == -1
    assert poisoned.token_ids[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()
    assert poisoned.logprobs.picked([0, 2]) == clean.logprobs.picked([0, 2])
    assert not clean.logprobs or poisoned.logprobs.entries()[1] is None


def test_a_row_without_any_finite_logit_fails(make_row: Any, sample: Sample) -> None:
    logits = np.full((1, 50), -np.inf, dtype=np.float32)
    assert sample(logits, [make_row(SamplingParams(seed=0))]).failed.all()


def test_masked_logits_are_never_chosen(make_row: Any, sample: Sample) -> None:
    logits = np.full((64, 1000), -np.inf, dtype=np.float32)
    logits[:, [3, 900]] = 0.0
    rows = [make_row(SamplingParams(seed=i, top_k=(0, 50)[i % 2])) for i in range(64)]
    assert set(sample(logits, rows).token_ids.tolist()) == {3, 900}


def test_extreme_but_legal_parameters_stay_finite(make_row: Any, sample: Sample) -> None:
    """Found where a penalty below float32's smallest number divided a logit."""
    logits = np.random.default_rng(3).normal(0, 1e30, (3, 400)).astype(np.float32)
    extremes: list[dict[str, Any]] = [{"repetition_penalty": 1e-300}, {"temperature": 1.1e-5}, {"temperature": 1.1e-5, "top_p": 1e-300}]
    rows = [make_row(SamplingParams(seed=1, **changes).checked(), prompt=list(range(400))) for changes in extremes]
    assert not sample(logits, rows).failed.any()


def test_half_precision_logits_are_widened_first(make_row: Any) -> None:
    sampler = Sampler(300, (), draw)
    sampler.start(make_row(SamplingParams(seed=4)).started(0))
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots, positions = np.array([0]), np.array([3])
    narrow = sampler.sample(logits.clone(), slots, positions)
    assert narrow.token_ids.tolist() == sampler.sample(logits.float(), slots, positions).token_ids.tolist()


def test_sampling_twice_without_commit_changes_nothing(make_row: Any) -> None:
    row = make_row(SamplingParams(temperature=0.0, presence_penalty=2.0, seed=0))
    sampler = Sampler(10, (), draw)
    sampler.start(row.started(0))
    logits = torch.tensor([[0.0, 3, 2.5, 0, 0, 0, 0, 0, 0, 0]])
    slots, positions = np.array([0]), np.array([3])
    for _ in range(2):
        assert sampler.sample(logits.clone(), slots, positions).token_ids.tolist() == [1]
    sampler.commit(slots, np.array([1]))
    assert sampler.sample(logits.clone(), slots, positions + 1).token_ids.tolist() == [2]
    sampler.retract(0, [1])
    assert sampler.sample(logits.clone(), slots, positions).token_ids.tolist() == [1]


def test_incremental_counts_equal_counts_from_the_start(make_row: Any) -> None:
    rng = np.random.default_rng(8)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=-0.4, seed=0)
    grown, outputs = Sampler(60, (), draw), rng.integers(0, 60, 80).tolist()
    grown.start(make_row(params, outputs=[]).started(3))
    for token in outputs:
        grown.commit(np.array([3]), np.array([token]))
    resumed = Sampler(60, (), draw)
    resumed.start(make_row(params, outputs=outputs).started(0))
    for _ in range(20):
        logits = torch.from_numpy(rng.normal(0, 2, (1, 60)).astype(np.float32))
        position = np.array([83])
        assert grown.sample(logits.clone(), np.array([3]), position).token_ids == resumed.sample(logits, np.array([0]), position).token_ids


def test_a_slot_forgets_its_former_sequence(make_row: Any) -> None:
    sampler = Sampler(10, (), draw)
    logits = torch.tensor([[0.0, 3, 2.5, 0, 0, 0, 0, 0, 0, 0]])
    sampler.start(make_row(SamplingParams(temperature=0.0, logit_bias={1: -50.0}, seed=0)).started(0))
    assert sampler.sample(logits.clone(), np.array([0]), np.array([3])).token_ids.tolist() == [2]
    sampler.end([0])
    sampler.start(make_row(SamplingParams(temperature=0.0, seed=0)).started(0))
    assert sampler.sample(logits.clone(), np.array([0]), np.array([3])).token_ids.tolist() == [1]


@pytest.mark.parametrize("chunk", [1 << 20, 3 * VOCAB])
def test_rows_behind_drafts_are_what_they_would_be_with_the_drafts_committed(
    make_row: Any, sample: Sample, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Also where a sequence's rows are in different chunks; and nothing is left of the drafts."""
    drafts, rows = [7, 7, 9, 30], mixed_rows(make_row, 5)
    count = 1 + len(drafts)
    logits = np.random.default_rng(5).normal(0, 2, (len(rows) * count, VOCAB)).astype(np.float32)
    behind = [replace(row, outputs=[*row.outputs, *drafts[:ahead]]) for row in rows for ahead in range(count)]
    wanted = sample(logits, behind).token_ids.tolist()
    sampler = Sampler(VOCAB, (2, 5), draw)
    for slot, row in enumerate(rows):
        sampler.start(row.started(slot))
    monkeypatch.setattr(sampler_module, "_CHUNK_ELEMENTS", chunk)
    slots, positions = np.repeat(np.arange(len(rows)), count), np.array([row.position for row in behind])
    for _ in range(2):
        given = np.tile([-1, *drafts], len(rows))
        assert sampler.sample(torch.from_numpy(logits.copy()), slots, positions, given=given).token_ids.tolist() == wanted


def test_wrong_drafts_leave_no_ids_behind(make_row: Any) -> None:
    """Each later step walks the ids that are held."""
    sampler, rng = Sampler(VOCAB, (), draw), np.random.default_rng(2)
    row = make_row(SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, seed=0), prompt=[1, 2, 3], outputs=[4, 5])
    sampler.start(row.started(0))
    counts = sampler._edits[0].counts
    assert counts is not None
    for _ in range(50):
        drafts = rng.integers(0, VOCAB, 6)
        logits = torch.from_numpy(rng.normal(0, 2, (7, VOCAB)).astype(np.float32))
        sampler.sample(logits, np.zeros(7, dtype=np.int64), row.position + np.arange(7), given=np.concatenate(([-1], drafts)))
        assert len(counts) == 5


def test_log_probabilities_that_are_left_out_are_not_computed(make_row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, logits = Sampler(VOCAB, (), draw), torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    sampler.start(make_row(SamplingParams(seed=4, logprobs=3)).started(0))
    slots, positions = np.array([0]), np.array([3])
    whole = sampler.sample(logits.clone(), slots, positions)
    assert whole.logprobs
    monkeypatch.delattr(sampler_module, "token_logprobs")
    short = sampler.sample(logits.clone(), slots, positions, has_logprobs=False)
    assert (short.token_ids.tolist(), short.logprobs) == (whole.token_ids.tolist(), NO_LOGPROBS)
