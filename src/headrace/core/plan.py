"""The two values that pass between policy and tensors: a step's Plan and its Result.

A plan is flat columns: no object per sequence or row, so that it is cheap to build, can be printed, compared, dumped and replayed, and
crosses a process boundary without pickle (`core.plan_codec`). The runner keeps what does not change (token ids, parameters, block
tables) in per-slot state; a plan carries only the changes.

Order in which a runner applies a plan:
  1. `ended` slots are forgotten          4. block moves are made, in order
  2. `started` slots are filled           5. one forward over all rows, KV written
  3. block-table entries are written      6. rows with `samples` sample their next tokens, which the slot remembers

Moves other than COPY are asynchronous: point 4 only begins them. They read and write at any time until a Result names their ids in
`moves_done`. A plan without rows, made while moves are in flight, asks for these ids alone: a runner may wait a little with its
result. A step that raised is planned again under another step id; a move id that was begun already is not begun again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate, islice
from typing import Any, NamedTuple, overload

from headrace.core.grammar import Grammar
from headrace.core.ids import SlotId
from headrace.core.sampling import SamplingParams


def int_column(values: Sequence[int] = ()) -> array[int]:
    """32-bit column; numpy and torch read it without a copy."""
    return array("i", values)


def float_column(values: Sequence[float] = ()) -> array[float]:
    return array("f", values)


class MoveKind(IntEnum):
    """A runner refuses by name the kinds it cannot do."""

    COPY = 0
    """Block to block inside one group (copy-on-write of a forked sequence), made before the plan's forward."""
    HOST_OUT = 1
    """Block to host slot."""
    HOST_IN = 2
    """Host slot to block."""


SYNCHRONOUS = 0
"""Move id of a COPY: it is done with its step."""


class StepCosts(NamedTuple):
    """A step takes fixed_s + num_tokens * token_s seconds. Both 0: not known."""

    fixed_s: float = 0.0
    token_s: float = 0.0


UNKNOWN_COSTS = StepCosts()


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence that takes a slot in this plan: the facts that a runner needs, sent once.

    token_ids  prompt, then outputs so far (a resumed sequence has some)
    params     checked, with the seed drawn
    index      of the sequence within its request; part of the random key
    grammar    the output must match it from the prompt's end on; outputs so far count as matched. None: any text
    """

    slot: SlotId
    token_ids: array[int]
    num_prompt_tokens: int
    params: SamplingParams
    index: int
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Rows, one per sequence computed this step (equal lengths):
      starts         absolute position of the first token computed
      counts         tokens computed, >= 1
      samples        positions at the row's end whose logits are used: 0, 1, or 1 + the row's drafted tokens. One token is sampled
                     after the first, and one after each drafted token that equals the token sampled before it. The first
                     drafted token that differs ends the row. So a row gives at most `samples` tokens. A row that gives none is
                     planned again, and a later row that was planned to follow it gives none either
                     A plan names no token ids except drafted ones: the runner knows position p of a slot since `started`, or an
                     earlier plan sampled it
      drafts         flat, row by row: samples - 1 ids of each row with samples > 1, which stand at its last positions
      num_drafts     most tokens that the runner drafts to follow the row (`Result.drafts`); their positions have blocks in the tables.
                     Empty: none for any row
      adapter_slots  0 = base model
      mask_slots     the row's slot where its sequence has a grammar, whose mask then limits what is sampled; -1 = any token

    Block-table writes, one entry per newly held block: table[group][slot, index] = block.
    Block moves: kind, id, group, source, target (block ids; host slots on a HOST_* move's other side).
      move_ids  > 0 and not in flight under that id, or SYNCHRONOUS for a COPY
    ended  slots whose sequence left since the previous plan
    costs  a record, nothing for a runner
    """

    step_id: int
    slots: array[int] = field(default_factory=int_column)
    starts: array[int] = field(default_factory=int_column)
    counts: array[int] = field(default_factory=int_column)
    samples: array[int] = field(default_factory=int_column)
    drafts: array[int] = field(default_factory=int_column)
    num_drafts: array[int] = field(default_factory=int_column)
    adapter_slots: array[int] = field(default_factory=int_column)
    mask_slots: array[int] = field(default_factory=int_column)
    table_groups: array[int] = field(default_factory=int_column)
    table_slots: array[int] = field(default_factory=int_column)
    table_indices: array[int] = field(default_factory=int_column)
    table_blocks: array[int] = field(default_factory=int_column)
    move_kinds: array[int] = field(default_factory=int_column)
    move_ids: array[int] = field(default_factory=int_column)
    move_groups: array[int] = field(default_factory=int_column)
    move_sources: array[int] = field(default_factory=int_column)
    move_targets: array[int] = field(default_factory=int_column)
    started: tuple[Started, ...] = ()
    ended: array[int] = field(default_factory=int_column)
    costs: StepCosts = UNKNOWN_COSTS

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def only_polls_moves(self) -> bool:
        return not (self.slots or self.started or self.ended or self.table_slots or self.move_kinds)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, under the raw model distribution (before penalties, temperature and filters).

    rank                    1 = the token at this position was the most probable
    top_ids, top_logprobs   the k most probable, descending
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LogprobColumns(Sequence[TokenLogprobs]):
    """`TokenLogprobs` of many positions as flat columns, only ever appended to. As a sequence, it makes each value when asked for.

    Per position (equal lengths): token_ids, logprobs (32-bit float), ranks, top_counts; 64-bit: `wide_columns`
    rank 0  not asked for at this position
    Flat, sum(top_counts) entries: top_ids, top_logprobs (as logprobs)
    """

    token_ids: array[int] = field(default_factory=int_column)
    logprobs: array[float] = field(default_factory=float_column)
    ranks: array[int] = field(default_factory=int_column)
    top_counts: array[int] = field(default_factory=int_column)
    top_ids: array[int] = field(default_factory=int_column)
    top_logprobs: array[float] = field(default_factory=float_column)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        begin = 0
        for token_id, logprob, rank, count in zip(self.token_ids, self.logprobs, self.ranks, self.top_counts, strict=True):
            span = slice(begin, begin + count)
            begin += count
            yield TokenLogprobs(token_id, logprob, rank, tuple(self.top_ids[span]), tuple(self.top_logprobs[span]))

    @overload
    def __getitem__(self, place: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, place: slice) -> LogprobColumns: ...
    def __getitem__(self, place: int | slice) -> TokenLogprobs | LogprobColumns:
        if isinstance(place, int):
            row = range(len(self))[place]
            first = sum(islice(self.top_counts, row))
            span = slice(first, first + self.top_counts[row])
            best = tuple(self.top_ids[span]), tuple(self.top_logprobs[span])
            return TokenLogprobs(self.token_ids[row], self.logprobs[row], self.ranks[row], *best)
        begin, end, step = place.indices(len(self))
        assert step == 1, "neighbouring positions"
        first = sum(self.top_counts[:begin])
        flat = slice(first, first + sum(self.top_counts[begin:end]))
        *rows, top_ids, top_logprobs = self.columns()
        return LogprobColumns(*[*[column[begin:end] for column in rows], top_ids[flat], top_logprobs[flat]])

    def pages(self, size: int) -> Iterator[LogprobColumns]:
        *rows, top_ids, top_logprobs = self.columns()
        end = 0
        for begin in range(0, len(self), size):
            page = [column[begin : begin + size] for column in rows]
            flat = slice(end, end := end + sum(self.top_counts[begin : begin + size]))
            yield LogprobColumns(*[*page, top_ids[flat], top_logprobs[flat]])

    def append(self, entry: TokenLogprobs | None) -> None:
        entry = entry or TokenLogprobs(0, 0.0, 0)
        self.token_ids.append(entry.token_id)
        self.logprobs.append(entry.logprob)
        self.ranks.append(entry.rank)
        self.top_counts.append(len(entry.top_ids))
        self.top_ids.extend(entry.top_ids)
        self.top_logprobs.extend(entry.top_logprobs)

    def extend(self, other: LogprobColumns) -> None:
        """Raises ValueError, and appends nothing, unless both are wide or neither is."""
        pairs = list(zip(self.columns(), other.columns(), strict=True))
        if any(column.typecode != more.typecode for column, more in pairs):
            raise ValueError("log-probabilities of 32 and of 64 bits cannot stand in one column")
        for column, more in pairs:
            column.extend(more)

    def picked(self, places: Sequence[int]) -> LogprobColumns:
        entries, found = self.entries(), LogprobColumns()
        for place in places if entries else ():
            found.append(entries[place])
        return found

    def columns(self) -> tuple[array[Any], ...]:
        return self.token_ids, self.logprobs, self.ranks, self.top_counts, self.top_ids, self.top_logprobs

    @property
    def num_bytes(self) -> int:
        return COLUMNS_BYTES + sum([len(column) * column.itemsize for column in self.columns()])

    def entries(self) -> list[TokenLogprobs | None]:
        return [entry if entry.rank else None for entry in self]


