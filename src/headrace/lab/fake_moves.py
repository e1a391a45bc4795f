"""Emulates the memory of a fake runner: blocks and host slots hold token ids, and moves take several steps."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.plan import MoveKind, Plan, int_column

EMPTY, ARRIVING = -1, -2
"""Ids that no token has: memory never written, and a block or slot that a move is still to write."""


class PagedIds:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[tuple[int, int], array[int]] = {}
        self._tables: dict[tuple[int, int], dict[int, int]] = {}
        self._groups: set[int] = {0}

    def apply(self, plan: Plan) -> None:
        gone = {*plan.ended, *(started.slot for started in plan.started)}
        for key in [key for key in self._tables if key[1] in gone]:
            del self._tables[key]
        columns = zip(plan.table_groups, plan.table_slots, plan.table_indices, plan.table_blocks, strict=True)
        for group, slot, index, block in columns:
            self._groups.add(group)
            self._tables.setdefault((group, slot), {})[index] = block

    def write(self, slot: int, start: int, ids: Sequence[int]) -> None:
        for group in self._groups:
            for position, token_id in enumerate(ids, start):
                index, offset = divmod(position, self._block_size)
                self.block(group, self._tables[group, slot][index])[offset] = token_id

    def check(self, slot: int, ids: Sequence[int]) -> None:
        """Raises AssertionError unless the slot's blocks hold exactly `ids`."""
        for group in self._groups:
            table = self._tables[group, slot]
            for index in range(-(-len(ids) // self._block_size)):
                known = ids[index * self._block_size : (index + 1) * self._block_size]
                held = self.block(group, table[index])[: len(known)]
                assert held == known, f"slot {slot}, group {group}, block {table[index]} at {index}: holds {held}, not {known}"

    def check_held(self, slot: int, num_tokens: int) -> None:
        """Raises AssertionError unless there are blocks for this number of tokens."""
        for group in self._groups:
            last = (num_tokens - 1) // self._block_size
            assert last in self._tables[group, slot], f"slot {slot}, group {group}: no block for position {num_tokens - 1}"

    def block(self, group: int, block: int) -> array[int]:
        return self._blocks.setdefault((group, block), array("i", [EMPTY] * self._block_size))


@dataclass(slots=True)
class _Move:
    """steps: left until it is made; before: the source when it began"""

    kind: MoveKind
    source: array[int]
    target: array[int]
    steps: int
    before: array[int]


class Moves:
    """steps      (least, most) steps that a move takes, drawn for each"""

    def __init__(self, memory: PagedIds, block_size: int, num_slots: int, steps: tuple[int, int], seed: int) -> None:
        self._memory = memory
        self._host = [array("i", [EMPTY] * block_size) for _ in range(num_slots)]
        self._steps = steps
        self._random = random.Random(seed)
        self._in_flight: dict[int, _Move] = {}
        self._done = int_column()

    def apply(self, plan: Plan) -> None:
        """Raises ValueError for a move whose memory is missing."""
        moves = zip(plan.move_kinds, plan.move_ids, plan.move_groups, plan.move_sources, plan.move_targets, strict=True)
        for kind, move_id, group, source, target in moves:
            if kind == MoveKind.COPY:
                self._memory.block(group, target)[:] = self._memory.block(group, source)
            elif kind not in (MoveKind.HOST_OUT, MoveKind.HOST_IN) or not self._host:
                raise ValueError(f"move_kinds: this runner has no memory for moves of kind {MoveKind(kind).name}")
            elif move_id not in self._in_flight and move_id not in self._done:  # the step may be a repeated one
                self._begin(MoveKind(kind), move_id, group, source, target)

    def _begin(self, kind: MoveKind, move_id: int, group: int, source: int, target: int) -> None:
        if kind is MoveKind.HOST_OUT:
            read, written = self._memory.block(group, source), self._host[target]
        else:
            read, written = self._host[source], self._memory.block(group, target)
        self._in_flight[move_id] = _Move(kind, read, written, self._random.randint(*self._steps), array("i", read))
        written[:] = array("i", [ARRIVING] * len(written))

    def advance(self) -> None:
        """Raises AssertionError if a source or target was overwritten meanwhile."""
        for move_id, move in list(self._in_flight.items()):
            if move.steps:
                move.steps -= 1
                continue
            assert move.source == move.before, f"move {move_id} ({move.kind.name}): its source was overwritten before it was made"
            assert set(move.target) == {ARRIVING}, f"move {move_id} ({move.kind.name}): its target was written to before it was made"
            move.target[:] = move.source
            del self._in_flight[move_id]
            self._done.append(move_id)

    def take_done(self) -> array[int]:
        done, self._done = self._done, int_column()
        return done
