"""Runs one replica as several processes, its ranks: the links between them, rank 0's side and a member's side (docs/ranks.md)."""
