"""The sampler: per-slot parameters kept as columns, one call per step over the rows that sample.

Order, per row (vLLM's, except that min_p comes last, as in transformers):
  1. the model's raw logits in float32; log-probabilities, if asked, are taken from these
  2. logit_bias is added
  3. repetition penalty over prompt and output, then frequency and presence over output
  4. what the row's grammar forbids is masked
  5. before min_tokens, end tokens (unless ignore_eos) and stop_token_ids are masked, as long as another token is left
  6. greedy rows take the best logit, lowest id first; other rows are filtered: temperature, top_k, top_p, min_p (`kernels.filters`)
  7. one uniform number per row, keyed by (seed, sequence index, position), picks the token
Masking after the penalties equals masking before them, as vLLM does: no penalty brings minus infinity back.

`sample` changes no state; `commit` records the chosen tokens. A step that fails in between can therefore be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.plan import NO_LOGPROBS, LogprobColumns, Started
from headrace.core.sampling import SamplingParams
from headrace.tensor.kernels.filters import ApplyMasks, Draw, FilterLimits, Floats, Ints, Words, apply_masks, best_tokens
from headrace.tensor.sampling.logprobs import not_asked, scattered, token_logprobs
from headrace.tensor.sampling.philox import uniform

_CHUNK_ELEMENTS = 1 << 20
"""Logits processed at a time, 4 MiB of float32: the passes over a chunk stay in a cache, and several threads still have rows each."""


NOT_A_DISTRIBUTION = "the model produced NaN or infinite logits for this sequence"

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
        """Uncount one generated token: its step is repeated, or it was a draft."""
        place = self._place[token_id]
        self._counts[place] -= 1
        if place == len(self._place) - 1 and not self._counts[place] and not self._in_prompt[place]:
            del self._place[token_id]

    def __len__(self) -> int:
        return len(self._place)

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


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Grammar masks: rows [M] of the N sampled, ascending; words [M, ceil(V / 32)], see `filters.Words`."""

    rows: Ints
    words: Words

    def within(self, rows: slice) -> RowMasks:
        first, last = np.searchsorted(self.rows, (rows.start, rows.stop))
        return RowMasks(self.rows[first:last] - rows.start, self.words[first:last])

    def where(self, is_kept: NDArray[np.bool_]) -> RowMasks:
        kept = is_kept[self.rows]
        return self if kept.all() else RowMasks(self.rows[kept], self.words[kept])


