"""Keeps a runner's state between steps, and applies the changes that a plan makes to it.

A step that raised may have applied its changes or not, so applying, and rewinding, may be repeated.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.core.plan import Plan
from headrace.engine.failpoints import failpoint
from headrace.engine.runner.batch import (
    NO_DRAFTS,
    Positions,
    Resident,
    Rows,
    read_rows,
    refuse_moves_but_copies,
    refuse_unknown_ids,
    sampled_positions,
)
from headrace.engine.runner.slots import Ints, SlotPart, SlotState, column


class BlockCopies(Protocol):
    def copy_block(self, group: int, source: int, target: int) -> None: ...


class RunnerState:
    """All that a runner keeps between steps: the KV cache and its `SlotPart`s."""

    def __init__(self, kv: BlockCopies, slots: SlotState, *parts: SlotPart) -> None:
        self.kv, self.slots = kv, slots
        self._parts: tuple[SlotPart, ...] = (slots, *parts)

    def apply(self, plan: Plan) -> None:
        """Points 1 to 4 of `core.plan`. Raises ValueError, with nothing applied, for a move it cannot do."""
        failpoint("runner.apply")
        refuse_moves_but_copies(plan)
        ended = column(plan.ended)
        for part in self._parts:
            part.end(ended)
            for started in plan.started:
                part.start(started)
        self.slots.write_tables(plan)
        for group, source, target in zip(plan.move_groups, plan.move_sources, plan.move_targets, strict=True):
            self.kv.copy_block(group, source, target)

    def read(self, plan: Plan, resident: Resident = ()) -> tuple[Rows, Positions]:
        """The plan's rows and what they sample. All their ids are in their slots then, drafts included. The caller has applied the plan.

        Raises UnknownToken, and ValueError for what the plan may not ask.
        """
        rows = read_rows(plan, resident)
        positions = sampled_positions(rows, column(plan.drafts) if plan.drafts else NO_DRAFTS)
        self.rewind(rows)
        failpoint("runner.batch")
        refuse_unknown_ids(rows, self.slots.known[rows.slots], self.slots.failed[rows.slots])
        if positions.drafts is not None:
            is_draft = positions.drafts >= 0
            self.slots.place_drafts(positions.slots[is_draft], positions.places[is_draft], positions.drafts[is_draft])
        return rows, positions

    def rewind(self, rows: Rows) -> None:
        """Forget tokens of a plan that was rolled back."""
        slots, ends, sampling = self.slots, rows.ends, np.flatnonzero(rows.samples)
        for row in sampling[slots.known[rows.slots[sampling]] + rows.samples[sampling] > ends[sampling] + 1]:
            slot = int(rows.slots[row])
            stale = slots.token_ids[slot, rows.known_ends[row] : slots.known[slot]].astype(np.int64)
            for part in self._parts:
                part.retract(slot, stale)

    def commit(self, slots: Ints, token_ids: Ints, failed: Ints | NDArray[np.bool_]) -> None:
        """slots [N], token_ids [N]: as in `SlotPart.commit`"""
        for part in self._parts:
            part.commit(slots, token_ids)
        self.slots.failed[failed] = True
