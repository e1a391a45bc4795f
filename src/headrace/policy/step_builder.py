"""Collects a step while it is being decided.

Rows are stored as columns, so that such a row costs two appends (`seqs`, `starts`). The columns that change only when a sequence starts
or ends (slot, request id, epoch) are in `RunningColumns`, built once and shared by every step until then.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from headrace.core.ids import RequestId
from headrace.core.plan import SYNCHRONOUS, UNKNOWN_COSTS, MoveKind, Plan, Started, StepCosts
from headrace.policy.sequence import RUNNING, RunningFacts, Sequence


class StepRow(NamedTuple):
    seq: Sequence
    plan_epoch: int
    start: int
    count: int  # type: ignore[assignment]  # hides a tuple's method, which means nothing here
    samples: int

    @property
    def first_sampled(self) -> int:
        return self.start + self.count - self.samples + 1

    def num_computed(self, num_tokens: int) -> int:
        """One that was to give a token and gave none has to compute its last position again."""
        return self.start + self.count - (self.samples - num_tokens)

    @property
    def is_current(self) -> bool:
        return self.plan_epoch == self.seq.plan_epoch and self.seq.state is RUNNING


class RunningColumns:
    """The `RunningFacts` of a step's sequences, by column."""

    plan_epochs: tuple[int, ...]
    request_ids: tuple[RequestId, ...]
    epochs: tuple[int, ...]
    indices: tuple[int, ...]
    counted: tuple[int, ...]

    __slots__ = (
        "adapter_slots",
        "counted",
        "epochs",
        "generation",
        "indices",
        "mask_slots",
        "num_counted",
        "plan_epochs",
        "request_ids",
        "seqs",
        "slots",
    )

    def __init__(self, seqs: list[Sequence], generation: int) -> None:
        self.seqs, self.generation = seqs, generation
        facts = [seq.facts for seq in seqs]
        columns: list[tuple[Any, ...]] = list(zip(*facts, strict=True)) if facts else [()] * len(RunningFacts._fields)
        slots, self.plan_epochs, self.request_ids, self.epochs, self.indices, self.counted, mask_slots, adapters = columns
        self.slots, self.mask_slots, self.adapter_slots = array("i", slots), array("i", mask_slots), array("i", adapters)
        self.num_counted = sum(self.counted)

    def __len__(self) -> int:
        return len(self.seqs)

    def after(self, seqs: list[Sequence], generation: int) -> RunningColumns:
        return self if generation == self.generation and seqs == self.seqs else RunningColumns(seqs, generation)


NO_ROWS = RunningColumns([], 0)


class StepRows:
    """Rows in the order in which they will run, decoding ones first.

    counts, samples  entries may be missing at the end until `fill`: they are 1
    """

    __slots__ = (
        "adapter_slots",
        "counts",
        "decode_columns",
        "drafts",
        "mask_slots",
        "num_decodes",
        "num_drafts",
        "plan_epochs",
        "samples",
        "seqs",
        "slots",
        "starts",
    )

    def __init__(self) -> None:
        self.seqs: list[Sequence] = []
        self.starts = array("i")
        self.counts = array("i")
        self.samples = array("i")
        self.drafts = array("i")
        self.num_drafts = array("i")
        self.num_decodes = 0
        self.slots = array("i")
        self.mask_slots = array("i")
        self.adapter_slots = array("i")
        self.plan_epochs: tuple[int, ...] = ()
        self.decode_columns = NO_ROWS

    def __len__(self) -> int:
        return len(self.seqs)

    def add(self, seq: Sequence, start: int, count: int, samples: int) -> None:
        self.fill()
        self.seqs.append(seq)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(samples)

    def fill(self) -> None:
        if missing := len(self.starts) - len(self.counts):
            ones = array("i", [1]) * missing
            self.counts += ones
            self.samples += ones

    def close(self, last: RunningColumns, generation: int) -> None:
        """last: the decode columns of the step before."""
        self.fill()
        decodes, prefills = self.seqs[: self.num_decodes], self.seqs[self.num_decodes :]
        self.decode_columns = columns = last.after(decodes, generation)
        self.slots, self.mask_slots, self.adapter_slots = columns.slots, columns.mask_slots, columns.adapter_slots
        self.plan_epochs = columns.plan_epochs
        if prefills:
            self.slots = columns.slots + array("i", [seq.slot for seq in prefills])
            self.mask_slots = columns.mask_slots + array("i", [seq.mask_slot for seq in prefills])
            self.adapter_slots = columns.adapter_slots + array("i", [seq.adapter_slot for seq in prefills])
            self.plan_epochs = (*columns.plan_epochs, *[seq.plan_epoch for seq in prefills])

    def row(self, index: int) -> StepRow:
        return StepRow(self.seqs[index], self.plan_epochs[index], self.starts[index], self.counts[index], self.samples[index])

    def rows(self, first: int = 0) -> list[StepRow]:
        columns = (self.seqs, self.plan_epochs, self.starts, self.counts, self.samples)
        values = zip(*[column[first:] for column in columns], strict=True)
        return list(map(tuple.__new__, repeat(StepRow), values))