NO_ROWS_MASKED = RowMasks(np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.uint32))


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids [N], -1 for failed rows; failed [N]; logprobs: one position per row, or none if no row asked."""

    token_ids: Ints
    failed: NDArray[np.bool_]
    logprobs: LogprobColumns


class _Edits:
    def __init__(self, started: Started, eos_token_ids: frozenset[int]) -> None:
        params, prompt = started.params, started.num_prompt_tokens
        self._bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        self._end_ids = np.array(sorted(params.end_ids(eos_token_ids)), dtype=np.int64)
        self._ends_allowed_from = prompt + params.min_tokens
        ids = started.token_ids
        self.counts = TokenCounts(params, ids[:prompt], ids[prompt:]) if params.has_penalties else None

    def apply(self, logits: Floats) -> None:
        logits[self._bias_ids] += self._bias
        if self.counts is not None:
            self.counts.apply(logits)

    def mask_ends(self, logits: Floats, position: int) -> None:
        """Mask the end tokens of one row [V] in place, unless nothing else is left: a grammar may be at its end.

        position  of the token being chosen
        """
        if position < self._ends_allowed_from:
            ends = logits[self._end_ids]
            logits[self._end_ids] = -np.inf
            if logits.max() == -np.inf:
                logits[self._end_ids] = ends


class Sampler:
    """One thread at a time.

    draw  chooses the tokens of random rows: the backend's function, or the plain `kernels.filters.draw`
    mask  applies grammar masks: the backend's function, or the plain one
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], draw: Draw, mask: ApplyMasks = apply_masks) -> None:
        self._vocab_size, self._eos_token_ids, self._draw, self._mask = vocab_size, frozenset(eos_token_ids), draw, mask
        self._columns = SamplingColumns()
        self._edits: dict[int, _Edits] = {}

    def start(self, started: Started) -> None:
        """A slot that was not ended is overwritten."""
        self._columns.fill(started.slot, started.params, started.index, self._vocab_size)
        self._edits.pop(started.slot, None)
        if self._columns.edited[started.slot]:
            self._edits[started.slot] = _Edits(started, self._eos_token_ids)

    def end(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._edits.pop(slot, None)

    def retract(self, slot: int, token_ids: Iterable[int]) -> None:
        """Remove committed tokens of a slot: their step is being repeated."""
        edits = self._edits.get(slot)
        if edits is not None and edits.counts is not None:
            for token_id in token_ids:
                edits.counts.retract(token_id)

    def commit(self, slots: Ints, token_ids: Ints) -> None:
        """Row i of `slots` now also has token_ids[i]."""
        for row in np.flatnonzero(self._columns.edited[slots]):
            counts = self._edits[int(slots[row])].counts
            if counts is not None:
                counts.add(int(token_ids[row]))

    def sample(
        self,
        logits: Tensor,
        slots: Ints,
        positions: Ints,
        masks: RowMasks = NO_ROWS_MASKED,
        given: Ints | None = None,
        *,
        has_logprobs: bool = True,
    ) -> Sampled:
        """Choose one token per row.

        logits     [N, V], any float type and device; CONSUMED: a float32 host tensor is changed in place
        slots      [N], those of a slot one behind the other
        positions  [N] absolute position of the token being chosen
        masks      of the rows with a grammar
        given      [N] the draft before the position, which penalties count for this and the slot's later rows; -1: none. None: no drafts
        has_logprobs  False: log-probabilities are left out though a slot asks for them
        A row whose logits hold NaN or +inf, or nothing finite among what its mask allows, fails alone.
        """
        num_top = self._columns.num_top[slots] if has_logprobs else np.full(len(slots), -1)
        host = logits.detach().float().cpu().numpy()
        token_ids = np.full(len(slots), -1, dtype=np.int64)
        logprobs = LogprobColumns()
        size = max(1, _CHUNK_ELEMENTS // max(1, host.shape[1]))
        counted: list[tuple[TokenCounts, int]] = []
        try:
            with np.errstate(all="ignore"):
                for begin in range(0, len(slots), size):
                    rows = slice(begin, begin + size)
                    chunk = slots[rows], positions[rows], num_top[rows], masks.within(rows), None if given is None else given[rows]
                    token_ids[rows], found = self._sample_chunk(host[rows], *chunk, counted)
                    logprobs.extend(found)
        finally:
            for counts, token_id in reversed(counted):
                counts.retract(token_id)
        return Sampled(token_ids, token_ids < 0, logprobs if any(logprobs.ranks) else NO_LOGPROBS)

    def _sample_chunk(
        self,
        logits: Floats,
        slots: Ints,
        positions: Ints,
        num_top: Ints,
        masks: RowMasks,
        given: Ints | None,
        counted: list[tuple[TokenCounts, int]],
    ) -> tuple[Ints, LogprobColumns]:
        """counted: receives the drafts that penalties count from now on"""
        columns = self._columns
        best, peak = best_tokens(logits)
        good = np.isfinite(peak)
        asked = np.flatnonzero(good & (num_top >= 0))
        raw = logits[asked]
        edited = np.flatnonzero(good & columns.edited[slots])
        for row in edited:
            edits, draft = self._edits[int(slots[row])], -1 if given is None else int(given[row])
            if draft >= 0 and edits.counts is not None:
                edits.counts.add(draft)
                counted.append((edits.counts, draft))
            edits.apply(logits[row])
        masked = masks.where(good)
        if len(masked.rows):
            best[masked.rows], peak[masked.rows] = self._mask(logits, masked.rows, masked.words)
        if len(edited):
            for row in edited:
                self._edits[int(slots[row])].mask_ends(logits[row], int(positions[row]))
            best[edited], peak[edited] = best_tokens(logits[edited])
        good = np.isfinite(peak)
        token_ids = np.where(good, best, -1)
        random = np.flatnonzero(good & ~columns.greedy[slots])
        if len(random):
            chosen = logits if len(random) == len(logits) else logits[random]
            token_ids[random] = self._drawn(chosen, peak[random], slots[random], positions[random])
        return token_ids, self._report(raw, asked, token_ids, num_top)

    def _drawn(self, logits: Floats, peak: Floats, slots: Ints, positions: Ints) -> Ints:
        columns = self._columns
        u = uniform(columns.seed[slots], columns.index[slots], positions)
        limits = FilterLimits(columns.temperature[slots], columns.top_k[slots], columns.top_p[slots], columns.min_p[slots])
        return self._draw(logits, peak, u, limits)

    @staticmethod
    def _report(raw: Floats, asked: Ints, token_ids: Ints, num_top: Ints) -> LogprobColumns:
        """One position per row. raw: the logits of the rows that asked."""
        if not len(asked):
            return not_asked(len(token_ids))
        good = token_ids[asked] >= 0
        asked = asked[good]
        return scattered(token_logprobs(raw[good], token_ids[asked], num_top[asked]), asked, len(token_ids))
