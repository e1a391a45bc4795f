"""Optimizes the matrices by Muon and the rest by AdamW: markedly fewer steps than AdamW alone on a model this small.

Muon: momentum, then the update is replaced by its nearest orthogonal matrix (five Newton-Schulz steps), Jordan et al.
2024. Equal shapes are stacked so the iteration runs as a few batched GEMMs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Executor
from functools import partial

import torch
from torch import Tensor, nn


def orthogonalize(updates: Tensor, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz quintic of [N, rows, cols] towards U V^T, computed in `dtype`; coefficients from the Muon write-up."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = updates.shape[1] > updates.shape[2]
    x: Tensor = updates.transpose(1, 2) if tall else updates
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).to(updates.dtype)


class Muon:
    """Owns the momentum of the matrices given; `step` updates them in place."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], *, momentum: float = 0.95, weight_decay: float = 0.01, dtype: torch.dtype = torch.float32
    ) -> None:
        self.dtype = dtype
        self.momentum = momentum
        self.weight_decay = weight_decay
        groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            groups[tuple(matrix.shape)].append(matrix)
        self.groups = list(groups.values())
        self.buffers = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]

    def step(self, lr: float, pool: Executor) -> None:
        """The groups are independent, so `pool` takes them side by side."""
        list(pool.map(partial(self._step, lr), self.groups, self.buffers))

    @torch.no_grad()
    def _step(self, lr: float, group: list[nn.Parameter], buffer: Tensor) -> None:
        grads = torch.stack([_grad(matrix) for matrix in group])
        buffer.lerp_(grads, 1 - self.momentum)
        updates = orthogonalize(grads.lerp(buffer, self.momentum), self.dtype)
        rows, cols = updates.shape[1:]
        scale = lr * max(1.0, rows / cols) ** 0.5
        for matrix, update in zip(group, updates, strict=True):
            matrix.mul_(1 - lr * self.weight_decay).add_(update, alpha=-scale)


def _grad(matrix: nn.Parameter) -> Tensor:
    assert matrix.grad is not None
    return matrix.grad
