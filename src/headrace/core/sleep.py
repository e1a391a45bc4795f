"""How deeply an idle engine sleeps."""

from __future__ import annotations

from enum import StrEnum


class SleepLevel(StrEnum):
    RAM = "ram"
    """The memory of the KV cache and of recorded steps is given back; weights stay."""
    DISK = "disk"
    """So is that of the weights that are packed on disk too: they are read again."""
