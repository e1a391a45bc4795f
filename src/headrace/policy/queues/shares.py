"""How a step's tokens are shared between sequences that prefill: part of what a queue policy answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShares:
    """The shares every policy here has; one that differs has a value, or a subclass, of its own.

    long_prompt_steps  a prompt that would fill more steps than this is long: those queued behind it do not wait for its end
    queued_share_divisor        one part in so many of what is left of a step's tokens goes to those queued behind a long prompt first
    prefill            share of what rows that decode leave of a step's tokens; the rest is not used
    """

    long_prompt_steps: int = 2
    queued_share_divisor: int = 4
    prefill: float = 1.0

    def for_prefill(self, budget: int) -> int:
        """Tokens of `budget` that prefills may take, those of admitted sequences included; at least one while there is any."""
        return budget if self.prefill >= 1.0 or budget <= 0 else max(1, int(budget * self.prefill))

    def is_long(self, num_tokens: int, budget: int) -> bool:
        """Whether the rest of a prompt is long, which costs `num_tokens`, for steps that have `budget` for prefills."""
        return num_tokens > self.long_prompt_steps * max(budget, 1)

    def reserved_for_long(self, budget: int) -> int:
        """What long prompts keep of a budget while those behind them have their share, which is one token at least."""
        return budget - max(budget // self.queued_share_divisor, 1) if budget > 1 else max(budget, 0)
