"""Computes the cost of a prompt chunk in tokens of a step's budget. The cost grows with the context before the chunk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkPrice:
    """A token with `costly_context` tokens before it (`core.model_info.ModelInfo`) costs two: its attention takes as long as its products.

    All tokens of a chunk cost as much as its first one. Attention inside the chunk is not charged: a chunk at a prompt's beginning has it
    too, at a cost of one per token, so a step whose budget is spent takes about as long as that chunk at most.
    costly_context 0: every token costs one.
    """

    costly_context: int = 0

    def most(self, start: int, budget: int) -> int:
        """The most tokens from position `start` on that `budget` pays for; at least one if the budget is not empty."""
        if not self.costly_context or budget <= 0:
            return max(budget, 0)
        return max(1, budget * self.costly_context // (self.costly_context + start))

    def surcharge(self, start: int, count: int) -> int:
        """The cost of `count` tokens from `start` on, beyond one each. A single token, as in decoding rows, has no surcharge."""
        return count * start // self.costly_context if self.costly_context and count > 1 else 0
