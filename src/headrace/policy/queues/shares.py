"""Shares a step's token budget between prefilling sequences, by the same rule for every queue policy (`queue.Queue.shares`).

The planner asks for the shares (`policy.schedule.planner`). Which sequence comes first is the queue's own order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShares:
    """Shares of a step, the same for every policy here. A policy that differs has its own value or a subclass.

    long_prompt_steps     a prompt is long when the rest of it would fill more steps than this; sequences queued behind it then do not wait
                          for its end
    queued_share_divisor  while a long prompt prefills, 1/N of the step's remaining token budget is reserved for the sequences queued
                          behind it
    premium_headroom      fraction of slots and KV blocks that sequences of other classes leave free while premium requests come
    prefill               fraction of the tokens left over by decoding rows that prefills may take; the rest of the step stays unused
    """

    long_prompt_steps: int = 2
    queued_share_divisor: int = 4
    premium_headroom: float = 0.0
    prefill: float = 1.0

    def for_prefill(self, budget: int) -> int:
        """Tokens of `budget` that running and newly started prefills may take together: at least one if the budget is not empty."""
        return budget if self.prefill >= 1.0 or budget <= 0 else max(1, int(budget * self.prefill))

    def is_long(self, num_tokens: int, budget: int) -> bool:
        """Whether a prompt whose rest costs `num_tokens` is long, when a step has `budget` tokens for prefills."""
        return num_tokens > self.long_prompt_steps * max(budget, 1)

    def withheld_for_long(self, budget: int) -> int:
        """Tokens of `budget` withheld for long prompts while the sequences queued behind them take their share: at least one token, if
        two or more remain."""
        return budget - max(budget // self.queued_share_divisor, 1) if budget > 1 else max(budget, 0)
