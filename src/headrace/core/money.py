"""Represents amounts of money as integers, so that sums are exact in every store. `policy.limits.price` has the prices of tokens."""

from __future__ import annotations

NANOS = 1_000_000_000
"""Nano-units of a currency's unit: money is counted in them. A token at 0.05 per million is 50 of them."""
