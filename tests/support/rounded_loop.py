"""Computes the right tokens where weights or the cache are small integers: transformers' model with that arithmetic put in its place.

The arithmetic is written from what docs/kernels.md promises, and shares no code with the product. Products are summed in float64. What is
rounded is divided in float32, as promised: many bfloat16 weights are half as large as the largest of their row, so the quotient is exactly
63.5, where another precision could round to the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from plain_loop import PlainLoop
from torch import Tensor, nn

GROUP = 64
"""Inputs that share a scale in int4."""


class RoundedProduct(nn.Module):
    def __init__(self, linear: nn.Linear, quantization: str) -> None:
        super().__init__()
        self.weight = {"int8": _rounded_outputs, "int4": _rounded_groups}[quantization](linear.weight.detach().float())
        self.bias = None if linear.bias is None else linear.bias.detach().double()

    def forward(self, x: Tensor) -> Tensor:
        found = rounded_vectors(x.float()) @ self.weight.T
        return (found if self.bias is None else found + self.bias).to(x.dtype)


def rounded_vectors(x: Tensor) -> Tensor:
    """Each vector of the last dimension, float32, as 255 whole numbers around zero times one scale; float64."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    whole = (x * torch.full_like(largest, 127.0).div(largest.where(largest > 0, 1.0))).round().clamp(-127, 127)
    return whole.double() * (largest / 127).double()


def _rounded_outputs(weight: Tensor) -> Tensor:
    """The same, a scale per output; a weight is divided by its scale, an input multiplied by the inverse."""
    scale = weight.abs().amax(dim=-1, keepdim=True) / 127
    return (weight / scale.where(scale > 0, 1.0)).round().clamp(-127, 127).double() * scale.double()


def _rounded_groups(weight: Tensor) -> Tensor:
    """Whole numbers from -8 to 7; in each group the first of largest magnitude is -8, or nearly: the scale is a bfloat16."""
    grouped = weight.reshape(weight.shape[0], -1, GROUP)
    largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scale = (largest / -8).bfloat16().float().unsqueeze(-1)
    return ((grouped / scale.where(scale != 0, 1.0)).round().clamp(-8, 7).double() * scale.double()).flatten(1)


STORED: dict[str, Callable[[Tensor], Tensor]] = {
    "auto": lambda vectors: vectors,
    "bfloat16": lambda vectors: vectors.bfloat16().to(vectors.dtype),
    "int8": lambda vectors: rounded_vectors(vectors).to(vectors.dtype),
}


class RoundedLoop(PlainLoop):
    """quantization of every linear, the head included ("none": as they are); stored: what the cache makes of keys and values."""

    clear = 0.5
    """An input halfway between two whole numbers is rounded up by one right program and down by another; all after it differs a little."""

    def __init__(self, folder: Path, *, quantization: str, stored: str) -> None:
        super().__init__(folder)
        self._store = STORED[stored]
        if quantization != "none":
            for module in list(self.model.modules()):
                for name, child in list(module.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(module, name, RoundedProduct(child, quantization))

    def logits(self, ids: Sequence[int]) -> Tensor:
        with self._storing():
            return super().logits(ids)

    def certain(self, prompt: Sequence[int], count: int) -> list[int]:
        answer: list[int] = []
        while len(answer) < count:
            values, best = self.logits([*prompt, *answer])[-1].topk(2)
            if float(values[0] - values[1]) <= self.clear:
                break
            answer.append(int(best[0]))
        return answer

    @contextmanager
    def _storing(self) -> Iterator[None]:
        from transformers.models.llama import modeling_llama

        plain: Callable[..., Any] = modeling_llama.eager_attention_forward

        def stored(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any) -> Any:
            return plain(module, query, self._store(key), self._store(value), *arguments, **named)

        modeling_llama.eager_attention_forward = stored
        try:
            yield
        finally:
            modeling_llama.eager_attention_forward = plain