MAX_PROMPT_LOGPROB_TOKENS = 64
"""Each position with log-probabilities needs a row of logits over the whole vocabulary."""

Move = tuple[int, int, int, int, int]


@dataclass(slots=True)
class StepBuilder:
    """Changes are listed in the order in which they must be made; columns as in `core.plan`."""

    step_id: int
    max_tokens: int = 0
    now: float = 0.0
    costs: StepCosts = UNKNOWN_COSTS
    rows: StepRows = field(default_factory=StepRows)
    table_groups: list[int] = field(default_factory=list)
    table_slots: list[int] = field(default_factory=list)
    table_indices: list[int] = field(default_factory=list)
    table_blocks: list[int] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    logprob_budget: int = MAX_PROMPT_LOGPROB_TOKENS
    num_prefills: int = 0
    num_spent_beyond_rows: int = 0
    num_unused: int = 0
    num_withheld_for_long: int = 0
    num_charged_rows: int = 0
    first: Sequence | None = None

    @classmethod
    def repeating(cls, plan: Plan, step_id: int, is_in_flight: Callable[[int], bool]) -> StepBuilder:
        """A step without rows that repeats the changes of `plan`."""
        moves = zip(plan.move_kinds, plan.move_ids, plan.move_groups, plan.move_sources, plan.move_targets, strict=True)
        return cls(
            step_id,
            table_groups=plan.table_groups.tolist(),
            table_slots=plan.table_slots.tolist(),
            table_indices=plan.table_indices.tolist(),
            table_blocks=plan.table_blocks.tolist(),
            moves=[move for move in moves if move[1] == SYNCHRONOUS or is_in_flight(move[1])],
            started=list(plan.started),
            ended=plan.ended.tolist(),
        )

    @property
    def budget(self) -> int:
        """Less the surcharges for context."""
        return self.max_tokens - len(self.rows.seqs) - self.num_spent_beyond_rows - self.num_unused - self.num_withheld_for_long

    def table(self, group: int, slot: int, index: int, block: int) -> None:
        self.table_groups.append(group)
        self.table_slots.append(slot)
        self.table_indices.append(index)
        self.table_blocks.append(block)

    def tables(self, group: int, slot: int, first_index: int, blocks: Items[int]) -> None:
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
        return bool(self.started or self.table_slots or self.moves or self.ended)

    def build(self) -> Plan:
        """The plan takes their columns, which must not change afterwards."""
        rows = self.rows
        kinds, ids, groups, sources, targets = zip(*self.moves, strict=True) if self.moves else [()] * 5
        return Plan(
            step_id=self.step_id,
            slots=rows.slots,
            starts=rows.starts,
            counts=rows.counts,
            samples=rows.samples,
            drafts=rows.drafts,
            num_drafts=rows.num_drafts,
            adapter_slots=rows.adapter_slots,
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
