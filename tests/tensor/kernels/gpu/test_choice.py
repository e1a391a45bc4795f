"""Tests choosing tokens in Triton against the plain choice, which is the host's own: the same tokens, log-probabilities within rounding.

As `test_equivalence.py`, these run on a GPU by themselves, and without one in the process of `test_interpreter.py`.
"""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from plain_choice import PlainChoice

from headrace.core.sampling import MAX_LOGPROBS
from headrace.tensor.kernels.choice import (
    CHOICE_KINDS,
    FLOATS,
    IN_PROMPT,
    MAX_TABLE_CHANGES,
    NUM_FIELDS,
    PADDING,
    ChoiceKind,
    Chosen,
    Field,
    RowTensors,
    SlotTensors,
)
from headrace.tensor.kernels.gpu.choice import TritonChoice

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
NUM_ENDS = 5

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.pure if IS_INTERPRETED else pytest.mark.process,  # compiling starts programs
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # the interpreter computes both sides of a choice
]


Tensors = TypeVar("Tensors", SlotTensors, RowTensors)


def copied(value: Tensors, device: str) -> Tensors:
    return replace(value, **{item.name: getattr(value, item.name).to(device, copy=True) for item in dataclass_fields(value)})


def padding_rows(count: int, num_slots: int) -> np.ndarray:
    fields = np.zeros((NUM_FIELDS, count), dtype=np.int32)
    for name in Field:
        fields.view(np.float32)[name] = PADDING[name] if name in FLOATS else 0
        if name not in FLOATS:
            fields[name] = PADDING[name]
    fields[[Field.SLOT, Field.ROW_SLOT]] = num_slots
    return fields


def random_rows(rng: np.random.Generator, kind: ChoiceKind, count: int, vocab: int) -> np.ndarray:
    """Rows that between them ask for all that is of the kind, and a padding row last."""
    fields, some = padding_rows(count, count - 1), count - 1
    floats = fields.view(np.float32)
    fields[Field.SLOT, :some] = rng.permutation(some)

    def now_and_then(name: Field, values: object, share: float = 0.6) -> None:
        drawn = np.broadcast_to(np.asarray(values), some)
        (floats if name in FLOATS else fields)[name, :some] = np.where(rng.random(some) < share, drawn, PADDING[name])

    if kind.sampled:
        now_and_then(Field.TEMPERATURE, rng.choice((0.3, 1.0, 1.7), some), 0.85)
        floats[Field.UNIFORM, :some] = rng.random(some)
        now_and_then(Field.MIN_P, rng.choice((0.02, 0.2), some), 0.3)
    if kind.filtered:
        now_and_then(Field.TOP_K, rng.choice((1, 2, 7, 60, vocab - 1), some))
        now_and_then(Field.TOP_P, rng.choice((1e-6, 0.3, 0.9, 0.99), some))
    if kind.edited:
        now_and_then(Field.REPETITION, rng.uniform(0.7, 1.5, some))
        now_and_then(Field.FREQUENCY, rng.uniform(-1, 1, some))
        now_and_then(Field.PRESENCE, rng.uniform(-1, 1, some))
        now_and_then(Field.NUM_BIAS, rng.integers(1, 9, some))
        now_and_then(Field.NUM_ENDS, rng.integers(1, NUM_ENDS + 1, some))
        fields[Field.MASK, :some] = np.where(rng.random(some) < 0.5, np.arange(some), -1)
    if kind.reported:
        now_and_then(Field.NUM_TOP, rng.choice((0, 1, 5, MAX_LOGPROBS), some), 0.8)
    return fields


def random_slots(rng: np.random.Generator, num_slots: int, vocab: int) -> SlotTensors:
    slots = SlotTensors.zeros(num_slots, (2, 6), vocab, NUM_ENDS, "cpu")
    generated, in_prompt = rng.integers(-3, 4, (num_slots + 1, vocab)).clip(0), rng.random((num_slots + 1, vocab)) < 0.1
    slots.seen[:] = torch.from_numpy((generated + IN_PROMPT * in_prompt).astype(np.int32))
    for slot in range(num_slots):
        slots.bias_ids[slot, :8] = torch.from_numpy(rng.choice(vocab, 8, replace=False).astype(np.int32))
        slots.biases[slot, :8] = torch.from_numpy(rng.uniform(-3, 9, 8).astype(np.float32))
        slots.end_ids[slot] = torch.from_numpy(rng.choice(vocab, NUM_ENDS, replace=False).astype(np.int32))
    return slots


