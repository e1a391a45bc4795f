"""Keeps the runner's state by slot, in numpy on the host: `SlotPart`s, and the one with token ids, block tables and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.core.plan import Plan, Started

Ints = NDArray[np.int64]


def column(values: object) -> Ints:
    return np.frombuffer(values, dtype=np.int32).astype(np.int64)  # type: ignore[call-overload,no-any-return]


class SlotPart(Protocol):
    """A part of a runner's state, kept by slot. Used by the runner's thread alone. Repeating `start` or `end` changes nothing."""

    def start(self, started: Started) -> None: ...

    def end(self, slots: Ints) -> None: ...

    def commit(self, slots: Ints, token_ids: Ints) -> None:
        """slots [N], token_ids [N]: a slot's tokens stand one behind the other, in order."""
        ...

    def retract(self, slot: int, token_ids: Ints) -> None:
        """The tokens' step was rolled back."""
        ...


class SlotState:
    """The `SlotPart` from which batches are built: tokens, block tables and sizes. Shape letters: N slots, L positions, M block-table
    width.

    token_ids        [N, L] int32, valid below `known`
    known            [N] number of known ids
    prompt_logprobs  [N] number of most likely tokens to list per prompt token; -1: prompt log-probabilities are not asked for
    failed           [N] whether the slot's last row failed, so that its next token will never be known
    tables           per KV group, [N, M] int32 block ids
    moved_from       for KV groups in whose blocks a reader of this column keeps KV of its own, [N] the first position whose block was
                     written into the table since the reader set it to `unmoved`
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, num_groups: int, block_size: int) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.known = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self.failed = np.zeros(max_num_seqs, dtype=np.bool_)
        self.table_width = -(-max_model_len // block_size) + 1
        self.tables = [np.zeros((max_num_seqs, self.table_width), dtype=np.int32) for _ in range(num_groups)]
        self.unmoved = self.table_width * block_size
        self.moved_from: dict[int, Ints] = {}

    def with_groups(self, groups: Sequence[int]) -> SlotState:
        """The same state, seen by a model whose KV group i has its blocks where group groups[i] of the target has them."""
        seen = copy(self)
        seen.tables = [self.tables[group] for group in groups]
        return seen

    def end(self, slots: Ints) -> None:
        self.known[slots] = 0
        self.prompt_logprobs[slots] = -1

    def start(self, started: Started) -> None:
        slot, count = started.slot, len(started.token_ids)
        self.token_ids[slot, :count] = started.token_ids
        self.known[slot], self.num_prompt[slot] = count, started.num_prompt_tokens
        asked = started.params.prompt_logprobs
        self.prompt_logprobs[slot] = -1 if asked is None else asked
        self.failed[slot] = False
        for table in self.tables:
            table[slot] = 0

    def write_tables(self, plan: Plan) -> None:
        """The last entry for a place wins: a fork's copy over the shared block."""
        if not plan.table_slots:
            return
        groups, slots, indices, blocks = (
            column(values) for values in (plan.table_groups, plan.table_slots, plan.table_indices, plan.table_blocks)
        )
        for group, table in enumerate(self.tables):
            mine = np.flatnonzero(groups == group)
            places = slots[mine] * table.shape[1] + indices[mine]
            # numpy promises no order among repeated places, so only the last entry of each is written
            _, from_the_end = np.unique(places[::-1], return_index=True)
            last = len(places) - 1 - from_the_end
            table.ravel()[places[last]] = blocks[mine[last]]
            if group in self.moved_from:
                np.minimum.at(self.moved_from[group], slots[mine], indices[mine] * self.block_size)

    def cache_places(self, token_slots: Ints, positions: Ints) -> list[Ints]:
        """Per KV group, the KV slots [T]."""
        size = self.block_size
        return [table[token_slots, positions // size].astype(np.int64) * size + positions % size for table in self.tables]

    def place_drafts(self, slots: Ints, starts: Ints, drafts: Ints) -> None:
        """Behind the known ids: the tokens of rows, which the next `commit` overwrites. slots, starts [D]: slot and position of each."""
        self.token_ids[slots, starts] = drafts

    def commit(self, slots: Ints, token_ids: Ints) -> None:
        repeats = slots[1:] == slots[:-1]
        if len(slots) < 2 or not np.count_nonzero(repeats):  # the usual case
            self.token_ids[slots, self.known[slots]] = token_ids
            self.known[slots] += 1
            return
        first = np.flatnonzero(np.append(True, ~repeats))
        counts = np.diff(np.append(first, len(slots)))
        behind = np.arange(len(slots)) - np.repeat(first, counts)
        self.token_ids[slots, self.known[slots] + behind] = token_ids
        self.known[slots[first]] += counts

    def retract(self, slot: int, token_ids: Ints) -> None:
        self.known[slot] -= len(token_ids)
