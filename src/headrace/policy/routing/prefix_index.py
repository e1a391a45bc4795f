"""Remembers which replica was sent which beginnings of prompts, so that routing knows what its prefix cache holds.

A chunk's id is the hash of the id before it and its tokens, and the first of a prompt follows on its tenant's salt and its adapter, so that
tenants share none. Two chunks of one tenant that are wrongly equal cost a wrong guess.

A replica's chunks are dropped in the order in which they were last sent, the end of a prompt before its beginning: so a replica that has
a chunk has all before it, and the length that it holds is found by halving.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, TypeVar

CHUNK_TOKENS = 128
"""An engine caches blocks of 16 tokens. An eighth of the ids is worth the time of at most 127 tokens that are computed unexpectedly."""

MAX_PROMPT_CHUNKS = 1024
"""Chunks that are known of one prompt: 131,072 tokens, whose ids take 0.7 ms to make."""

MAX_CHUNKS = 1 << 20
"""All replicas' together: 200 MB, 190 bytes for each."""

R = TypeVar("R", bound=Hashable)


def prompt_chunks(prompt_ids: tuple[int, ...], *, salt: bytes, adapter_digest: str) -> list[int]:
    """Ids of the full chunks among the prompt's first MAX_PROMPT_CHUNKS, the last one first. The same in every process."""
    root = blake2b(salt + adapter_digest.encode(), digest_size=7).digest()  # bytes have another hash in each process, integers do not
    chunks, chunk = [], int.from_bytes(root)
    last = min(len(prompt_ids), MAX_PROMPT_CHUNKS * CHUNK_TOKENS) - CHUNK_TOKENS
    for begin in range(0, last + 1, CHUNK_TOKENS):
        chunk = hash((chunk, prompt_ids[begin : begin + CHUNK_TOKENS]))
        chunks.append(chunk)
    chunks.reverse()
    return chunks


@dataclass(slots=True, eq=False)
class _Sent:
    """bit: of the replica in `PrefixIndex._holders`; chunks: least recently sent first"""

    instance: str
    bit: int
    chunks: OrderedDict[int, None] = field(default_factory=OrderedDict)


class PrefixIndex(Generic[R]):
    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._sent: dict[R, _Sent] = {}
        self._replicas: dict[int, R] = {}  # by bit
        self._holders: dict[int, int] = {}  # chunk -> bits of the replicas that were sent it

    def add(self, replica: R, instance: str, chunks: Sequence[int], *, kv_tokens: int) -> None:
        """The replica was sent a prompt of these chunks. instance: of its process, which begins with an empty cache"""
        sent = self._sent.get(replica)
        if sent is None or sent.instance != instance:
            self.forget(replica)
            bit = next(1 << place for place in range(len(self._replicas) + 1) if 1 << place not in self._replicas)
            sent = self._sent[replica] = _Sent(instance, bit)
            self._replicas[bit] = replica
        room = min(kv_tokens // CHUNK_TOKENS, self._max_chunks // len(self._sent))
        known, holders = sent.chunks, self._holders
        for chunk in chunks[max(0, len(chunks) - room) :]:
            if chunk in known:
                known.move_to_end(chunk)
            else:
                known[chunk] = None
                holders[chunk] = holders.get(chunk, 0) | sent.bit
        while len(known) > room:
            self._drop(known.popitem(last=False)[0], sent.bit)

    def forget(self, replica: R) -> None:
        sent = self._sent.pop(replica, None)
        if sent is not None:
            del self._replicas[sent.bit]
            for chunk in sent.chunks:
                self._drop(chunk, sent.bit)

    def tokens(self, replica: R, instance: str, chunks: Sequence[int]) -> int:
        """The length of the prompt's beginning that the replica was sent, in whole chunks."""
        sent = self._sent.get(replica)
        if sent is None or sent.instance != instance:
            return 0
        return CHUNK_TOKENS * (len(chunks) - _num_new(chunks, sent.chunks))

    def find(self, chunks: Sequence[int]) -> tuple[list[R], int | None]:
        """The replicas that were sent the longest known beginning of the prompt, and the first chunk that none was sent, unless one replica
        alone was sent all before it. In a conversation that is the first after its system prompt, and the same in a gateway that was asked
        none of its turns.
        """
        num_new = _num_new(chunks, self._holders)
        bits = self._holders[chunks[num_new]] if num_new < len(chunks) else 0
        if bits in self._replicas:
            return [self._replicas[bits]], None
        longest = [self._replicas[1 << place] for place, digit in enumerate(reversed(f"{bits:b}")) if digit == "1"]
        return longest, chunks[num_new - 1] if num_new else None

    def _drop(self, chunk: int, bit: int) -> None:
        if left := self._holders[chunk] & ~bit:
            self._holders[chunk] = left
        else:
            del self._holders[chunk]

    def check(self) -> None:
        assert sum(len(sent.chunks) for sent in self._sent.values()) == sum(bits.bit_count() for bits in self._holders.values())
        assert all(self._holders[chunk] & sent.bit for sent in self._sent.values() for chunk in sent.chunks)
        assert self._replicas == {sent.bit: replica for replica, sent in self._sent.items()}


def _num_new(chunks: Sequence[int], known: dict[int, int] | OrderedDict[int, None]) -> int:
    return bisect_left(chunks, True, key=known.__contains__)
