"""Holds one number of a plan with its unit and formula."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a plan. unit: empty for a plain number; formula: with the numbers filled in"""

    value: float
    unit: str
    formula: str
