"""Defines tiers, prices and the book of limits, as pure values and decisions. `gateway` keeps the counts (docs/tenancy.md)."""
