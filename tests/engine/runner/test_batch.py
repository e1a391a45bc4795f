"""Tests the tensors of a step against values written out by hand for two KV groups."""

from __future__ import annotations

from array import array
from functools import partial

import numpy as np
import pytest

from headrace.core.ids import SlotId
from headrace.core.plan import Plan, Started
from headrace.core.sampling import SamplingParams
from headrace.engine.runner.batch import (
    ALL,
    Rows,
    Selection,
    UnknownToken,
    build_batch,
    count_prompt_logprobs,
    read_rows,
    refuse_unknown_ids,
    sampled_positions,
    select_tokens,
    upload_each,
)
from headrace.engine.runner.slots import SlotState

pytestmark = pytest.mark.pure

to_host = partial(upload_each, device="cpu")


def state_with_two_sequences() -> SlotState:
    """Slot 5 holds 7 ids, slot 2 holds 3; blocks of 4; group 1 has let go of slot 5's first block."""
    state = SlotState(max_num_seqs=8, max_model_len=32, num_groups=2, block_size=4)
    state.start(Started(SlotId(5), array("i", [50, 51, 52, 53, 54, 55, 56]), 7, SamplingParams(seed=0), 0))
    state.start(Started(SlotId(2), array("i", [20, 21, 22]), 2, SamplingParams(seed=0), 0))
    state.write_tables(
        Plan(
            step_id=1,
            table_groups=array("i", [0, 0, 0, 1, 1, 0, 1]),
            table_slots=array("i", [5, 5, 5, 5, 5, 2, 2]),
            table_indices=array("i", [0, 1, 2, 1, 2, 0, 0]),
            table_blocks=array("i", [11, 12, 13, 32, 33, 14, 34]),
        )
    )
    return state


def rows_of(*rows: tuple[int, int, int, int]) -> Rows:
    slots, starts, counts, samples = (array("i", values) for values in zip(*rows, strict=True))
    return read_rows(Plan(step_id=1, slots=slots, starts=starts, counts=counts, samples=samples))


def test_a_ragged_step_is_laid_out_row_after_row() -> None:
    ids, batch = build_batch(rows_of((5, 3, 3, 0), (2, 2, 1, 1)), state_with_two_sequences(), to_host)
    assert ids.tolist() == [53, 54, 55, 22]
    assert batch.positions.tolist() == [3, 4, 5, 2]
    assert batch.row_starts.tolist() == [0, 3, 4]
    assert batch.context_lens.tolist() == [6, 3]
    assert batch.max_count == 3
    full, window = batch.groups
    assert full.block_table.tolist() == [[11, 12], [14, 0]], "the block held ahead of the context is not shown"
    assert full.slot_mapping.tolist() == [47, 48, 49, 58]
    assert window.block_table.tolist() == [[0, 32], [34, 0]]
    assert window.slot_mapping.tolist()[1:] == [128, 129, 138]


def test_a_pure_decode_step_has_one_token_per_row() -> None:
    ids, batch = build_batch(rows_of((2, 2, 1, 1), (5, 6, 1, 1)), state_with_two_sequences(), to_host)
    assert (ids.tolist(), batch.positions.tolist(), batch.max_count) == ([22, 56], [2, 6], 1)
    assert (batch.row_starts.tolist(), batch.context_lens.tolist()) == ([0, 1, 2], [3, 7])


def test_sampled_ids_are_read_by_the_next_step() -> None:
    state = state_with_two_sequences()
    state.commit(np.array([2]), np.array([99]))
    ids, _ = build_batch(rows_of((2, 3, 1, 1)), state, to_host)
    assert ids.tolist() == [99]


@pytest.mark.parametrize("ended", [False, True])
def test_an_id_nobody_knows_is_not_read(ended: bool) -> None:
    state = state_with_two_sequences()
    if ended:
        state.end(np.array([2]))
    rows = rows_of((5, 0, 1, 0), (2, 3 - ended, 1, 1))
    with pytest.raises(UnknownToken, match="slot 2"):
        refuse_unknown_ids(rows, state.known[rows.slots], state.failed[rows.slots])


def test_a_new_sequence_finds_an_empty_table() -> None:
    state = state_with_two_sequences()
    state.start(Started(SlotId(5), array("i", [1]), 1, SamplingParams(seed=0), 0))
    assert not any(table[5].any() for table in state.tables)


