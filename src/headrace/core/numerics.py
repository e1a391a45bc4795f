"""Decides whether two replicas compute the same results, so that a stream of one may be resumed at the other.

A replica's numerics are named facts (weights, dtype, kernels, ...), sent in its first frame (`ModelInfo.numerics`); gateways compare one
digest over all. "weights", a digest of all weight bytes and of config.json, takes seconds per gigabyte: until it is known the fact is
empty, and no stream is resumed at that replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

WEIGHTS = "weights"

Numerics = Mapping[str, str]


def numerics_digest(facts: Numerics) -> str:
    if not facts.get(WEIGHTS):
        return ""
    state = blake2b(digest_size=16, person=b"headrace-numeric")
    for name, value in sorted(facts.items()):
        for part in (name.encode(), value.encode()):
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def why_not_resume(first: Numerics, second: Numerics) -> str:
    """Why a stream of a replica with the facts `first` may not be resumed at one with `second`; "" where it may be."""
    for name, facts in (("first", first), ("second", second)):
        if not facts.get(WEIGHTS):
            return f"the weights of the {name} replica are not hashed yet"
    differing = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    return "; ".join(f"{name}: {first.get(name, 'not said')} and {second.get(name, 'not said')}" for name in differing)


def may_resume(first: str, second: str) -> bool:
    """Whether both digests are known and equal.

    The resumed stream has the same tokens for certain only where both replicas run with `deterministic`, which is one of the facts: without
    it the logits depend on the other sequences of a batch.
    """
    return bool(first) and first == second
