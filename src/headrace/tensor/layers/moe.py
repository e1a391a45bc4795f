"""Sparse mixture of experts: a router picks `top_k` feed-forward blocks per token.

Experts run one after another, each over the tokens that chose it, or together where the backend can (`Backend.group_experts`). Results are
laid out by (token, choice) and summed over the choices in the router's order, so that a token's sum does not depend on its neighbours in
the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.tensor.batch import ForwardBatch
from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels import Linear
from headrace.tensor.kernels.rounding import Precision
from headrace.tensor.layers.weights import Part, WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """size: features of one expert. is_renormalised: the weights of the chosen experts are scaled to sum to one."""

    num_experts: int
    top_k: int
    size: int
    is_renormalised: bool
    activation: str = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeNames:
    """Tensor names below the layer's prefix.

    blocks          possible names of the block; the first whose router is stored is used
    gate, up, down  one expert's linears: "{block}.experts.{i}.{gate}.weight"
    """

    blocks: tuple[str, ...] = ("mlp",)
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class SparseMoe:
    """Each rank holds its share of every expert's features; with expert parallelism its share of the experts (`own`), whole, and it adds
    nothing for the others. Reads its own results in Python: never deferred.

    `expert_tokens` counts the tokens that chose each expert of all ranks, where experts run one after another.

    On disk experts are either one tensor each (`names`), or stacked: "{block}.experts.gate_up_proj" [X, 2F, E] and
    "{block}.experts.down_proj" [X, E, F] for X experts.
    """

    def __init__(self, reader: WeightReader, prefix: str, spec: MoeSpec, names: MoeNames, hidden_size: int) -> None:
        self.spec, self.kernels, self.peers = spec, reader.kernels, reader.peers
        self.expert_tokens = [0] * spec.num_experts
        reader = reader.without_adapters()
        present = [block for block in names.blocks if reader.source.has(f"{prefix}{block}.gate.weight")]
        block = prefix + (present or names.blocks)[0]
        self.router = reader.whole_linear(Part(f"{block}.gate.weight", spec.num_experts), hidden_size, precision=Precision.NONE)
        is_stacked = reader.source.has(f"{block}.experts.gate_up_proj")
        self.own, self.gate_up, self.down = range(spec.num_experts), list[Linear](), list[Linear]()
        if reader.place.parallelism.ep:
            self.own, reader = reader.share(spec.num_experts), reader.undivided()
        for index in self.own:
            parts = _stacked_expert(block, index, spec, hidden_size) if is_stacked else _own_expert(block, index, spec, names, hidden_size)
            self.gate_up.append(reader.column_linear(parts[:2], hidden_size, bias=False))
            self.down.append(reader.row_linear(parts[2], spec.size, bias=False))
        group = reader.backend.group_experts
        self._together = None if group is None else group(self.gate_up, self.down, spec.activation)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.router, *self.gate_up, *self.down

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, E], or [W, E] for the batch's selected tokens -> the same shape, summed over ranks."""
        weights, experts = self.route(x)
        compute, own = self._together or self._one_by_one, self.own
        if len(own) == self.spec.num_experts:
            return self.peers.reduce(weighted_sum(compute(x, experts), weights))
        if self._together is None:
            self._note(torch.bincount(experts.view(-1), minlength=self.spec.num_experts).tolist())
        is_others = (experts < own.start) | (experts >= own.stop)
        outputs = compute(x, (experts - own.start).masked_fill_(is_others, len(own)))
        return self.peers.reduce(weighted_sum(outputs.masked_fill_(is_others.view(-1, 1), 0.0), weights))

    def _one_by_one(self, x: Tensor, experts: Tensor) -> Tensor:
        """Implements `Experts`. The host reads how many tokens each expert has."""
        top_k = self.spec.top_k
        order = torch.argsort(experts.view(-1), stable=True)  # (token, choice) pairs, grouped by expert
        tokens = order // top_k
        outputs = empty((x.shape[0] * top_k, x.shape[1]), x.dtype, x.device)
        start = 0
        counts = torch.bincount(experts.view(-1), minlength=len(self.own))[: len(self.own)].tolist()
        if len(self.own) == self.spec.num_experts:
            self._note(counts)
        for expert, count in enumerate(counts):
            if count:
                chosen = slice(start, start + count)
                gated = self.kernels.gated_activation(self.gate_up[expert](x[tokens[chosen]]), self.spec.activation)
                outputs[order[chosen]] = self.down[expert](gated)
                start += count
        return outputs

    def _note(self, counts: list[int]) -> None:
        for expert, count in enumerate(counts):
            if count:
                self.expert_tokens[expert] += count

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, top_k] in x's dtype and expert indices [T, top_k] int64, the same on every rank.

        A library's product may have other bits with another number of threads: all ranks choose by the scores of the first one.
        """
        scores = self.router(x).float()
        self.peers.broadcast(scores)
        weights, experts = choose_experts(scores, self.spec.top_k, is_renormalised=self.spec.is_renormalised)
        return weights.to(x.dtype), experts

    def weight_bytes(self, *, one_token: bool) -> int:
        """Held; with one_token, those read for one token: the router and `top_k` experts, of which each rank has its share."""
        experts = sum(linear.weight_bytes for linear in (*self.gate_up, *self.down))
        if one_token:
            experts = experts * self.spec.top_k // self.spec.num_experts
        return self.router.weight_bytes + experts


def choose_experts(scores: Tensor, top_k: int, *, is_renormalised: bool) -> tuple[Tensor, Tensor]:
    """scores [T, X] float32 -> weights [T, top_k] of the best experts, best first, and their indices, int64. The softmax is over all."""
    weights, experts = scores.softmax(dim=-1).topk(top_k, dim=-1)
    if is_renormalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """outputs [T * top_k, E] by (token, choice), weights [T, top_k] -> [T, E]: each token's choices, summed in their order."""
    return (outputs.view(*weights.shape, outputs.shape[1]) * weights[:, :, None]).sum(dim=1)


def _own_expert(block: str, index: int, spec: MoeSpec, names: MoeNames, hidden_size: int) -> list[Part]:
    expert = f"{block}.experts.{index}"
    return [
        Part(f"{expert}.{names.gate}.weight", spec.size),
        Part(f"{expert}.{names.up}.weight", spec.size),
        Part(f"{expert}.{names.down}.weight", hidden_size),
    ]


def _stacked_expert(block: str, index: int, spec: MoeSpec, hidden_size: int) -> list[Part]:
    where = (index, spec.num_experts)
    return [
        Part(f"{block}.experts.gate_up_proj", spec.size, 0, 2 * spec.size, where),
        Part(f"{block}.experts.gate_up_proj", spec.size, spec.size, 2 * spec.size, where),
        Part(f"{block}.experts.down_proj", hidden_size, expert=where),
    ]
