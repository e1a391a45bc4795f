"""Tests log-probabilities: of the raw distribution, ranked, and the same whatever other rows are in the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.sampling import SamplingParams
from headrace.tensor.sampling import Sampled, prompt_logprobs, top_tokens

pytestmark = pytest.mark.pure


def test_entries_are_torchs_log_softmax_of_the_raw_logits(make_row: Any, sample: Callable[..., Sampled]) -> None:
    """Penalties, bias, temperature and filters move the choice, never what is reported."""
    logits = np.random.default_rng(0).normal(0, 2, (3, 900)).astype(np.float32)
    wanted = torch.log_softmax(torch.from_numpy(logits).double(), dim=1)
    rows = [
        make_row(SamplingParams(seed=1, logprobs=5, temperature=0.5, top_k=3)),
        make_row(SamplingParams(seed=1, logprobs=0, logit_bias={7: 100.0}, temperature=0.0)),
        make_row(SamplingParams(seed=1, logprobs=20, repetition_penalty=2.0, presence_penalty=1.0)),
    ]
    result = sample(logits, rows)
    for i, entry in enumerate(result.logprobs.entries()):
        assert entry is not None
        assert entry.token_id == result.token_ids[i]
        assert entry.logprob == pytest.approx(float(wanted[i, entry.token_id]), abs=1e-5)
        assert entry.rank == 1 + int((wanted[i] > wanted[i, entry.token_id]).sum())
        best = torch.topk(wanted[i], len(entry.top_ids))
        assert list(entry.top_ids) == best.indices.tolist()
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)
    assert list(result.logprobs.top_counts) == [5, 0, 20]
    assert result.token_ids[1] == 7


def test_rows_that_did_not_ask_have_none(make_row: Any, sample: Callable[..., Sampled]) -> None:
    logits = np.zeros((2, 40), dtype=np.float32)
    quiet = make_row(SamplingParams(seed=1))
    assert not sample(logits, [quiet, quiet]).logprobs
    entries = sample(logits, [quiet, make_row(SamplingParams(seed=1, logprobs=0))]).logprobs.entries()
    assert entries[0] is None
    assert entries[1] is not None


def test_ties_at_the_end_of_the_list_go_to_the_lower_id() -> None:
    logits = np.array([[1, 5, 3, 3, 3, 3], [0, 0, 0, 0, 0, 0]], dtype=np.float32)
    ids, values = top_tokens(logits, 3)
    assert ids.tolist() == [[1, 2, 3], [0, 1, 2]]
    assert values.tolist() == [[5, 3, 3], [0, 0, 0]]
    assert top_tokens(logits, 2)[0].tolist() == [[1, 2], [0, 1]]
    assert top_tokens(logits, 20)[0].shape == (2, 6)


def test_prompt_entries_report_the_token_that_follows() -> None:
    logits = np.random.default_rng(2).normal(size=(4, 30)).astype(np.float32)
    wanted = torch.log_softmax(torch.from_numpy(logits).double(), dim=1)
    columns = prompt_logprobs(logits, np.array([3, 0, 29, 3]), 2)
    assert columns is not None
    assert list(columns.token_ids) == [3, 0, 29, 3]
    assert list(columns.logprobs) == pytest.approx([float(wanted[i, t]) for i, t in enumerate((3, 0, 29, 3))], abs=1e-5)
    logits[2, 5] = np.nan
    assert prompt_logprobs(logits, np.array([3, 0, 29, 3]), 2) is None
