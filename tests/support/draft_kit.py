"""Drives a `ModelDrafter` as a scheduler and a runner would: blocks that are shared, copied and used again, tokens that are committed and
retracted.

`ChainModel` stands for a draft model whose next token depends on every token before it, and on every key that it reads.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from headrace.core.ids import SlotId
from headrace.core.plan import SYNCHRONOUS, Plan, Started
from headrace.core.sampling import SamplingParams
from headrace.engine.runner.batch import base_rows
from headrace.engine.runner.drafts import model as drafting
from headrace.engine.runner.drafts.model import ModelDrafter
from headrace.engine.runner.model_runner import Model
from headrace.engine.runner.slots import SlotState
from headrace.engine.runner.state import RunnerState
from headrace.tensor.batch import ForwardBatch, KvCache, allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.kernels.filters import draw
from headrace.tensor.sampling import Sampler

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=None)
CHAIN_VOCAB = 11


def chained(before: int, token: int) -> int:
    return crc32(f"{before} {token}".encode()) & 0x7FFFFFFF


def chain_continuation(ids: Sequence[int], count: int) -> list[int]:
    """What a `ChainModel` drafts to follow `ids`."""
    value, found = 1, []
    for token in ids:
        value = chained(value, token)
    for _ in range(count):
        found.append(value % CHAIN_VOCAB)
        value = chained(value, found[-1])
    return found


class ChainModel:
    """The key of a position is a hash of the key before it, read through the block table, and of its token."""

    vocab_size = CHAIN_VOCAB

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        self.num_tokens.append(len(ids))
        size, values = kv.block_size, kv.layers[0].values.numpy()
        keys = values.view(np.int32)[:, 0, :, 0, 0]
        tables, places = batch.groups[0].block_table.tolist(), batch.groups[0].slot_mapping.tolist()
        starts, positions, hidden = batch.row_starts.tolist(), batch.positions.tolist(), list[int]()
        for table, first, end in zip(tables, starts, starts[1:], strict=False):
            for position, place, token in zip(positions[first:end], places[first:end], ids[first:end].tolist(), strict=True):
                assert place == table[position // size] * size + position % size >= size, "a block that the slot holds"
                before = position - 1
                hidden.append(chained(int(keys[table[before // size], before % size]) if position else 1, token))
                keys[place // size, place % size] = hidden[-1]
        found = torch.tensor(hidden)[:, None]
        return found if batch.selected is None else found[batch.selected]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0] % CHAIN_VOCAB, CHAIN_VOCAB).float()


@dataclass
class Drafted:
    """A sequence in a slot. tokens: known to the runner; the KV of the last one is not computed yet"""

    tokens: list[int]
    num_prompt: int
    blocks: list[int]


class DraftWorld:
    """Sequences in slots, whose tokens the test decides: no target model runs.

    continuation   what the draft model is expected to draft
    """

    def __init__(
        self,
        model: Model,
        continuation: Callable[[Sequence[int], int], list[int]],
        *,
        shapes: Sequence[tuple[int, int]] = ((1, 1),),
        num_slots: int = 4,
        num_blocks: int = 24,
        block_size: int = 4,
        max_model_len: int = 40,
        draft_max_len: int = 1 << 20,
    ) -> None:
        self.continuation, self.block_size, self.max_model_len = continuation, block_size, max_model_len
        self.limit = min(max_model_len, draft_max_len)
        self.slots = SlotState(num_slots, max_model_len, 1, block_size)
        sampler = Sampler(model.vocab_size, (), draw)
        kv = allocate_kv(shapes, (0,) * len(shapes), (num_blocks,), block_size, torch.float32, CPU)
        target = allocate_kv([(1, 1)], (0,), (num_blocks,), block_size, torch.float32, CPU)
        self.drafter = ModelDrafter(self.slots, sampler, model=model, kv=kv, group=0, max_model_len=draft_max_len)
        self.state = RunnerState(target, self.slots, sampler, self.drafter)
        self.free = list(range(num_blocks - 1, 0, -1))
        self.held: Counter[int] = Counter()
        self.live: dict[int, Drafted] = {}
        self.drafts: dict[int, list[int]] = {}
        self._clear()

    def _clear(self) -> None:
        self._started: list[Started] = []
        self._ended: list[int] = []
        self._tables: list[tuple[int, int, int]] = []
        self._moves: list[tuple[int, int]] = []

    # what a scheduler decides

    def start(self, slot: int, tokens: Sequence[int], num_prompt: int, params: SamplingParams = GREEDY) -> None:
        """Full blocks of equal tokens are shared with a sequence that has them."""
        sequence = Drafted(list(tokens), num_prompt, [])
        for other in self.live.values():
            shared = 0
            for end in range(self.block_size, min(len(other.tokens), len(tokens)), self.block_size):
                shared = end if other.tokens[:end] == sequence.tokens[:end] else shared
            if shared > len(sequence.blocks) * self.block_size:
                sequence.blocks = other.blocks[: shared // self.block_size]
        self._begin(slot, sequence, params)

    def fork(self, source: int, slot: int) -> None:
        """The prompt's last block, which may be full only in part, is shared too."""
        parent = self.live[source]
        prompt = parent.tokens[: parent.num_prompt]
        self._begin(slot, Drafted(prompt, len(prompt), parent.blocks[: -(-len(prompt) // self.block_size)]), GREEDY)

    def _begin(self, slot: int, sequence: Drafted, params: SamplingParams) -> None:
        self.held.update(sequence.blocks)
        self.live[slot] = sequence
        self._started.append(Started(SlotId(slot), array("i", sequence.tokens), sequence.num_prompt, params, 0))
        self._tables += [(slot, index, block) for index, block in enumerate(sequence.blocks)]

    def end(self, slot: int) -> None:
        self._ended.append(slot)
        for block in self.live.pop(slot).blocks:
            self._drop(block)
        self.drafts.pop(slot, None)

    def preempt(self, slot: int) -> None:
        sequence = self.live[slot]
        self.end(slot)
        self.apply()
        self.start(slot, sequence.tokens, sequence.num_prompt)

    def grow(self, slot: int, end: int) -> bool:
        """Makes the positions from the first uncomputed one up to `end` writable. False, and nothing done, where blocks are short."""
        sequence, size = self.live[slot], self.block_size
        first = (len(sequence.tokens) - 1) // size
        copied = [index for index in range(first, len(sequence.blocks)) if self.held[sequence.blocks[index]] > 1]
        missing = range(len(sequence.blocks), -(-end // size))
        if len(copied) + len(missing) > len(self.free):
            return False
        for index in copied:
            source = sequence.blocks[index]
            sequence.blocks[index] = self._take(slot, index)
            self._moves.append((source, sequence.blocks[index]))
            self._drop(source)
        sequence.blocks += [self._take(slot, index) for index in missing]
        return True

    def grow_or_end(self, slot: int) -> None:
        if not self.grow(slot, len(self.live[slot].tokens)):
            self.end(slot)
        self.apply()

    def _take(self, slot: int, index: int) -> int:
        block = self.free.pop()
        self.held[block] += 1
        self._tables.append((slot, index, block))
        return block

    def _drop(self, block: int) -> None:
        self.held[block] -= 1
        if not self.held[block]:
            self.free.append(block)

    # what a runner does

    def apply(self) -> None:
        column = [array("i", values) for values in zip(*self._tables, strict=True)] or [array("i")] * 3
        moves = [array("i", values) for values in zip(*self._moves, strict=True)] or [array("i")] * 2
        zeros, synchronous = array("i", [0] * len(self._moves)), array("i", [SYNCHRONOUS] * len(self._moves))
        self.state.apply(
            Plan(
                step_id=0,
                table_groups=array("i", [0] * len(self._tables)),
                table_slots=column[0],
                table_indices=column[1],
                table_blocks=column[2],
                move_kinds=zeros,
                move_ids=synchronous,
                move_groups=zeros,
                move_sources=moves[0],
                move_targets=moves[1],
                started=tuple(self._started),
                ended=array("i", self._ended),
            )
        )
        self._clear()

    def commit(self, slot: int, tokens: Sequence[int]) -> None:
        self.live[slot].tokens += tokens
        self.state.commit(np.full(len(tokens), slot), np.array(tokens, dtype=np.int64), np.zeros(0, dtype=np.int64))

    def retract(self, slot: int, length: int) -> None:
        """The step that ended at position `length` is to be computed again: the tokens from there on are not known any more."""
        row = base_rows(np.array([slot]), np.array([length - 1]), np.array([1]), np.array([1]))
        self.state.rewind(row)
        del self.live[slot].tokens[length:]
        self.drafts.pop(slot, None)

    def draft(self, most: dict[int, int]) -> dict[int, list[int]]:
        """Checks what is drafted: all that may be, or nothing where more tokens than are computed at once may be missing."""
        with torch.inference_mode():
            found = self.drafter.draft(np.array(list(most), dtype=np.int64), np.array(list(most.values()), dtype=np.int64))
        drafts = {slot: tokens.tolist() for slot, tokens in zip(most, found, strict=True)}
        may_be_behind = sum(len(self.live[slot].tokens) for slot in most) > drafting.MAX_CATCH_UP_TOKENS
        for slot, tokens in drafts.items():
            sequence = self.live[slot]
            allowed = min(most[slot], max(0, min(self.limit, len(sequence.blocks) * self.block_size) - len(sequence.tokens) + 1))
            assert len(tokens) == allowed or (may_be_behind and not tokens), f"{len(tokens)} drafts of {allowed} for slot {slot}"
            assert tokens == self.continuation(sequence.tokens, len(tokens)), f"slot {slot} after {sequence.tokens}"
        self.drafts |= drafts
        self.drafter.check()
        return drafts

    def step(self, slot: int, most: int, accepted: int, last: int) -> list[int]:
        """Up to `accepted` of the drafts prove right, and `last` follows; then up to `most` are drafted, for 0 none is asked for."""
        tokens = [*self.drafts.pop(slot, [])[:accepted], last]
        sequence = self.live[slot]
        length = len(sequence.tokens) + len(tokens)
        if length > self.max_model_len or not self.grow(slot, min(length + most, self.max_model_len)):
            return []
        self.apply()
        self.commit(slot, tokens)
        return self.draft({slot: most})[slot] if most else []
