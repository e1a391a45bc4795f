"""Numerics: the named facts on which equal results depend. A stream may go on at another replica only where they agree.

A replica's facts stand in its hello (`ModelInfo.numerics`); the digest over them is equal only where every fact is. "weights" is a digest
of all weight bytes and config.json: hashing them takes seconds per gigabyte and happens while the engine already answers, so it is empty
until it is known. Until then no stream may be resumed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

WEIGHTS = "weights"

Numerics = Mapping[str, str]
"""A replica's facts, by name."""


def numerics_digest(facts: Numerics) -> str:
    """A hex digest over all facts; "" while the weights' digest is not known."""
    if not facts.get(WEIGHTS):
        return ""
    state = blake2b(digest_size=16, person=b"headrace-numeric")
    for name, value in sorted(facts.items()):
        for part in (name.encode(), value.encode()):
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def why_not_resume(first: Numerics, second: Numerics) -> str:
    """Why a stream of a replica with the facts `first` may not go on at a replica with the facts `second`; "" if it may."""
    for name, facts in (("first", first), ("second", second)):
        if not facts.get(WEIGHTS):
            return f"the weights of the {name} replica are not hashed yet"
    differing = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    return "; ".join(f"{name}: {first.get(name, 'not said')} and {second.get(name, 'not said')}" for name in differing)


def may_resume(first: str, second: str) -> bool:
    """Whether a stream may go on at another replica: both numerics digests are known and equal.

    The continuation is equal to the bit only if both replicas run `deterministic`, which is one of the facts. Otherwise logits depend on
    the batch in which a sequence happens to be computed, at either replica. `why_not_resume` gives the reason.
    """
    return bool(first) and first == second
