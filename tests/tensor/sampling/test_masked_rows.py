"""Tests rows with a grammar: what their masks do to the choice, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.core.sampling import SamplingParams
from headrace.tensor.sampling import Sampled

pytestmark = pytest.mark.pure

Sample = Callable[..., Sampled]
VOCAB, END = 700, 2


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 3, (4, VOCAB)).astype(np.float32)


def test_logprobs_are_those_of_the_raw_model(make_row: Any, sample: Sample, logits: np.ndarray) -> None:
    """The mask is the request's, as temperature is: a forced token's log-probability says how likely the model found it."""
    row = make_row(SamplingParams(seed=1, logprobs=3), allowed=frozenset({77}))
    (found,) = sample(logits[:1], [row]).logprobs.entries()
    assert found is not None
    free = logits[0].astype(np.float64)
    assert (found.token_id, found.rank) == (77, 1 + int((free > free[77]).sum()))
    assert found.logprob == pytest.approx(free[77] - np.log(np.exp(free).sum()), abs=1e-5)
    assert found.top_ids == tuple(np.argsort(-free)[:3].tolist())


def test_bias_cannot_bring_a_forbidden_token_back(make_row: Any, sample: Sample, logits: np.ndarray) -> None:
    row = make_row(SamplingParams(temperature=0.0, seed=0, logit_bias={5: 100.0}), allowed=frozenset({8, 9}))
    assert sample(logits[:1], [row]).token_ids[0] in (8, 9)


@pytest.mark.parametrize(
    ("allowed", "may_end"), [({END}, True), ({END, 9}, False), ({END, 5}, True)], ids=["at the end", "not yet", "only end tokens"]
)
def test_min_tokens_holds_ends_back_only_while_another_token_is_allowed(
    make_row: Any, sample: Sample, allowed: set[int], may_end: bool
) -> None:
    """END and 5 are both end tokens of the fixture's model."""
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, END] = 5.0
    row = make_row(SamplingParams(temperature=0.0, seed=0, min_tokens=3), allowed=frozenset(allowed))
    assert sample(logits, [row]).token_ids[0] == (END if may_end else 9)


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
def test_a_row_whose_allowed_tokens_are_all_minus_infinity_fails_alone(
    make_row: Any, sample: Sample, logits: np.ndarray, changes: dict[str, Any]
) -> None:
    rows = [make_row(SamplingParams(seed=i, **changes), allowed=frozenset({i, 300 + i})) for i in range(4)]
    clean = sample(logits, rows).token_ids
    logits[1, [1, 301]] = -np.inf
    found = sample(logits, rows)
    assert found.failed.tolist() == [False, True, False, False]
    assert found.token_ids[[0, 2, 3]].tolist() == clean[[0, 2, 3]].tolist()


def test_a_poisoned_row_fails_although_its_mask_hides_the_poison(make_row: Any, sample: Sample, logits: np.ndarray) -> None:
    rows = [make_row(SamplingParams(seed=i), allowed=frozenset({3, 4})) for i in range(4)]
    logits[2, 600] = np.nan
    assert sample(logits, rows).failed.tolist() == [False, False, True, False]


@pytest.mark.parametrize("vocab", [31, 256, 50257])
def test_a_masked_row_alone_and_among_31_gives_the_same_token(make_row: Any, sample: Sample, vocab: int) -> None:
    """Of the largest vocabulary a step is processed in two chunks."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 2, (32, vocab)).astype(np.float32)
    shapes: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"repetition_penalty": 1.2}, {"temperature": 0.0}]
    rows = [make_row(SamplingParams(seed=i, logprobs=1, **shapes[i % len(shapes)])) for i in range(32)]
    for i in range(0, 32, 2):
        rows[i].allowed = frozenset(rng.choice(vocab, 1 + i * vocab // 64, replace=False).tolist())
    together = sample(logits, rows)
    for i in range(32):
        alone = sample(logits[i : i + 1], [rows[i]], slots=[5])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs.entries()[0] == together.logprobs.entries()[i], "bit for bit"
        assert rows[i].allowed is None or int(alone.token_ids[0]) in rows[i].allowed
