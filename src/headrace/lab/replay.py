"""Summarizes a dumped ring of plans, and runs it again on any runner.

Rows of sequences that began before the ring's first plan are left out.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from headrace.core.plan import Plan, Result
from headrace.engine.steps import Runner


def summarize_plan(plan: Plan) -> dict[str, int]:
    """A decode row computes one token and samples; others are prefill rows."""
    num_decode = sum(count == 1 and bool(sampled) for count, sampled in zip(plan.counts, plan.samples, strict=True))
    return {
        "step_id": plan.step_id,
        "prefill_rows": plan.num_rows - num_decode,
        "decode_rows": num_decode,
        "tokens": plan.num_tokens,
        "samples": sum(plan.samples),
        "started": len(plan.started),
        "ended": len(plan.ended),
        "new_blocks": len(plan.table_blocks),
        "moves": len(plan.move_kinds),
    }


def describe_rows(plan: Plan) -> Iterator[str]:
    for slot, start, count, sampled in zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True):
        yield f"slot {slot}: positions {start}..{start + count - 1}" + (" -> samples" if sampled else "")
    for entry in plan.started:
        known = len(entry.token_ids)
        yield f"slot {entry.slot} started: {entry.num_prompt_tokens} prompt + {known - entry.num_prompt_tokens} output tokens known"
    if plan.ended:
        yield f"slots ended: {', '.join(str(slot) for slot in plan.ended)}"


def known_rows(plans: Iterable[Plan]) -> Iterator[tuple[Plan, int]]:
    """Each plan without sequences that began before the dump, and the number of rows left out."""
    known: set[int] = set()
    for plan in plans:
        ended = array("i", [slot for slot in plan.ended if slot in known])
        known.difference_update(ended)
        known.update(entry.slot for entry in plan.started)
        rows = [index for index, slot in enumerate(plan.slots) if slot in known]
        writes = [index for index, slot in enumerate(plan.table_slots) if slot in known]
        yield _with_only(plan, rows, writes, ended), plan.num_rows - len(rows)


def count_rows(plans: Iterable[Plan]) -> tuple[int, int]:
    """(rows that `replay` runs, rows it leaves out)."""
    run = left_out = 0
    for plan, skipped in known_rows(plans):
        run, left_out = run + plan.num_rows, left_out + skipped
    return run, left_out


def _with_only(plan: Plan, rows: list[int], writes: list[int], ended: array[int]) -> Plan:
    return replace(
        plan,
        slots=_picked(plan.slots, rows),
        starts=_picked(plan.starts, rows),
        counts=_picked(plan.counts, rows),
        samples=_picked(plan.samples, rows),
        adapter_slots=_picked(plan.adapter_slots, rows),
        mask_slots=_picked(plan.mask_slots, rows),
        table_groups=_picked(plan.table_groups, writes),
        table_slots=_picked(plan.table_slots, writes),
        table_indices=_picked(plan.table_indices, writes),
        table_blocks=_picked(plan.table_blocks, writes),
        ended=ended,
    )


def _picked(column: array[int], indices: list[int]) -> array[int]:
    # The columns of adapters and masks may be empty.
    return array("i", [column[index] for index in indices]) if column else column


@dataclass(frozen=True, slots=True)
class Replayed:
    """seconds: from submission to result"""

    plan: Plan
    result: Result
    seconds: float
    skipped_rows: int


def replay(plans: Iterable[Plan], runner: Runner) -> Iterator[Replayed]:
    """Runs plans one after another (depth 1); a plan left without rows still ends its slots."""
    pending_end = array("i")
    for plan, skipped in known_rows(plans):
        plan = replace(plan, ended=pending_end + plan.ended)
        if not plan.num_rows:
            pending_end = plan.ended
            continue
        pending_end = array("i")
        began = time.perf_counter()
        result = runner.submit(plan).result()
        yield Replayed(plan, result, time.perf_counter() - began, skipped)
