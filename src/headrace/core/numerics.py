"""Decides whether two replicas compute the same results, so that a stream of one replica may be resumed at the other.

A replica has numerics: named facts on which its results depend (weights, dtype, kernels, ...), sent to the gateway in the replica's first
frame (`ModelInfo.numerics`). A stream may be resumed only at a replica with the same value of every fact; gateways compare one digest
over all facts.

The fact "weights" is a digest of all weight bytes and of config.json. Hashing takes seconds per gigabyte, and the engine serves requests
meanwhile. Until the hash is known the fact is empty, and no stream is resumed at that replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

WEIGHTS = "weights"

Numerics = Mapping[str, str]
"""Name of a fact -> its value at one replica."""


def numerics_digest(facts: Numerics) -> str:
    """Hex digest over all facts; "" while the digest of the weights is unknown."""
    if not facts.get(WEIGHTS):
        return ""
    state = blake2b(digest_size=16, person=b"headrace-numeric")
    for name, value in sorted(facts.items()):
        for part in (name.encode(), value.encode()):
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def why_not_resume(first: Numerics, second: Numerics) -> str:
    """Why a stream of a replica with the facts `first` may not be resumed at a replica with the facts `second`; "" where it may be."""
    for name, facts in (("first", first), ("second", second)):
        if not facts.get(WEIGHTS):
            return f"the weights of the {name} replica are not hashed yet"
    differing = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    return "; ".join(f"{name}: {first.get(name, 'not said')} and {second.get(name, 'not said')}" for name in differing)


def may_resume(first: str, second: str) -> bool:
    """Whether a stream of a replica with the numerics digest `first` may be resumed at one with `second`: both are known and equal.

    The resumed stream has the same tokens for certain only when both replicas run with `deterministic`, which is one of the facts. Without
    `deterministic` the logits depend on the other sequences of a batch, at either replica. `why_not_resume` gives the reason of a refusal.
    """
    return bool(first) and first == second
