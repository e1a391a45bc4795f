"""Trains the request classifier and writes its weights. Equal seeds give equal bytes.

    python -m tools.train_classifier.train [--folds 5] -> src/headrace/bundled/classifier.bin

Adagrad on the cross-entropy, a batch at a time. With --folds it writes nothing and prints the accuracy on templates that were left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.bundled import CLASSIFIER
from headrace.text.classifier import NUM_BUCKETS, TASKS, RequestClassifier, buckets
from tools.train_classifier.prompts import TrainingPrompt, training_prompts

EPOCHS, BATCH, RATE, DECAY = 5, 64, 0.2, 1e-6
"""DECAY: of the weights, beside the mean gradient of a batch. Chosen by --folds."""


class Features(NamedTuple):
    """buckets: of one prompt, see `headrace.text.classifier`; task: its number in `TASKS`"""

    buckets: NDArray[np.int64]
    task: int


def features_of(prompts: Sequence[TrainingPrompt]) -> list[Features]:
    return [Features(buckets(prompt.text), TASKS.index(prompt.task)) for prompt in prompts]


def fit(rows: Sequence[Features], seed: int = 0) -> bytes:
    """The weights as `RequestClassifier` reads them."""
    draw, num_tasks = np.random.default_rng(seed), len(TASKS)
    weights, squares = np.zeros((num_tasks, NUM_BUCKETS + 1)), np.full((num_tasks, NUM_BUCKETS + 1), 1e-8)  # the last column: the biases
    for _ in range(EPOCHS):
        order = draw.permutation(len(rows))
        for begin in range(0, len(rows), BATCH):
            gradient = _gradient(weights, [rows[index] for index in order[begin : begin + BATCH]]) + DECAY * weights
            squares += gradient * gradient
            weights -= RATE * gradient / np.sqrt(squares)
    biases, weights = weights[:, -1], weights[:, :-1]
    scales = (np.abs(weights).max(axis=1) / 127).astype("<f4")
    rounded = np.rint(weights / scales[:, None]).astype(np.int8)
    return bytes(scales.tobytes() + biases.astype("<f4").tobytes() + rounded.tobytes())


def _gradient(weights: NDArray[np.float64], batch: Sequence[Features]) -> NDArray[np.float64]:
    lengths = np.array([len(row.buckets) for row in batch])
    owner = np.repeat(np.arange(len(batch)), lengths)
    columns, values = np.concatenate([row.buckets for row in batch]), np.repeat(1 / np.sqrt(lengths), lengths)
    scores = np.stack([np.bincount(owner, row[columns] * values) for row in weights]) + weights[:, -1:]
    shares = np.exp(scores - scores.max(axis=0))
    shares /= shares.sum(axis=0)
    shares[[row.task for row in batch], np.arange(len(batch))] -= 1
    shares /= len(batch)
    found: NDArray[np.float64] = np.stack([np.bincount(columns, share[owner] * values, NUM_BUCKETS + 1) for share in shares])
    found[:, -1] = shares.sum(axis=1)
    return found


def left_out_accuracy(prompts: Sequence[TrainingPrompt], folds: int) -> float:
    """The share of right answers on prompts whose template the training did not see."""
    rows, num_right = features_of(prompts), 0
    for fold in range(folds):
        classifier = RequestClassifier(fit([row for row, prompt in zip(rows, prompts, strict=True) if prompt.template % folds != fold]))
        left_out = [prompt for prompt in prompts if prompt.template % folds == fold]
        num_right += sum(classifier.classify(prompt.text).task is prompt.task for prompt in left_out)
    return num_right / len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int)
    given = parser.parse_args()
    prompts = training_prompts()
    if given.folds is not None:
        print(f"{left_out_accuracy(prompts, given.folds):.3f} right on templates that were left out")
    else:
        CLASSIFIER.write_bytes(fit(features_of(prompts)))


if __name__ == "__main__":
    main()
