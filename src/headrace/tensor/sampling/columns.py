"""Stores the sampling parameters of all sequence slots as columns (arrays), so that a step reads a parameter of all its rows at once."""

from __future__ import annotations

import numpy as np

from headrace.core.sampling import SamplingParams


class SamplingColumns:
    """Grows with the highest slot seen. A slot has the parameters of the last sequence that began there.

    temperature, top_k, top_p, min_p   of the filters; top_k is V where there is none
    seed, index                        the key of random numbers
    num_top                            most likely tokens to list; -1: no log-probabilities
    edited                             bias, penalties or min_tokens change the logits
    """

    def __init__(self) -> None:
        self.temperature = np.ones(0, dtype=np.float32)
        self.top_k = np.zeros(0, dtype=np.int64)
        self.top_p = np.ones(0, dtype=np.float64)
        self.min_p = np.zeros(0, dtype=np.float32)
        self.seed = np.zeros(0, dtype=np.uint64)
        self.index = np.zeros(0, dtype=np.int64)
        self.num_top = np.zeros(0, dtype=np.int64)
        self.greedy = np.zeros(0, dtype=np.bool_)
        self.edited = np.zeros(0, dtype=np.bool_)

    def fill(self, slot: int, params: SamplingParams, index: int, vocab_size: int) -> None:
        if slot >= len(self.greedy):
            self._grow(slot + 1)
        self.greedy[slot] = params.is_greedy
        self.temperature[slot] = 1.0 if params.is_greedy else params.temperature
        self.top_k[slot] = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p
        self.seed[slot] = (params.seed or 0) & (2**64 - 1)
        self.index[slot] = index
        self.num_top[slot] = -1 if params.logprobs is None else params.logprobs
        self.edited[slot] = bool(params.logit_bias) or params.min_tokens > 0 or params.has_penalties

    def _grow(self, needed: int) -> None:
        for name, column in vars(self).items():
            grown = np.zeros(max(needed, 2 * len(column), 16), dtype=column.dtype)
            grown[: len(column)] = column
            setattr(self, name, grown)
