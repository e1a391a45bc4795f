"""Stores one step's rows while they are decided, and until the step is committed or rolled back.

A step has one row per running sequence, and nearly all rows are alike: one token computed, one sampled. Rows are stored as columns, so
that such a row costs two appends (`seqs`, `starts`). The columns that change only when a sequence starts or ends (slot, request id, epoch)
are in `RunningColumns`, built once and shared by every step until then.
"""

from __future__ import annotations

from array import array
from itertools import repeat
from typing import Any, NamedTuple

from headrace.core.ids import RequestId
from headrace.policy.sequence import RUNNING, RunningFacts, Sequence


class StepRow(NamedTuple):
    """One row of a plan. samples: the most tokens it can give, each from one of its last positions."""

    seq: Sequence
    incarnation: int
    start: int
    count: int  # type: ignore[assignment]  # hides a tuple's method, which means nothing here
    samples: int

    @property
    def first_sampled(self) -> int:
        """Position of the first token it gives."""
        return self.start + self.count - self.samples + 1

    def num_computed(self, num_tokens: int) -> int:
        """The sequence's computed length after this row gave `num_tokens` tokens. Positions of rejected drafts do not count.

        A row that was to give a token and gave none has to compute its last position again.
        """
        return self.start + self.count - (self.samples - num_tokens)

    @property
    def is_current(self) -> bool:
        """Its sequence still runs, and was not preempted since the row was planned."""
        return self.incarnation == self.seq.incarnation and self.seq.state is RUNNING


class RunningColumns:
    """The `RunningFacts` of a step's sequences, by column; never modified.

    generation  the sequence table's generation when the columns were built; while it stays equal, no sequence has started or ended
    """

    incarnations: tuple[int, ...]
    request_ids: tuple[RequestId, ...]
    epochs: tuple[int, ...]
    indices: tuple[int, ...]
    counted: tuple[int, ...]

    __slots__ = ("counted", "epochs", "generation", "incarnations", "indices", "mask_slots", "num_counted", "request_ids", "seqs", "slots")

    def __init__(self, seqs: list[Sequence], generation: int) -> None:
        self.seqs, self.generation = seqs, generation
        facts = [seq.facts for seq in seqs]
        columns: list[tuple[Any, ...]] = list(zip(*facts, strict=True)) if facts else [()] * len(RunningFacts._fields)
        slots, self.incarnations, self.request_ids, self.epochs, self.indices, self.counted, mask_slots = columns
        self.slots, self.mask_slots = array("i", slots), array("i", mask_slots)
        self.num_counted = sum(self.counted)

    def __len__(self) -> int:
        return len(self.seqs)

    def after(self, seqs: list[Sequence], generation: int) -> RunningColumns:
        """The columns of `seqs`: these columns if the sequences are the same, in the same slots."""
        return self if generation == self.generation and seqs == self.seqs else RunningColumns(seqs, generation)


NO_ROWS = RunningColumns([], 0)


class StepRows:
    """Rows in the order in which they will run, decoding ones first.

    seqs, starts     one entry per row
    counts, samples  entries may be missing at the end until `fill`: they are 1
    drafts           flat: samples - 1 for each row with samples > 1
    num_decodes      leading rows of one token that sample one
    After `close`:
    slots, mask_slots, incarnations  of the rows' sequences
    decode_columns                   the leading rows' other columns
    """

    __slots__ = ("counts", "decode_columns", "drafts", "incarnations", "mask_slots", "num_decodes", "samples", "seqs", "slots", "starts")

    def __init__(self) -> None:
        self.seqs: list[Sequence] = []
        self.starts = array("i")
        self.counts = array("i")
        self.samples = array("i")
        self.drafts = array("i")
        self.num_decodes = 0
        self.slots = array("i")
        self.mask_slots = array("i")
        self.incarnations: tuple[int, ...] = ()
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
        """Complete the columns: rows that gave no count compute one token and sample one."""
        if missing := len(self.starts) - len(self.counts):
            ones = array("i", [1]) * missing
            self.counts += ones
            self.samples += ones

    def close(self, last: RunningColumns, generation: int) -> None:
        """End the adding of rows. last: the decode columns of the step before

        A planned sequence is not preempted by the same plan, so its slot and incarnation are those of when its row was added.
        """
        self.fill()
        decodes, prefills = self.seqs[: self.num_decodes], self.seqs[self.num_decodes :]
        self.decode_columns = columns = last.after(decodes, generation)
        self.slots, self.mask_slots, self.incarnations = columns.slots, columns.mask_slots, columns.incarnations
        if prefills:
            self.slots = columns.slots + array("i", [seq.slot for seq in prefills])
            self.mask_slots = columns.mask_slots + array("i", [seq.mask_slot for seq in prefills])
            self.incarnations = (*columns.incarnations, *[seq.incarnation for seq in prefills])

    def row(self, index: int) -> StepRow:
        """One row of a closed step."""
        return StepRow(self.seqs[index], self.incarnations[index], self.starts[index], self.counts[index], self.samples[index])

    def rows(self, first: int = 0) -> list[StepRow]:
        """The rows of a closed step from `first` on."""
        columns = (self.seqs, self.incarnations, self.starts, self.counts, self.samples)
        values = zip(*[column[first:] for column in columns], strict=True)
        return list(map(tuple.__new__, repeat(StepRow), values))
