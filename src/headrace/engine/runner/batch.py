"""Turns a plan's columns into the tensors of one forward pass, by index arithmetic over whole columns.

What a plan may ask for and a runner cannot do (drafts on a device, moves other than copies) is refused here by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.plan import MoveKind, Plan
from headrace.engine.runner.slots import Ints, SlotState, column
from headrace.tensor.batch import ForwardBatch, GroupBatch, PackedAdapter, StepAdapters


class UnknownToken(Exception):
    """A row needs a token id that was never sampled, because the step that should have sampled it failed."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A plan's row columns as int64 arrays [R]; row_starts [R + 1] is each row's first token in the step."""

    slots: Ints
    starts: Ints
    counts: Ints
    samples: Ints
    mask_slots: Ints
    adapters: Ints
    row_starts: Ints

    @property
    def ends(self) -> Ints:
        return self.starts + self.counts

    @property
    def num_drafts(self) -> Ints:
        return self.samples - (self.samples > 0)

    @property
    def known_ends(self) -> Ints:
        """Without the drafts."""
        return self.ends - self.num_drafts

    def picked(self, places: Ints) -> Rows:
        counts = self.counts[places]
        return Rows(
            self.slots[places], self.starts[places], counts, self.samples[places], self.mask_slots[places], self.adapters[places],
            _row_starts(counts),
        )  # fmt: skip


Resident = tuple[PackedAdapter | None, ...]
"""Adapters by place; entry 0 is None."""


def read_rows(plan: Plan, resident: Resident = ()) -> Rows:
    """Raises ValueError for a place without an adapter."""
    slots, starts, counts, samples = (column(values) for values in (plan.slots, plan.starts, plan.counts, plan.samples))
    mask_slots = column(plan.mask_slots) if plan.mask_slots else np.full(len(slots), -1)
    adapters = column(plan.adapter_slots) if plan.adapter_slots else np.zeros(len(slots), dtype=np.int64)
    for place in np.unique(adapters[adapters != 0]).tolist():
        if not 0 < place < len(resident) or resident[place] is None:
            raise ValueError(f"adapter_slots: this runner holds no adapter at place {place}")
    return Rows(slots, starts, counts, samples, mask_slots, adapters, _row_starts(counts))


def base_rows(slots: Ints, starts: Ints, counts: Ints, samples: Ints) -> Rows:
    """Rows without adapters and without grammars."""
    return Rows(slots, starts, counts, samples, np.full(len(slots), -1), np.zeros(len(slots), dtype=np.int64), _row_starts(counts))


def _row_starts(counts: Ints) -> Ints:
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def refuse_moves_but_copies(plan: Plan) -> None:
    """Raises ValueError for moves to or from memory other than the device's."""
    for kind in plan.move_kinds:
        if kind != MoveKind.COPY:
            name = MoveKind(kind).name if kind in set(MoveKind) else str(kind)
            raise ValueError(f"move_kinds: this runner has no memory but the device's; every move must be COPY, got {name}")


def refuse_drafts(plan: Plan) -> None:
    """Raises ValueError for rows with drafts, and rows for which some are to be made."""
    if plan.drafts:
        raise ValueError(f"drafts: this runner verifies none; samples must be 0 or 1, got {max(plan.samples)}")
    if any(plan.num_drafts):
        raise drafts_nothing(plan)


def drafts_nothing(plan: Plan) -> ValueError:
    return ValueError(f"num_drafts: this runner drafts nothing; every row must say 0, got {max(plan.num_drafts)}")


NO_DRAFTS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions that a step samples [P], those of a row one behind the other.

    rows      the row of each
    tokens    the token of the step whose hidden state gives the logits
    slots     of the rows
    places    absolute position of the token that is chosen
    drafts    the draft that the token stands for and is compared with; -1 at a row's last position. None: no row has drafts
    """

    rows: Ints
    tokens: Ints
    slots: Ints
    places: Ints
    drafts: Ints | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def given(self) -> Ints | None:
        """The draft before the position; -1 at a row's first. None: no row has drafts."""
        return None if self.drafts is None else np.concatenate(([-1], self.drafts[:-1]))

    def accepted(self, token_ids: Ints, unknown: Sequence[int]) -> NDArray[np.bool_]:
        """[P] which tokens count: each row's first, and every other that follows a draft that is right.

        unknown  positions whose token must not be used, none of them a row's first
        """
        given = self.given
        assert self.drafts is not None, "without drafts every token counts"
        assert given is not None
        is_kept = given < 0
        is_right = np.zeros(len(self), dtype=np.bool_)
        is_right[1:] = token_ids[:-1] == self.drafts[:-1]
        is_right[list(unknown)] = False
        for place in np.flatnonzero(is_right & ~is_kept).tolist():
            is_kept[place] = is_kept[place - 1]
        return is_kept


