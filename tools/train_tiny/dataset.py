"""Turns corpus texts into packed arrays of token ids and loss masks, and into batches of similar length.

Documents are not packed together: they are short, so rows of one length bucket, right-padded, waste little and need no
mask beyond the causal one. A batch takes rows from all buckets in proportion, so every step sees every task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_tiny.chat import IM_END, IM_START

BUCKETS = (32, 48, 64, 96, 160, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Documents:
    """ids and supervised are flat; document i is [offsets[i], offsets[i + 1])."""

    ids: NDArray[np.uint16]
    supervised: NDArray[np.bool_]
    offsets: NDArray[np.int64]

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def save(self, path: Path) -> None:
        np.savez(path, ids=self.ids, supervised=self.supervised, offsets=self.offsets)

    @classmethod
    def load(cls, path: Path) -> Documents:
        with np.load(path) as arrays:
            return cls(arrays["ids"], arrays["supervised"], arrays["offsets"])


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Documents:
    ids: list[NDArray[np.uint16]] = []
    masks: list[NDArray[np.bool_]] = []
    (start,), (end,) = tokenizer.encode(IM_START).ids, tokenizer.encode(IM_END).ids
    header = [start, *tokenizer.encode("assistant\n").ids]
    source = iter(texts)
    while chunk := list(islice(source, 2000)):
        for encoding in tokenizer.encode_batch_fast(chunk):
            row = np.array(encoding.ids, dtype=np.uint16)
            if len(row) <= BUCKETS[-1]:
                ids.append(row)
                masks.append(supervised(row, header, end) if row[0] == start else np.ones(len(row), dtype=bool))
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in ids]))).astype(np.int64)
    return Documents(np.concatenate(ids), np.concatenate(masks), offsets)


def supervised(row: NDArray[np.uint16], header: list[int], end: int) -> NDArray[np.bool_]:
    """True for the content and the end mark of assistant turns."""
    mask = np.zeros(len(row), dtype=bool)
    size = len(header)
    for at in np.flatnonzero(row == header[0]):
        if row[at : at + size].tolist() == header:
            stop = at + size + int(np.argmax(row[at + size :] == end))
            mask[at + size : stop + 1] = True
    return mask


class Batches:
    """Endless shuffled micro-batches; one list of them is one optimizer step of about `step_tokens` tokens."""

    def __init__(self, documents: Documents, *, step_tokens: int, row_tokens: int = 1024, seed: int) -> None:
        self.documents = documents
        self.rng = np.random.default_rng(seed)
        lengths = documents.lengths()
        bounds = (0, *BUCKETS)
        self.buckets = [np.flatnonzero((lengths > low) & (lengths <= high)) for low, high in pairwise(bounds)]
        total = sum(len(rows) * size for rows, size in zip(self.buckets, BUCKETS, strict=True))
        self.share = [len(rows) * size / total for rows, size in zip(self.buckets, BUCKETS, strict=True)]
        self.step_tokens = step_tokens
        self.row_tokens = row_tokens
        self.owed = [0.0] * len(BUCKETS)
        self.queues: list[list[int]] = [[] for _ in BUCKETS]

    def __iter__(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        while True:
            step: list[tuple[Tensor, Tensor]] = []
            for i, share in enumerate(self.share):
                self.owed[i] += share * self.step_tokens
                while self.owed[i] >= self.row_tokens:
                    self.owed[i] -= self.row_tokens
                    step.append(self._rows(i))
            if step:
                yield step

    def _rows(self, bucket: int) -> tuple[Tensor, Tensor]:
        """(ids [B, T] int64, weights [B, T] float) of one bucket; a shape per bucket, so compiled code is reused."""
        size, count = BUCKETS[bucket], self.row_tokens // BUCKETS[bucket]
        queue = self.queues[bucket]
        while len(queue) < count:
            queue.extend(self.rng.permutation(self.buckets[bucket]).tolist())
        ids, weights = np.zeros((count, size), dtype=np.int64), np.zeros((count, size), dtype=np.float32)
        for row in range(count):
            at = queue.pop()
            low, high = self.documents.offsets[at], self.documents.offsets[at + 1]
            ids[row, : high - low] = self.documents.ids[low:high]
            weights[row, : high - low] = self.documents.supervised[low:high]
        return torch.from_numpy(ids), torch.from_numpy(weights)
