"""Collects one step's changes of state; `build` freezes them and the step's rows."""

from __future__ import annotations

from array import array

from headrace.core.plan import MoveKind, Plan, Started
from headrace.policy.step import StepRows


class PlanBuilder:
    """Lists while a plan is being decided."""

    def __init__(self) -> None:
        self.tables: list[tuple[int, int, int, int]] = []
        self.moves: list[tuple[int, int, int]] = []
        self.started: list[Started] = []
        self.ended: list[int] = []

    def table(self, group: int, slot: int, index: int, block: int) -> None:
        self.tables.append((group, slot, index, block))

    def copy(self, group: int, source: int, target: int) -> None:
        self.moves.append((group, source, target))

    @property
    def has_changes(self) -> bool:
        """State changes the runner must hear of even when no row is computed."""
        return bool(self.started or self.tables or self.moves or self.ended)

    def build(self, step_id: int, rows: StepRows) -> Plan:
        """rows: closed; their columns become the plan's and are not changed any more."""
        groups, table_slots, indices, blocks = _columns(self.tables, 4)
        move_groups, sources, targets = _columns(self.moves, 3)
        return Plan(
            step_id=step_id,
            slots=rows.slots,
            starts=rows.starts,
            counts=rows.counts,
            samples=rows.samples,
            adapter_slots=array("i", bytes(4 * len(rows))),
            mask_slots=array("i", [-1]) * len(rows),
            table_groups=groups,
            table_slots=table_slots,
            table_indices=indices,
            table_blocks=blocks,
            move_kinds=array("i", [MoveKind.COPY]) * len(sources),
            move_groups=move_groups,
            move_sources=sources,
            move_targets=targets,
            started=tuple(self.started),
            ended=array("i", self.ended),
        )


def _columns(rows: list[tuple[int, int, int, int]] | list[tuple[int, int, int]], width: int) -> list[array[int]]:
    if not rows:
        return [array("i") for _ in range(width)]
    return [array("i", column) for column in zip(*rows, strict=True)]
