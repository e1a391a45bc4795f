"""Recognizes GGUF files and their shards by name. Every command imports this module at start."""

from __future__ import annotations

import re
from pathlib import Path

SUFFIX = ".gguf"
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
"""A shard's name without suffix: the model's, the shard's number from 1 on, how many there are."""


def is_gguf(name: str | Path) -> bool:
    return str(name).lower().endswith(SUFFIX)


def is_first(path: Path) -> bool:
    found = SHARD.fullmatch(path.stem)
    return found is None or int(found[2]) == 1


def model_name(path: Path) -> str:
    found = SHARD.fullmatch(path.stem)
    return found[1] if found else path.stem
