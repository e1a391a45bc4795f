"""Tests that in bfloat16 the engine differs from transformers only where the model itself hardly has a preference.

The reference is transformers in bfloat16 on the same weights, fed the engine's own tokens: at every position the engine's choice is
either the reference's best token, or its logit there lies less than EPSILON times the row's largest magnitude below the best one's.
bfloat16 keeps 8 bits, so one rounding is up to 2^-9 of a value; EPSILON leaves room for the roundings of the layers to add up. How far
the reference itself is from its float32 self is reported beside it: that is the noise two right programs have to live with.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pytest
import torch
from plain_loop import Checkpoint, PlainLoop
from real_engine import RealEngine, greedy_request
from results import save_result

pytestmark = pytest.mark.pure

EPSILON = {"random": 2.0**-3, "trained": 2.0**-4}
"""Wide random weights magnify roundings: there the reference itself is up to 0.15 away from float32."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """num_different of num_tokens choices differ from the reference's. The others are relative to a row's largest logit:

    widest_gap       the farthest a different choice stood below the reference's best
    reference_error  the reference's largest difference from float32 on the same weights
    """

    model: str
    depth: int
    num_tokens: int
    num_different: int
    widest_gap: float
    reference_error: float
    epsilon: float

    @property
    def rate(self) -> float:
        return self.num_different / self.num_tokens


def measure(checkpoint: Checkpoint, *, count: int, depth: int = 1) -> Divergence:
    reference = PlainLoop(checkpoint.folder, dtype=torch.bfloat16)
    with RealEngine(checkpoint.folder, dtype="bfloat16", depth=depth, num_kv_blocks=1000) as engine:
        engine.run(*(greedy_request(f"r{number}", prompt, max_tokens=count) for number, prompt in enumerate(checkpoint.prompts)))
        answers = [engine.answer(f"r{number}") for number in range(len(checkpoint.prompts))]
    gaps, errors = [], []
    for prompt, answer in zip(checkpoint.prompts, answers, strict=True):
        rows = reference.logits([*prompt, *answer])
        gaps += gaps_where_different(rows[len(prompt) - 1 : -1], answer)
        errors.append(rounding_error(rows, checkpoint.plain.logits([*prompt, *answer])))
    return Divergence(
        checkpoint.name, depth, len(answers) * count, len(gaps), max(gaps, default=0.0), max(errors), EPSILON[checkpoint.name]
    )


def gaps_where_different(rows: torch.Tensor, answer: list[int]) -> list[float]:
    """How far below the reference's best logit the answer's token stands, relative, at each position where it is not the best."""
    return [
        float((row.max() - row[token_id]) / row.abs().max())
        for row, token_id in zip(rows, answer, strict=True)
        if row[token_id] != row.max()
    ]


def rounding_error(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((rounded - exact).abs().amax(-1) / exact.abs().amax(-1)).max())


@pytest.mark.parametrize("checkpoint", ["random", "trained"], indirect=True)
def test_bfloat16_differs_only_where_the_reference_hardly_prefers(checkpoint: Checkpoint) -> None:
    found = measure(checkpoint, count=16)
    print(found)
    assert found.widest_gap < found.epsilon
    assert found.rate < 0.05


@pytest.mark.slow
def test_bfloat16_divergence_is_measured(request: pytest.FixtureRequest) -> None:
    """The same over longer answers and both depths; the rates go into the results."""
    found = [
        measure(request.getfixturevalue(f"{name}_checkpoint"), count=64, depth=depth) for name in ("random", "trained") for depth in (1, 2)
    ]
    save_result("bfloat16-divergence", {"runs": [{**asdict(one), "rate": one.rate} for one in found]})
    assert all(one.widest_gap < one.epsilon for one in found)
