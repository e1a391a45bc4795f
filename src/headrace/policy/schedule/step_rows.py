"""One step's rows while they are decided, and until the step is committed or rolled back.

Columns, not objects: a step has a row per running sequence, and most rows say the same, one token computed and one sampled. Such rows are
added by appending to `seqs` and `starts` alone. What else is to be known of them changes only when somebody starts or leaves; it stands in
a `Lane`, made once and used by every step until then.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from headrace.policy.schedule.sequence import SeqState, Sequence


@dataclass(slots=True, eq=False)
class Row:
    """What one planned row meant. samples: 1 when a token is sampled after its last position, else 0."""

    seq: Sequence
    incarnation: int
    start: int
    count: int
    samples: int

    @property
    def is_current(self) -> bool:
        """Its sequence still runs, and was not preempted since."""
        return self.incarnation == self.seq.incarnation and self.seq.state is SeqState.RUNNING


class Lane:
    """What does not change about sequences while they run, by column; never modified.

    generation  of the roster the columns were made from: nobody may have started or left since
    counted     1 where committed tokens count as generated, 0 where the text side says at the end how many do (stop strings)
    """

    __slots__ = ("counted", "epochs", "generation", "incarnations", "indices", "num_counted", "request_ids", "seqs", "slots")

    def __init__(self, seqs: list[Sequence], generation: int) -> None:
        requests = [seq.request for seq in seqs]
        self.seqs, self.generation = seqs, generation
        self.slots = array("i", [seq.slot for seq in seqs])
        self.incarnations = [seq.incarnation for seq in seqs]
        self.request_ids = [request.request_id for request in requests]
        self.epochs = [request.epoch for request in requests]
        self.indices = [seq.index for seq in seqs]
        self.counted = [int(not request.params.stop) for request in requests]
        self.num_counted = sum(self.counted)

    def __len__(self) -> int:
        return len(self.seqs)

    def after(self, seqs: list[Sequence], generation: int) -> Lane:
        """The lane of `seqs`: this one if they are the same, in the same slots."""
        return self if generation == self.generation and seqs == self.seqs else Lane(seqs, generation)


NOBODY = Lane([], 0)


class StepRows:
    """Rows in the order in which they will run, decoding ones first.

    seqs, starts     one entry per row
    counts, samples  entries may be missing at the end until `fill`: they are 1
    num_decodes      leading rows of one token that sample one
    After `close`:
    slots, incarnations  of the rows' sequences
    lane             the leading rows' other columns
    """

    __slots__ = ("counts", "incarnations", "lane", "num_decodes", "samples", "seqs", "slots", "starts")

    def __init__(self) -> None:
        self.seqs: list[Sequence] = []
        self.starts = array("i")
        self.counts = array("i")
        self.samples = array("i")
        self.num_decodes = 0
        self.slots = array("i")
        self.incarnations: list[int] = []
        self.lane = NOBODY

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

    def close(self, last: Lane, generation: int) -> None:
        """No row is added from here on. last: the lane of the step before.

        A planned sequence is not preempted by the same plan, so slot and incarnation are what they were when its row was added.
        """
        self.fill()
        decodes, others = self.seqs[: self.num_decodes], self.seqs[self.num_decodes :]
        self.lane = lane = last.after(decodes, generation)
        self.slots, self.incarnations = lane.slots, lane.incarnations
        if others:
            self.slots = lane.slots + array("i", [seq.slot for seq in others])
            self.incarnations = lane.incarnations + [seq.incarnation for seq in others]

    def row(self, index: int) -> Row:
        """One row of a closed step."""
        return Row(self.seqs[index], self.incarnations[index], self.starts[index], self.counts[index], self.samples[index])

    def rows(self, first: int = 0) -> list[Row]:
        """The rows of a closed step from `first` on."""
        return [self.row(index) for index in range(first, len(self))]