def test_the_last_entry_for_a_place_wins() -> None:
    state = SlotState(max_num_seqs=4, max_model_len=4000, num_groups=1, block_size=4)
    indices, blocks = [*range(900), *range(900)], [*range(1, 901), *range(2001, 2901)]
    state.write_tables(
        Plan(
            step_id=1,
            table_groups=array("i", [0] * 1800),
            table_slots=array("i", [2] * 1800),
            table_indices=array("i", indices),
            table_blocks=array("i", blocks),
        )
    )
    assert state.tables[0][2, :900].tolist() == blocks[900:]
    assert not state.tables[0][[0, 1, 3]].any()


def resident_kib() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Rss:"))


def test_untouched_slots_cost_no_memory() -> None:
    """4096 sequences of 128k positions are 2 GiB of ids: reserved, never written."""
    before = resident_kib()
    state = SlotState(max_num_seqs=4096, max_model_len=131072, num_groups=1, block_size=16)
    state.start(Started(SlotId(4095), array("i", [1, 2, 3]), 3, SamplingParams(seed=0), 0))
    assert resident_kib() - before < 64 * 1024
    assert state.known[4095] == 3


def test_each_token_has_the_adapter_of_its_row() -> None:
    class Packed:
        num_bytes = 1

    slots, starts, counts, samples, places = (array("i", values) for values in ((5, 2), (0, 2), (6, 1), (1, 1), (2, 0)))
    plan = Plan(step_id=1, slots=slots, starts=starts, counts=counts, samples=samples, adapter_slots=places)
    resident, state = (None, None, Packed()), state_with_two_sequences()
    rows = read_rows(plan, resident)
    every = build_batch(rows, state, to_host, ALL, resident)[1]
    some = build_batch(rows, state, to_host, Selection(np.array([5, 6])), resident)[1]
    assert every.adapters is not None
    assert some.adapters is not None
    assert some.selected is not None
    assert every.adapters.slots.tolist() == some.adapters.slots.tolist() == [2] * 6 + [0]
    assert (every.adapters.selected_slots, every.adapters.resident) == (None, resident)
    assert some.adapters.selected_slots is not None
    assert (some.adapters.selected_slots.tolist(), some.selected.tolist()) == ([2, 0], [5, 6])
    assert build_batch(rows.picked(np.array([1])), state, to_host, ALL, resident)[1].adapters is None
    for others in ((None, Packed()), (None, Packed(), None), ()):
        with pytest.raises(ValueError, match=r"adapter_slots: .* at place 2"):
            read_rows(plan, others)


def selection_of(rows: Rows, state: SlotState) -> Selection:
    return select_tokens(rows, sampled_positions(rows), count_prompt_logprobs(rows, state))


def test_only_tokens_that_are_looked_at_are_wanted() -> None:
    state = state_with_two_sequences()
    sampling, chunk = rows_of((5, 0, 6, 1), (2, 2, 1, 1)), rows_of((5, 0, 4, 0), (2, 1, 1, 0))
    found = selection_of(sampling, state)
    assert found.tokens is not None
    assert found.tokens.tolist() == [5, 6]
    assert found.places(np.array([6, 5])).tolist() == [1, 0]
    batch = build_batch(sampling, state, to_host, found)[1]
    assert batch.selected is not None
    assert batch.selected.tolist() == [5, 6]
    assert selection_of(chunk, state).tokens.tolist() == []  # type: ignore[union-attr]


def test_all_tokens_are_wanted_where_few_could_be_left_out() -> None:
    state = state_with_two_sequences()
    assert selection_of(rows_of((2, 2, 1, 1), (5, 6, 1, 0)), state) is ALL
    assert selection_of(rows_of((5, 4, 3, 1), (2, 2, 1, 1)), state).tokens is not None
    assert selection_of(rows_of((5, 5, 2, 1), (2, 2, 1, 1)), state) is ALL
    assert ALL.places(np.array([2, 0])).tolist() == [2, 0]
    assert build_batch(rows_of((5, 5, 2, 1)), state, to_host)[1].selected is None


def test_prompt_tokens_whose_logprobs_are_asked_for_are_wanted() -> None:
    state = state_with_two_sequences()
    state.prompt_logprobs[2] = 1
    rows = rows_of((5, 0, 6, 1), (2, 0, 2, 1))
    assert count_prompt_logprobs(rows, state).tolist() == [0, 1]
    assert selection_of(rows, state).tokens.tolist() == [5, 6, 7]  # type: ignore[union-attr]
