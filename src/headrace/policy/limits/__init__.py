"""Defines tiers, prices and the book of limits, as pure values and decisions."""
