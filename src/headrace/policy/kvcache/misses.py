"""Remembers what says why a prompt's match with the prefix cache ended. Memory is bounded: what was forgotten counts as never seen.

A tenant learns of its own requests alone. An identity contains the salt, which the gateway makes from the tenant, so an evicted block that
a request asks for was its tenant's. Beginnings are compared where the tenant's part of the salt is equal.
"""

from __future__ import annotations

from array import array

from headrace.core.hashing import BlockHash

NUM_EVICTED = 2**16
"""512 KiB for each pool."""

MAX_BEGINNINGS = 4096
"""1.5 MB at most."""


class EvictedBlocks:
    """8 bytes of the identity of each evicted block; a later block takes the place of an earlier one with the same slot."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * NUM_EVICTED))

    def add(self, identity: BlockHash) -> None:
        number = int.from_bytes(identity[:8], "little")
        self._slots[number % NUM_EVICTED] = number

    def __contains__(self, identity: BlockHash) -> bool:
        number = int.from_bytes(identity[:8], "little")
        return self._slots[number % NUM_EVICTED] == number


class Beginnings:
    """The identities that first blocks of equal tokens have under different salts of one tenant."""

    def __init__(self) -> None:
        self._identities: dict[BlockHash, tuple[BlockHash, ...]] = {}
        """Identity under the tenant's part of the salt -> two of those under whole salts, the least recently used first. Of two, one
        is always another one.
        """

    def add(self, tenants: BlockHash, own: BlockHash) -> bool:
        """Whether these tokens came under another salt before."""
        known = self._identities.pop(tenants, ())
        self._identities[tenants] = known if own in known else (*known, own)[:2]
        if len(self._identities) > MAX_BEGINNINGS:
            del self._identities[next(iter(self._identities))]
        return any(identity != own for identity in known)
