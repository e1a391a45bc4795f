"""Tests what torch computes of a mixture of experts: a token's experts and their sum have the same bits alone, in a batch, on any
threads.

Sizes are those of real models, for which torch splits its work over threads and vectors otherwise than for tiny ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.core.parallelism import ALONE, Parallelism, Place
from headrace.tensor.batch import ForwardBatch
from headrace.tensor.checkpoint.random_weights import RandomWeights
from headrace.tensor.device import CPU
from headrace.tensor.kernels import Experts, Linear
from headrace.tensor.kernels.reference import BACKEND, KERNELS
from headrace.tensor.layers.moe import MoeNames, MoeSpec, SparseMoe, choose_experts, weighted_sum
from headrace.tensor.layers.weights import WeightReader

pytestmark = pytest.mark.pure

TOKENS = 150


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def mixed(scores: Tensor, outputs: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts, their weights, and the weighted sums of their outputs [T, top_k, E]."""
    weights, experts = choose_experts(scores, top_k, is_renormalised=True)
    return experts, weights, weighted_sum(outputs.flatten(0, 1), weights.to(outputs.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_experts", "top_k", "width"), [(8, 2, 4096), (128, 8, 2048), (60, 4, 1408), (5, 3, 100), (16, 1, 64)])
def test_a_token_is_mixed_alone_as_in_a_batch(num_experts: int, top_k: int, width: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(num_experts)
    scores = torch.randn(TOKENS, num_experts, generator=draw)
    scores[::7] = scores[::7].round()  # equal scores: which expert is taken must not depend on the batch, either
    outputs = torch.randn(TOKENS, top_k, width, generator=draw).to(dtype)
    torch.set_num_threads(1)
    together = mixed(scores, outputs, top_k)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for size in (1, 2, 3, 17, TOKENS):
            for first in range(0, TOKENS - size + 1, 4 * size):
                rows = slice(first, first + size)
                for whole, part in zip(together, mixed(scores[rows], outputs[rows], top_k), strict=True):
                    assert torch.equal(whole[rows], part), (threads, size, first)


def test_a_backend_that_runs_experts_together_is_asked_for_their_outputs() -> None:
    """The layer's result is the one of its experts run one after another, and the host is not asked which of them were chosen."""
    asked: list[tuple[int, ...]] = []

    def group(gate_up: Sequence[Linear], down: Sequence[Linear], activation: str) -> Experts:
        def run(x: Tensor, experts: Tensor) -> Tensor:
            asked.append(tuple(experts.shape))
            chosen = [(token, int(expert)) for token, row in enumerate(experts) for expert in row]
            gated = (KERNELS.gated_activation(gate_up[expert](x[token : token + 1]), activation) for token, expert in chosen)
            return torch.cat([down[expert](row) for row, (_, expert) in zip(gated, chosen, strict=True)])

        return run

    spec = MoeSpec(num_experts=5, top_k=2, size=24, is_renormalised=True)
    layers = [
        SparseMoe(WeightReader(RandomWeights(3, torch.float32, 1.0), backend, torch.float32, CPU), "layer.", spec, MoeNames(), 16)
        for backend in (BACKEND, replace(BACKEND, group_experts=group), replace(BACKEND, group_experts=lambda *_: None))
    ]
    x = torch.randn(7, 16)
    batch = ForwardBatch(torch.arange(7), torch.tensor([0, 7]), torch.tensor([7]), 7, ())
    plain, together, refused = (layer(x, batch) for layer in layers)
    assert torch.allclose(together, plain, atol=1e-6)
    assert torch.equal(refused, plain)
    assert asked == [(7, 2)]


@pytest.mark.parametrize("is_together", [False, True])
def test_ranks_that_divide_the_experts_add_up_to_all_of_them(is_together: bool) -> None:
    """Experts of another rank have the number that follows the last, and their outputs may be anything."""

    def group(gate_up: Sequence[Linear], down: Sequence[Linear], activation: str) -> Experts:
        def run(x: Tensor, experts: Tensor) -> Tensor:
            outputs = torch.full((experts.numel(), x.shape[1]), float("nan"))
            for pair, expert in enumerate(experts.view(-1).tolist()):
                assert 0 <= expert <= len(down)
                if expert < len(down):
                    token = pair // experts.shape[1]
                    outputs[pair] = down[expert](KERNELS.gated_activation(gate_up[expert](x[token : token + 1]), activation))[0]
            return outputs

        return run

    spec, source = MoeSpec(num_experts=6, top_k=2, size=24, is_renormalised=True), RandomWeights(3, torch.float32, 1.0)
    backend = replace(BACKEND, group_experts=group) if is_together else BACKEND
    x, batch = torch.randn(7, 16), ForwardBatch(torch.arange(7), torch.tensor([0, 7]), torch.tensor([7]), 7, ())

    def layer(place: Place) -> SparseMoe:
        return SparseMoe(WeightReader(source, backend, torch.float32, CPU, place), "layer.", spec, MoeNames(), 16)

    ranks = [layer(Parallelism(3, ep=True).place(rank)) for rank in range(3)]
    assert [rank.own for rank in ranks] == [range(2), range(2, 4), range(4, 6)]
    assert torch.allclose(sum(rank(x, batch) for rank in ranks), layer(ALONE)(x, batch), atol=1e-6)  # type: ignore[arg-type]
