"""Lookups whose timing says nothing: digests are indexed by a keyed hash whose secret is drawn when the index is made.

The time of a lookup depends on a value that a client can neither compute nor choose (double HMAC): a comparison in constant time whose cost
does not grow with the number of entries.
"""

from __future__ import annotations

import hashlib
import secrets


class Blinding:
    """A digest to the place that it has in one index."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def __call__(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()
