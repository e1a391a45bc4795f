"""The shape of a model's KV cache: groups of layers that share one block table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose keys and values live in blocks of one shape and one lifetime.

    kv_heads     held by this rank
    scale_bytes  beside each key and each value of a head; 0 where the cache is not rounded
    window       tokens a query sees, itself included; None = everything before it
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int | None = None
    scale_bytes: int = 0

    def block_bytes(self, block_size: int) -> int:
        return len(self.layers) * 2 * block_size * self.kv_heads * (self.head_dim * self.dtype_bytes + self.scale_bytes)

    def tokens_needed(self, num_tokens: int) -> int:
        """The most tokens of the sequence that must be in the cache at once."""
        return num_tokens if self.window is None else min(num_tokens, self.window)
