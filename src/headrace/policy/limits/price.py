"""Prices of tokens, and money as whole numbers, so that sums are exact in every store."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError

NANOS = 1_000_000_000
"""Nano-units of a currency's unit: money is counted in them. A token at 0.05 per million is 50 of them."""

MAX_PRICE = 1e6
"""Most per million tokens, in the currency's unit: sums of a month stay below what a 64-bit integer holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Per million tokens, in the operator's currency. cached_input: of prompt tokens found in a cache; None: as `input`"""

    input: float = 0.0
    output: float = 0.0
    cached_input: float | None = None

    def checked(self, where: str) -> Price:
        """This value if its rules hold. Raises ConfigError."""
        for name in ("input", "output", "cached_input"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_PRICE:
                raise ConfigError(f"{where}.{name}", f"{value} is outside 0..{MAX_PRICE:g} per million tokens")
        return self

    def cost_nanos(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Cost in NANOS, rounded up. cached_tokens: those of `prompt_tokens` that were found in a cache"""
        cached = self.input if self.cached_input is None else self.cached_input
        per_token = NANOS // 1_000_000
        cost = (prompt_tokens - cached_tokens) * self.input + cached_tokens * cached + completion_tokens * self.output
        return -int(-cost * per_token // 1)


FREE = Price()
"""The price of a model that the table does not name."""
