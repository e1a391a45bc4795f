"""Collects one step's changes of state; `build` freezes them and the step's rows."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from headrace.core.plan import SYNCHRONOUS, UNKNOWN_COSTS, MoveKind, Plan, Started, StepCosts
from headrace.policy.schedule.step_rows import StepRows

Move = tuple[int, int, int, int, int]
"""Kind, id, group, source, target."""


class PlanBuilder:
    """Changes while plan `step_id` is being decided, in the order in which they are to be made; columns as in `core.plan`."""

    def __init__(self, step_id: int, costs: StepCosts = UNKNOWN_COSTS) -> None:
        self.step_id = step_id
        self.costs = costs
        self.table_groups: list[int] = []
        self.table_slots: list[int] = []
        self.table_indices: list[int] = []
        self.table_blocks: list[int] = []
        self.moves: list[Move] = []
        self.started: list[Started] = []
        self.ended: list[int] = []

    @classmethod
    def repeating(cls, plan: Plan, step_id: int, is_in_flight: Callable[[int], bool]) -> PlanBuilder:
        """The changes of a plan, again, for another step. is_in_flight: whether a move id is; moves that have ended are left out."""
        builder = cls(step_id)
        builder.table_groups, builder.table_slots = plan.table_groups.tolist(), plan.table_slots.tolist()
        builder.table_indices, builder.table_blocks = plan.table_indices.tolist(), plan.table_blocks.tolist()
        moves = zip(plan.move_kinds, plan.move_ids, plan.move_groups, plan.move_sources, plan.move_targets, strict=True)
        builder.moves = [move for move in moves if move[1] == SYNCHRONOUS or is_in_flight(move[1])]
        builder.started, builder.ended = list(plan.started), plan.ended.tolist()
        return builder

    def table(self, group: int, slot: int, index: int, block: int) -> None:
        self.table_groups.append(group)
        self.table_slots.append(slot)
        self.table_indices.append(index)
        self.table_blocks.append(block)

    def tables(self, group: int, slot: int, first_index: int, blocks: Sequence[int]) -> None:
        """Consecutive block-table entries, from `first_index` on."""
        count = len(blocks)
        self.table_groups += [group] * count
        self.table_slots += [slot] * count
        self.table_indices += range(first_index, first_index + count)
        self.table_blocks += blocks

    def copy(self, group: int, source: int, target: int) -> None:
        self.move(MoveKind.COPY, SYNCHRONOUS, group, source, target)

    def move(self, kind: MoveKind, move_id: int, group: int, source: int, target: int) -> None:
        self.moves.append((kind, move_id, group, source, target))

    @property
    def has_changes(self) -> bool:
        """Whether there are state changes, which the runner needs even when no row is computed."""
        return bool(self.started or self.table_slots or self.moves or self.ended)

    def build(self, rows: StepRows) -> Plan:
        """The plan. rows: closed; their columns become the plan's and must not change."""
        num_rows = len(rows)
        kinds, ids, groups, sources, targets = zip(*self.moves, strict=True) if self.moves else [()] * 5
        return Plan(
            step_id=self.step_id,
            slots=rows.slots,
            starts=rows.starts,
            counts=rows.counts,
            samples=rows.samples,
            drafts=rows.drafts,
            adapter_slots=array("i", [0]) * num_rows,
            mask_slots=rows.mask_slots,
            table_groups=array("i", self.table_groups),
            table_slots=array("i", self.table_slots),
            table_indices=array("i", self.table_indices),
            table_blocks=array("i", self.table_blocks),
            move_kinds=array("i", kinds),
            move_ids=array("i", ids),
            move_groups=array("i", groups),
            move_sources=array("i", sources),
            move_targets=array("i", targets),
            started=tuple(self.started),
            ended=array("i", self.ended),
            costs=self.costs,
        )
