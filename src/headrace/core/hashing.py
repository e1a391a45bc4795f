"""Block identity: a keyed 128-bit hash chain, the same in every process.

H(parent, tokens, modality digests), whose first parent is H(model digest, KV dtype, salt, adapter digest): equal identities hold equal
bytes. Keyed, so that a client that chooses tokens cannot choose hashes; the salt separates tenants.
"""

from __future__ import annotations

import re
from array import array
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

from headrace.core.errors import ConfigError

BLOCKS, SALTS = b"block hashes", b"salts of tenants"
BlockHash = NewType("BlockHash", bytes)
DIGEST_BYTES = 16
TENANT_SALT_BYTES = 16
"""A salt that is longer begins with what is the same in all salts of its tenant."""
_BLOCK = blake2b(digest_size=DIGEST_BYTES, person=b"headrace-block")
"""Copied for each block: half the time of setting one up."""


def check_secret(where: str, key: str) -> None:
    """Raises ConfigError unless `key` is empty or hex of 16 to 64 bytes, the most a keyed hash takes. No message shows the key."""
    if key and re.fullmatch(r"(?:[0-9a-fA-F]{2}){16,64}", key) is None:
        raise ConfigError(where, "is not an even number of 32 to 128 hex digits", "`openssl rand -hex 32` draws one.")


def site_secret(site_key: str, purpose: bytes) -> str:
    """A secret (hex) derived from the site's key for one purpose; "" for an empty key. Neither the key nor other secrets follow from it."""
    return blake2b(purpose, digest_size=32, key=bytes.fromhex(site_key), person=b"headrace-site").hexdigest() if site_key else ""


def chain_root(key: bytes, *, model_digest: bytes, kv_dtype: str, salt: bytes = b"", adapter_digest: bytes = b"") -> BlockHash:
    """The parent identity of a sequence's first block.

    key             secret of the deployment, at most 64 bytes; replicas that share blocks have the same
    kv_dtype        name of the cache's element type, as rounded: "bfloat16", "int8"
    """
    if len(key) > 64:
        raise ValueError("key must be at most 64 bytes")
    state = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"headrace-root")
    for part in (model_digest, kv_dtype.encode(), salt, adapter_digest):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return BlockHash(state.digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int], modality_digests: Sequence[bytes] = ()) -> BlockHash:
    """Each token is 4 bytes, little endian."""
    tokens = token_ids if isinstance(token_ids, array) and token_ids.typecode == "i" else array("i", token_ids)
    state = _BLOCK.copy()
    state.update(parent + tokens.tobytes())
    for digest in modality_digests:
        state.update(len(digest).to_bytes(8, "little"))
        state.update(digest)
    return BlockHash(state.digest())


RECORDED_BLOCK_TOKENS, MAX_RECORDED_BLOCKS = 128, 256
RECORDED_HASH_CHARS = 8
"""48 bits: among a million blocks one in 500 recordings has two that are wrongly equal."""


def recorded_blocks(key: bytes, token_ids: Sequence[int]) -> str:
    """The hashes of a prompt's first full blocks, RECORDED_HASH_CHARS each: equal where the prompts are equal up to the block's end.

    key  a tenant's secret salt, so that prompts seem to share no more than an engine's prefix cache lets them, and cannot be guessed
    """
    hashes, parent = bytearray(), chain_root(key, model_digest=b"", kv_dtype="")
    last = min(len(token_ids), MAX_RECORDED_BLOCKS * RECORDED_BLOCK_TOKENS) - RECORDED_BLOCK_TOKENS
    for begin in range(0, last + 1, RECORDED_BLOCK_TOKENS):
        parent = block_hash(parent, token_ids[begin : begin + RECORDED_BLOCK_TOKENS])
        hashes += parent[: RECORDED_HASH_CHARS * 6 // 8]
    return urlsafe_b64encode(hashes).decode()
