"""Applies repetition, frequency and presence penalties to the logits of one sequence, from counts of the tokens that it has had so far.

Only token ids that occurred are stored, so the cost of a step grows with the number of different tokens and not with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.core.sampling import SamplingParams

_LARGEST = np.finfo(np.float32).max


class TokenCounts:
    """Only repetition_penalty counts tokens of the prompt; without that penalty the ids of the prompt are not stored."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        known = np.unique(np.asarray(prompt_ids if self._repetition != 1.0 else (), dtype=np.int64))
        self._place = {int(token): place for place, token in enumerate(known)}
        size = len(known) + 2 * len(output_ids) + 16
        self._ids = np.zeros(size, dtype=np.int64)
        self._counts = np.zeros(size, dtype=np.int64)
        self._in_prompt = np.zeros(size, dtype=np.bool_)
        self._ids[: len(known)], self._in_prompt[: len(known)] = known, True
        for token in output_ids:
            self.add(token)

    def add(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token_id
        self._counts[place] += 1

    def retract(self, token_id: int) -> None:
        """Uncount one generated token, when its step is repeated."""
        self._counts[self._place[token_id]] -= 1

    def _grow(self) -> None:
        for name in ("_ids", "_counts", "_in_prompt"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros_like(column))))

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Penalise one row of logits [V] in place: repetition, then frequency, then presence.

        Computed in double precision and held below the largest float32, so that an extreme but legal penalty cannot make an infinity.
        """
        size = len(self._place)
        ids, counts = self._ids[:size], self._counts[:size]
        values = logits[ids].astype(np.float64)
        if self._repetition != 1.0:
            repeated = np.where(values > 0, values / self._repetition, values * self._repetition)
            values = np.where(self._in_prompt[:size] | (counts > 0), repeated, values)
        values -= self._frequency * counts
        values -= self._presence * (counts > 0)
        logits[ids] = np.minimum(values, _LARGEST)
