"""Collects the changes of block tables that the device has not received yet.

A change is kept until a launch has succeeded, so that a step that raises loses no change.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from headrace.core.plan import Plan
from headrace.engine.runner.slots import column
from headrace.tensor.kernels.choice import MAX_TABLE_CHANGES


class TableChanges:
    """Block-table entries that the device lacks, for tables [num_groups, num_slots, width] with a row for each slot."""

    def __init__(self, num_groups: int, num_slots: int, width: int) -> None:
        self._shape = (num_groups, num_slots, width)
        self._blocks: dict[int, int] = {}

    def add(self, plan: Plan) -> None:
        """Add the plan's entries. A later entry for the same place wins."""
        if not plan.table_slots:
            return
        groups, slots, indices, blocks = (
            column(values) for values in (plan.table_groups, plan.table_slots, plan.table_indices, plan.table_blocks)
        )
        places = np.ravel_multi_index((groups, slots, indices), self._shape)
        self._blocks.update(zip(places.tolist(), blocks.tolist(), strict=True))

    def fill(self, changes: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
        """Write entries in the form of `DeviceChoice.write_tables`. Yields those that do not fit, to be written first."""
        entries = iter(self._blocks.items())
        _write(changes, list(islice(entries, MAX_TABLE_CHANGES)))
        while more := list(islice(entries, MAX_TABLE_CHANGES)):
            yield _write(np.zeros_like(changes), more)

    def clear(self) -> None:
        """Forget all entries: the device has them."""
        self._blocks.clear()


def _write(changes: NDArray[np.int32], entries: list[tuple[int, int]]) -> NDArray[np.int32]:
    changes[0] = len(entries)
    if entries:
        first = 1 + MAX_TABLE_CHANGES
        changes[1 : 1 + len(entries)], changes[first : first + len(entries)] = np.array(entries, dtype=np.int64).T
    return changes
