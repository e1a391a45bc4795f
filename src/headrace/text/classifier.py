"""Says of a prompt what kind of task it is, and how likely a small model will do.

Logistic regression over hashed n-grams: the distinct words, pairs of words and runs of 2 to 5 characters of a prompt and its length, each
1 / sqrt(number of them). tools/train_classifier makes the weights. A gateway without routes of several sizes needs no numpy, and imports
this module inside a function.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BUCKET_BITS = 17
NUM_BUCKETS = 1 << BUCKET_BITS
FIRST_CHARACTERS, LAST_CHARACTERS = 2000, 1000
"""What is read of a long prompt: an instruction stands at its beginning or its end, and what is pasted between them may be of any kind."""
MOST_CHARACTERS = FIRST_CHARACTERS + LAST_CHARACTERS
RUNS = (2, 3, 4, 5)
LENGTH_KIND = 1000

_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_MIX = np.uint64(0xD6E8FEB86659FD93)


def _powers(factor: int) -> NDArray[np.uint64]:
    return np.cumprod(np.array([1, *[factor] * (MOST_CHARACTERS + 2)], np.uint64), dtype=np.uint64)


_POWERS, _INVERSES = _powers(_FACTOR), _powers(_INVERSE)


class Task(StrEnum):
    """question   what a small model does as well: lookups, small talk, translating, rewriting, summarising, classifying, extracting
    code       writing, mending, explaining and reviewing programs, queries, shell commands; stack traces
    reasoning  several steps: mathematics, proofs, analysis, comparing, planning, long texts with constraints
    """

    QUESTION = "question"
    CODE = "code"
    REASONING = "reasoning"


TASKS = tuple(Task)


class Classified(NamedTuple):
    """task: the likeliest; question: the probability that a small model will do"""

    task: Task
    question: float


class RequestClassifier:
    """weights: the bytes of `headrace.bundled.CLASSIFIER`: a scale of each task and a bias of each as little-endian float32, then int8
    weights of shape [task, bucket]. Raises ValueError for another number of bytes.
    """

    def __init__(self, weights: bytes) -> None:
        num_tasks = len(TASKS)
        if len(weights) != (size := 8 * num_tasks + num_tasks * NUM_BUCKETS):
            raise ValueError(f"the classifier's weights are {len(weights)} bytes and must be {size}")
        self._scales, self._biases = np.frombuffer(weights, "<f4", 2 * num_tasks).astype(np.float64).reshape(2, num_tasks)
        self._weights = np.frombuffer(weights, np.int8, offset=8 * num_tasks).reshape(num_tasks, NUM_BUCKETS)

    def classify(self, text: str) -> Classified:
        """text: the last message of the user. Its cost has a bound: MOST_CHARACTERS are read."""
        found = buckets(text)
        sums = np.array([row.take(found).sum(dtype=np.int64) for row in self._weights])
        scores = sums * self._scales / math.sqrt(len(found)) + self._biases
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        return Classified(TASKS[int(shares.argmax())], float(shares[TASKS.index(Task.QUESTION)]))


def buckets(text: str) -> NDArray[np.int64]:
    """The distinct buckets of a prompt's n-grams, ascending, at least one. Letters in lower case, each digit a 0."""
    if len(text) > MOST_CHARACTERS:
        text = text[:FIRST_CHARACTERS] + text[-LAST_CHARACTERS:]
    text = f"\n{text.lower()[:MOST_CHARACTERS]}\n"  # lower() makes some letters two
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    points[(points >= 48) & (points <= 57)] = 48
    sums = np.zeros(len(points) + 1, np.uint64)
    np.cumsum(points * _POWERS[: len(points)], out=sums[1:])

    def hashed(kind: int, begins: NDArray[np.int64] | slice, ends: NDArray[np.int64] | slice) -> NDArray[np.uint64]:
        """A polynomial in 64 bits, moved to the power 0 wherever the run begins."""
        return _bucket((sums[ends] - sums[begins]) * _INVERSES[begins] + np.uint64(kind))

    in_word = (points == 48) | ((points >= 97) & (points <= 122)) | (points == 95) | (points >= 128)
    edges = np.flatnonzero(np.diff(in_word, prepend=False))
    begins, ends = edges[::2], edges[1::2]  # the last character is a line's end, so each word has its end
    seen = np.zeros(NUM_BUCKETS, bool)
    seen[hashed(0, begins, ends)] = True
    seen[hashed(1, begins[:-1], ends[1:])] = True
    for run in RUNS:
        seen[hashed(run, slice(max(0, len(points) - run + 1)), slice(run, None))] = True
    seen[_bucket(np.array([LENGTH_KIND + int(2 * math.log2(len(points)))], np.uint64))] = True
    return np.flatnonzero(seen)


def _bucket(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mixes the values, of which only high bits are kept."""
    mixed = values * _MIX
    return (mixed ^ (mixed >> np.uint64(32))) * _MIX >> np.uint64(64 - BUCKET_BITS)
