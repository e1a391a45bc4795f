"""Amounts of money are integers, so that sums are exact in every store."""

from __future__ import annotations

NANOS = 1_000_000_000
"""Nano-units of a currency's unit. A token at 0.05 per million is 50 of them."""