COLUMNS_BYTES = 640
"""Memory of `LogprobColumns` without their contents."""


def wide_columns() -> LogprobColumns:
    """64-bit floats and ranks, which hold whatever a peer sends."""
    return LogprobColumns(logprobs=array("d"), ranks=array("q"), top_logprobs=array("d"))


def columns_of(positions: Sequence[TokenLogprobs]) -> LogprobColumns:
    if isinstance(positions, LogprobColumns):
        return positions
    made = wide_columns()
    for position in positions:
        made.append(position)
    return made


PAGE_TOKENS = 64
"""Positions that are decoded or written as JSON at once: half a millisecond."""

NO_LOGPROBS = LogprobColumns()
"""Shared: never appended to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The output of one step, row by row in the plan's order.

    token_counts     per row, 0..samples tokens
    token_ids        flat
    logprobs         one position per token in `token_ids`, or none when no row asked
    prompt_rows      rows with log-probabilities of prompt positions, ascending
    prompt_counts    for each of `prompt_rows`, the number of positions: start+1 .. start+count of the row, prompt only
    prompt_logprobs  of these positions, flat
    draft_counts     per row, tokens drafted to follow its tokens; empty when nothing is drafted. The next plan may take all, fewer or none
    drafts           flat
    drafting_s       seconds of the step in which they were made
    moves_done       ids of asynchronous moves that ended since the last result, whichever plan began them; each id is reported once.
                     A step that raises reports none: moves that ended meanwhile are in the next result
    errors           (row, message): this sequence alone failed; it produced no token
    """

    step_id: int
    token_counts: array[int]
    token_ids: array[int]
    logprobs: LogprobColumns = NO_LOGPROBS
    prompt_rows: array[int] = field(default_factory=int_column)
    prompt_counts: array[int] = field(default_factory=int_column)
    prompt_logprobs: LogprobColumns = NO_LOGPROBS
    draft_counts: array[int] = field(default_factory=int_column)
    drafts: array[int] = field(default_factory=int_column)
    drafting_s: float = 0.0
    moves_done: array[int] = field(default_factory=int_column)
    errors: tuple[tuple[int, str], ...] = ()

    def prompt_entries(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        entries = [entry for entry in self.prompt_logprobs.entries() if entry is not None]
        ends = accumulate(self.prompt_counts)
        return {row: tuple(entries[end - count : end]) for row, count, end in zip(self.prompt_rows, self.prompt_counts, ends, strict=True)}