def sampled_positions(rows: Rows, drafts: Ints = NO_DRAFTS) -> Positions:
    """drafts: the plan's, row by row. Raises ValueError where their number is not that of the rows."""
    sampling = np.flatnonzero(rows.samples)
    if not len(drafts) and not np.count_nonzero(rows.samples > 1):
        slots, ends = rows.slots[sampling], rows.ends[sampling]
        return Positions(sampling, rows.row_starts[sampling + 1] - 1, slots, ends)
    samples = rows.samples[sampling]
    if len(drafts) != (num_drafts := int(samples.sum()) - len(sampling)):
        raise ValueError(f"drafts: {num_drafts} are missing or left over: the plan has {len(drafts)}")
    of_row = np.repeat(sampling, samples)
    back = np.repeat(np.cumsum(samples), samples) - 1 - np.arange(len(of_row))  # positions of the row that follow
    stands_for = np.full(len(of_row), -1)
    stands_for[back > 0] = drafts
    return Positions(of_row, rows.row_starts[of_row + 1] - 1 - back, rows.slots[of_row], rows.ends[of_row] - back, stands_for)


@dataclass(frozen=True, slots=True)
class Selection:
    """The step's tokens whose hidden states the model returns: [W] ascending; None: all. Less than half must be selected to be worth it."""

    tokens: Ints | None

    def places(self, tokens: Ints) -> Ints:
        return tokens if self.tokens is None else np.searchsorted(self.tokens, tokens)


ALL = Selection(None)


def count_prompt_logprobs(rows: Rows, state: SlotState) -> Ints:
    """[R] leading tokens whose next token is a prompt token with log-probability asked for."""
    asks = state.prompt_logprobs[rows.slots] >= 0
    if not asks.any():  # the usual case
        return np.zeros(len(asks), dtype=np.int64)
    return np.where(asks, np.clip(state.num_prompt[rows.slots] - 1 - rows.starts, 0, rows.counts), 0)


def select_tokens(rows: Rows, positions: Positions, logprob_counts: Ints) -> Selection:
    num_tokens = int(rows.row_starts[-1])
    if num_tokens == len(rows.slots):
        return ALL
    is_wanted = np.zeros(num_tokens, dtype=np.bool_)
    is_wanted[positions.tokens] = True
    for row in np.flatnonzero(logprob_counts):
        is_wanted[rows.row_starts[row] : rows.row_starts[row] + logprob_counts[row]] = True
    tokens = np.flatnonzero(is_wanted)
    return Selection(tokens) if 2 * len(tokens) <= num_tokens else ALL


Upload = Callable[[Sequence[NDArray[Any]]], list[Tensor]]


def upload_each(arrays: Sequence[NDArray[Any]], device: str) -> list[Tensor]:
    return [torch.from_numpy(values).to(device) for values in arrays]


def refuse_unknown_ids(rows: Rows, known: Ints, failed: NDArray[np.bool_]) -> None:
    """Raises UnknownToken for a row that needs more ids than its slot has."""
    unknown = (rows.ends > known) & ~failed
    if unknown.any() and (unknown := unknown & (rows.known_ends > known)).any():
        row = int(np.flatnonzero(unknown)[0])
        raise UnknownToken(f"slot {rows.slots[row]} has {known[row]} known ids, the plan computes up to {rows.known_ends[row]}")


def build_batch(
    rows: Rows, state: SlotState, upload: Upload, selected: Selection = ALL, resident: Resident = ()
) -> tuple[Tensor, ForwardBatch]:
    """Token ids [T] int64 and the batch that describes them."""
    token_slots, positions = token_places(rows)
    tables = state.tables
    arrays: list[NDArray[Any]] = [state.token_ids[token_slots, positions].astype(np.int64), positions, rows.row_starts.astype(np.int32)]
    arrays.append(rows.ends.astype(np.int32))
    arrays += [_block_table(table, rows, state.block_size) for table in tables]
    arrays += state.cache_places(token_slots, positions)
    num_groups = len(tables)
    if selected.tokens is not None:
        arrays.append(selected.tokens)
    if has_adapters := bool(rows.adapters.any()):
        slots = np.repeat(rows.adapters, rows.counts).astype(np.int32)
        arrays += [slots] if selected.tokens is None else [slots, slots[selected.tokens]]
    ids, on_device, row_starts, context_lens, *rest = upload(arrays)
    adapters = rest[2 * num_groups + (selected.tokens is not None) :]
    batch = ForwardBatch(
        positions=on_device,
        row_starts=row_starts,
        context_lens=context_lens,
        max_count=int(rows.counts.max()),
        groups=tuple(GroupBatch(table, mapping) for table, mapping in zip(rest[:num_groups], rest[num_groups:], strict=False)),
        adapters=StepAdapters(adapters[0], resident, *adapters[1:]) if has_adapters else None,
        selected=None if selected.tokens is None else rest[2 * num_groups],
    )
    return ids, batch


def token_places(rows: Rows) -> tuple[Ints, Ints]:
    """The slot and the absolute position [T] of every token."""
    num_tokens = int(rows.row_starts[-1])
    if num_tokens == len(rows.slots):
        return rows.slots, rows.starts.copy()
    positions = np.arange(num_tokens) + np.repeat(rows.starts - rows.row_starts[:-1], rows.counts)
    return np.repeat(rows.slots, rows.counts), positions


def _block_table(table: NDArray[np.int32], rows: Rows, block_size: int) -> NDArray[np.int32]:
    """[R, M]; entries beyond a row's context are the pad block."""
    held = -(-rows.ends // block_size)
    width = int(held.max())
    return np.where(np.arange(width) < held[:, None], table[rows.slots, :width], np.int32(0))
