"""Drafts with a second, smaller model that has the target's tokenizer and a KV cache of its own.

The cache has no block tables: the draft's keys and values of a position stand in the block of the same number as the target's, in pools
of as many blocks. So prefix sharing, preemption and forks need nothing here. A block that several sequences share is written by each of
them, which is harmless: its values are a function of its tokens, and everything runs on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.core.plan import Started
from headrace.core.speculation import MAX_SPECULATIVE_TOKENS
from headrace.engine.runner.batch import Rows, base_rows, build_batch, sampled_positions, select_tokens, upload_each
from headrace.engine.runner.model_runner import Model
from headrace.engine.runner.slots import Ints, SlotState
from headrace.tensor.batch import KvCache
from headrace.tensor.sampling import Sampler

MAX_CATCH_UP_TOKENS = 256
"""Known tokens that one call computes over all slots: a long prompt is drafted for some steps later, and delays no other sequence."""

_WARM_UP_COUNTS = ((2,), (1,), (1, 1, 1, 1), (2, 1))


class ModelDrafter:
    """Shape letters: N slots that are asked, D MAX_SPECULATIVE_TOKENS.

    A draft is what the slot's parameters choose from the draft model's logits, with the random number that the target will use at that
    position: where both models have the same distribution, the draft is right. Penalties count no drafts, and no grammar is followed.

    slots, sampler   of the target
    group            the target's KV group whose blocks are used: full attention
    max_model_len    of the draft model: nothing is drafted beyond it
    num_filled       per slot, leading positions whose KV is there: of tokens that were known or drafted when `draft` was last asked
    """

    def __init__(self, slots: SlotState, sampler: Sampler, *, model: Model, kv: KvCache, group: int, max_model_len: int) -> None:
        num_slots, num_positions = slots.token_ids.shape
        self._slots, self._sampler, self._model, self._kv = slots, sampler, model, kv
        self._state = slots.with_groups([group] * len(kv.pools))
        self._table = slots.tables[group]
        self._moved_from = slots.moved_from[group] = np.full(num_slots, slots.unmoved, dtype=np.int64)
        self._max_model_len = min(max_model_len, num_positions - 1)
        self.num_filled = np.zeros(num_slots, dtype=np.int64)
        self._drafted_from = np.zeros(num_slots, dtype=np.int64)
        self._drafted = np.zeros((num_slots, MAX_SPECULATIVE_TOKENS), dtype=np.int32)

    def start(self, started: Started) -> None:
        self.num_filled[started.slot] = 0

    def end(self, slots: Ints) -> None:
        """The next `start` forgets."""

    def commit(self, slots: Ints, token_ids: Ints) -> None:
        """Compared with what was drafted when the next drafts are asked for."""

    def retract(self, slot: int, token_ids: Ints) -> None:
        """After `SlotState` has retracted them."""
        self.num_filled[slot] = min(self.num_filled[slot], self._slots.known[slot])

    def close(self) -> None:
        """Its memory goes with it."""

    def warm_up(self) -> None:
        """Computes steps of few tokens over the pad block, while no slot is in use."""
        for counts in _WARM_UP_COUNTS:
            slots = np.arange(min(len(counts), len(self.num_filled)))
            lengths = np.minimum(counts[: len(slots)], self._max_model_len)
            self._logits(base_rows(slots, np.zeros_like(slots), lengths, np.ones_like(slots)))
        self.num_filled[:] = 0
        self._kv.clear_pad_block()

    def draft(self, slots: Ints, most: Ints) -> Sequence[Ints]:
        """A slot whose known tokens have not all been computed yet, as after a long prompt, has no drafts."""
        most = self._within_blocks(slots, most)
        self._forget_rejected(slots)
        known = self._slots.known[slots]
        self._drafted_from[slots] = known
        drafts, counts = np.zeros((len(slots), most.max(initial=0)), dtype=np.int64), np.zeros(len(slots), dtype=np.int64)
        places, rows = self._catch_up(slots, most, known)
        for index in range(drafts.shape[1]):
            if not len(places):
                break
            chosen = self._choose(rows)
            places = places[rows.samples > 0]
            is_token = chosen >= 0
            places, chosen = places[is_token], chosen[is_token]
            drafts[places, index] = chosen
            counts[places] = index + 1
            goes_on = most[places] > index + 1
            places, chosen = places[goes_on], chosen[goes_on]
            self._drafted[slots[places], index] = chosen
            starts, ones = known[places] + index, np.ones(len(places), dtype=np.int64)
            self._slots.place_drafts(slots[places], starts, chosen)
            rows = base_rows(slots[places], starts, ones, ones)
        return [row[:count] for row, count in zip(drafts, counts.tolist(), strict=True)]

    def _within_blocks(self, slots: Ints, most: Ints) -> Ints:
        """[N] at most `most`. A draft follows a position that is computed: below `max_model_len`, in a block that the slot holds."""
        most = np.minimum(most, MAX_SPECULATIVE_TOKENS)
        positions = self._slots.known[slots][:, None] - 1 + np.arange(most.max(initial=0))
        blocks = np.minimum(positions, self._max_model_len - 1) // self._slots.block_size
        can_compute = (positions < self._max_model_len) & (self._table[slots[:, None], blocks] != 0)
        possible: Ints = can_compute.cumprod(axis=1).sum(axis=1)
        return np.minimum(most, possible)

    def _forget_rejected(self, slots: Ints) -> None:
        """KV of rejected drafts, of what stands in other blocks now, and of the last known token, from which the first draft is made."""
        known, filled, token_ids = self._slots.known[slots], self.num_filled[slots], self._slots.token_ids
        positions = self._drafted_from[slots][:, None] + np.arange(MAX_SPECULATIVE_TOKENS)
        is_filled = positions < filled[:, None]
        now = token_ids[slots[:, None], np.minimum(positions, token_ids.shape[1] - 1)]
        num_right = (is_filled & (now == self._drafted[slots])).cumprod(axis=1).sum(axis=1)
        self.num_filled[slots] = np.minimum.reduce([filled, self._drafted_from[slots] + num_right, known - 1, self._moved_from[slots]])
        self._moved_from[slots] = self._slots.unmoved

    def _catch_up(self, slots: Ints, most: Ints, known: Ints) -> tuple[Ints, Rows]:
        """Rows of the known tokens that are not filled, the fewest first, and each row's place among `slots`. Rows that reach the last
        known token sample."""
        asked = np.flatnonzero(most)
        counts = known[asked] - self.num_filled[slots[asked]]
        order = np.argsort(counts, kind="stable")
        places, counts = asked[order], counts[order]
        granted = np.minimum(counts, MAX_CATCH_UP_TOKENS - (np.cumsum(counts) - counts))
        places, counts, granted = (column[granted > 0] for column in (places, counts, granted))
        return places, base_rows(slots[places], self.num_filled[slots[places]], granted, (granted == counts).astype(np.int64))

    def _choose(self, rows: Rows) -> Ints:
        """The token chosen after each row that samples; -1: none could be."""
        positions = sampled_positions(rows)
        return self._sampler.sample(self._logits(rows), positions.slots, positions.places, has_logprobs=False).token_ids

    @torch.inference_mode()
    def _logits(self, rows: Rows) -> Tensor:
        """One pass. Those of the last token of each row that samples."""
        positions = sampled_positions(rows)
        selected = select_tokens(rows, positions, np.zeros(len(rows.slots), dtype=np.int64))
        ids, batch = build_batch(rows, self._state, partial(upload_each, device="cpu"), selected)
        hidden = self._model.forward(ids, batch, self._kv)
        self.num_filled[rows.slots] = rows.ends
        last = torch.from_numpy(selected.places(positions.tokens))
        return self._model.logits(hidden if len(last) == len(hidden) else hidden[last])

    def check(self) -> None:
        """Raises AssertionError if KV is counted that no block of its slot can hold."""
        held = np.count_nonzero(self._table, axis=1) * self._slots.block_size
        assert (self.num_filled <= np.minimum(held, self._max_model_len)).all(), "KV beyond the slots' blocks"
