"""What a chunk of a prompt costs of a step's token budget, by what comes before it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkPrice:
    """A token behind `costly_context` others (`core.model_info.ModelInfo`) costs two: its attention takes as long as its products.

    All tokens of a chunk cost what its first one does. They see more and more of their own chunk, too, but so do those of the chunk at a
    prompt's beginning, which costs one each and is as long: a step whose budget is spent takes at most about as long as that one.
    costly_context 0: every token costs one.
    """

    costly_context: int = 0

    def most(self, start: int, budget: int) -> int:
        """Most tokens from position `start` on that `budget` pays for; at least one while there is any."""
        if not self.costly_context or budget <= 0:
            return max(budget, 0)
        return max(1, budget * self.costly_context // (self.costly_context + start))

    def surcharge(self, start: int, count: int) -> int:
        """What `count` tokens from `start` on cost beyond one each. A single one, as rows that decode have, is never charged for more."""
        return count * start // self.costly_context if self.costly_context and count > 1 else 0