def random_logits(rng: np.random.Generator, count: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Plain rows, rows with ties, with much that is forbidden, with one finite logit, and such that are no distribution."""
    logits = rng.normal(0, 3, (count, vocab))
    logits[1] = np.round(logits[1])
    logits[2] = np.round(logits[2] / 4)
    logits[3, rng.random(vocab) < 0.9] = -np.inf
    logits[4] = -np.inf
    logits[4, vocab // 2] = 1.0
    logits[5, vocab - 1] = np.nan
    logits[6, 0] = np.inf
    logits[7] = -np.inf
    logits[8, rng.random(vocab) < 0.3] = 0.0
    logits[8, rng.random(vocab) < 0.3] = -0.0
    return torch.from_numpy(logits.astype(np.float32)).to(dtype)


def both(rng: np.random.Generator, kind: ChoiceKind, *, count: int, vocab: int, dtype: torch.dtype) -> list[tuple[SlotTensors, RowTensors]]:
    """What the plain choice and Triton's leave behind for the same rows."""
    fields, slots = torch.from_numpy(random_rows(rng, kind, count, vocab)), random_slots(rng, count - 1, vocab)
    rows, logits = RowTensors.zeros(count, vocab, "cpu"), random_logits(rng, count, vocab, dtype)
    words = rng.integers(0, 2**32, tuple(rows.masks.shape), dtype=np.uint32)
    words[3] = 0
    rows.masks[:] = torch.from_numpy(words.view(np.int32))
    done = []
    for choice, device in ((PlainChoice(), "cpu"), (TritonChoice(), DEVICE)):
        mine, its = copied(slots, device), copied(rows, device)
        choice.choose(logits.to(device), fields.to(device), mine, its, kind)
        done.append((mine, its))
    assert fields[Field.NUM_TOP].max() >= 0 or not kind.reported
    return done


def check_equal(done: list[tuple[SlotTensors, RowTensors]]) -> Tensor:
    """Returns the tokens."""
    (plain_slots, plain_rows), (slots, rows) = done
    chosen, expected = rows.chosen.cpu(), plain_rows.chosen
    assert chosen[Chosen.TOKEN].tolist() == expected[Chosen.TOKEN].tolist()
    assert torch.equal(slots.newest.cpu(), plain_slots.newest)
    assert torch.equal(slots.seen.cpu(), plain_slots.seen)
    assert torch.equal(chosen[Chosen.RANK], expected[Chosen.RANK])
    assert torch.equal(chosen[Chosen.TOP_ID : Chosen.TOP_LOGPROB], expected[Chosen.TOP_ID : Chosen.TOP_LOGPROB])
    for first, last in ((Chosen.LOGPROB, Chosen.RANK), (Chosen.TOP_LOGPROB, len(chosen))):
        torch.testing.assert_close(chosen[first:last].view(torch.float32), expected[first:last].view(torch.float32), rtol=1e-5, atol=1e-5)
    return expected[Chosen.TOKEN]


KINDS = CHOICE_KINDS
if IS_INTERPRETED:  # in which a pass over a few rows takes tenths of a second
    KINDS = [kind for kind in CHOICE_KINDS if not kind.filtered or (kind.edited and kind.reported)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(name for name, is_so in kind._asdict().items() if is_so) or "greedy")
def test_every_kind_of_choice_equals_the_plain_one(kind: ChoiceKind) -> None:
    rng = np.random.default_rng(CHOICE_KINDS.index(kind))
    tokens = check_equal(both(rng, kind, count=12, vocab=1100, dtype=torch.float32))
    assert tokens[[5, 6, 7]].tolist() == [-1, -1, -1]
    assert len(set(tokens.tolist())) > 5


def test_narrow_logits_are_chosen_from_as_they_are() -> None:
    """They have many ties, which the filters cut."""
    check_equal(both(np.random.default_rng(3), ChoiceKind(True, True), count=12, vocab=1100, dtype=torch.bfloat16))


def test_rows_of_one_token_are_made_from_what_the_device_holds() -> None:
    rng, count = np.random.default_rng(0), 5
    fields, slots = padding_rows(count, 4), random_slots(rng, 4, 300)
    slots.tables[:, :4] = torch.from_numpy(rng.integers(1, 90, (2, 4, 6)).astype(np.int32))
    slots.newest[:] = torch.arange(50, 55, dtype=torch.int32)
    fields[Field.ROW_SLOT, :4], fields[Field.POSITION, :4], fields[Field.ID, :4] = [2, 0, 3, 1], [0, 9, 23, 16], [-1, 7, -1, 8]
    fields[Field.CONTEXT, :4] = fields[Field.POSITION, :4] + 1
    expected = PlainChoice().decode_rows(torch.from_numpy(fields), slots, 4)
    made = TritonChoice().decode_rows(torch.from_numpy(fields).to(DEVICE), copied(slots, DEVICE), 4)
    for mine, its in zip(made[:3], expected[:3], strict=True):
        assert torch.equal(mine.cpu(), its)
    for row, context in enumerate(fields[Field.CONTEXT]):
        held = -(-int(context) // 4)
        assert torch.equal(made.block_tables[:, row, :held].cpu(), expected.block_tables[:, row, :held])


@pytest.mark.parametrize("count", [0, 1, 300, MAX_TABLE_CHANGES])
def test_block_table_entries_are_written(count: int) -> None:
    rng = np.random.default_rng(1)
    changes = np.full(1 + 2 * MAX_TABLE_CHANGES, -(2**31), dtype=np.int32)
    changes[0], changes[1 : 1 + count] = count, rng.permutation(2 * 40 * 20)[:count]
    changes[1 + MAX_TABLE_CHANGES : 1 + MAX_TABLE_CHANGES + count] = rng.integers(1, 99, count)
    tables = torch.zeros((2, 40, 20), dtype=torch.int32)
    on_device = tables.to(DEVICE, copy=True)
    PlainChoice().write_tables(tables, torch.from_numpy(changes))
    TritonChoice().write_tables(on_device, torch.from_numpy(changes).to(DEVICE))
    assert torch.equal(on_device.cpu(), tables)
    assert (tables != 0).sum() == count
