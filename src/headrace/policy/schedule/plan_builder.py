"""Collects one step's changes of state; `build` freezes them and the step's rows."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from headrace.core.plan import SYNCHRONOUS, MoveKind, Plan, Started, int_column
from headrace.policy.schedule.step_rows import StepRows


class PlanBuilder:
    """Changes while plan `step_id` is being decided, in the order in which they are to be made; columns as in `core.plan`."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.table_groups, self.table_slots, self.table_indices, self.table_blocks = (int_column() for _ in range(4))
        self.move_kinds, self.move_ids, self.move_groups, self.move_sources, self.move_targets = (int_column() for _ in range(5))
        self.started: list[Started] = []
        self.ended = int_column()

    @classmethod
    def repeating(cls, plan: Plan, step_id: int, is_in_flight: Callable[[int], bool]) -> PlanBuilder:
        """The changes of a plan that was built already, for another step. is_in_flight: of a move's id; what has moved stays so."""
        builder = cls(step_id)
        builder.table_groups, builder.table_slots = plan.table_groups, plan.table_slots
        builder.table_indices, builder.table_blocks = plan.table_indices, plan.table_blocks
        moves = zip(plan.move_kinds, plan.move_ids, plan.move_groups, plan.move_sources, plan.move_targets, strict=True)
        for kind, move_id, group, source, target in moves:
            if move_id == SYNCHRONOUS or is_in_flight(move_id):
                builder.move(MoveKind(kind), move_id, group, source, target)
        builder.started, builder.ended = list(plan.started), plan.ended
        return builder

    def table(self, group: int, slot: int, index: int, block: int) -> None:
        self.table_groups.append(group)
        self.table_slots.append(slot)
        self.table_indices.append(index)
        self.table_blocks.append(block)

    def copy(self, group: int, source: int, target: int) -> None:
        self.move(MoveKind.COPY, SYNCHRONOUS, group, source, target)

    def move(self, kind: MoveKind, move_id: int, group: int, source: int, target: int) -> None:
        self.move_kinds.append(kind)
        self.move_ids.append(move_id)
        self.move_groups.append(group)
        self.move_sources.append(source)
        self.move_targets.append(target)

    @property
    def has_changes(self) -> bool:
        """State changes the runner must hear of even when no row is computed."""
        return bool(self.started or self.table_slots or self.move_sources or self.ended)

    def build(self, rows: StepRows) -> Plan:
        """rows: closed. All columns become the plan's and are not changed any more."""
        num_rows = len(rows)
        return Plan(
            step_id=self.step_id,
            slots=rows.slots,
            starts=rows.starts,
            counts=rows.counts,
            samples=rows.samples,
            drafts=rows.drafts,
            adapter_slots=array("i", [0]) * num_rows,
            mask_slots=array("i", [-1]) * num_rows,
            table_groups=self.table_groups,
            table_slots=self.table_slots,
            table_indices=self.table_indices,
            table_blocks=self.table_blocks,
            move_kinds=self.move_kinds,
            move_ids=self.move_ids,
            move_groups=self.move_groups,
            move_sources=self.move_sources,
            move_targets=self.move_targets,
            started=tuple(self.started),
            ended=self.ended,
        )
