"""Protocol of sampling on the device (`DeviceChoice`), and the tensors that pass between host and device for it.

The host sends one matrix that describes a step's rows (`Field`), and reads one with the chosen tokens (`Chosen`). What sampling needs of a
sequence stays on the device (`SlotTensors`), so the next step can be launched before the host knows the chosen tokens.

`gpu.choice` implements it in Triton, tests/support/plain_choice.py in torch; both choose as `tensor.sampling.sampler` does, with the same
random numbers. Shape letters: N slots, B rows of the step, V vocabulary, G KV groups, M block-table width, S block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.core.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS
from headrace.tensor.kernels.filters import num_words

MAX_TABLE_CHANGES = 1024

IN_PROMPT = 1 << 30
"""Added to `SlotTensors.seen` where the prompt has the token. Below it: how often the token was generated."""


class Field(IntEnum):
    """A row of the matrix [NUM_FIELDS, B] int32. Floats are float32 in their 32 bits.

    The first four are of the forward pass over rows of one token, the rest of the choice: padding rows and rows that sample nothing have
    slot N there, temperature 0 and nothing else.
    """

    ID = 0
    """Token id; -1: the slot's newest, which the device has."""
    ROW_SLOT = 1
    POSITION = 2
    CONTEXT = 3
    SLOT = 4
    TEMPERATURE = 5
    """Float; 0: greedy."""
    TOP_K = 6
    """1..V."""
    TOP_P = 7
    MIN_P = 8
    UNIFORM = 9
    """Float in [0, 1)."""
    REPETITION = 10
    FREQUENCY = 11
    PRESENCE = 12
    NUM_BIAS = 13
    NUM_ENDS = 14
    MASK = 15
    """Place of the row's grammar mask; -1: any token."""
    NUM_TOP = 16
    """-1: no log-probabilities."""


NUM_FIELDS = len(Field)

FLOATS = frozenset({Field.TEMPERATURE, Field.TOP_P, Field.MIN_P, Field.UNIFORM, Field.REPETITION, Field.FREQUENCY, Field.PRESENCE})

PADDING = {field: 0.0 if field in FLOATS else 0 for field in Field} | {
    Field.CONTEXT: 1,
    Field.TOP_K: 2**31 - 1,
    Field.TOP_P: 1.0,
    Field.REPETITION: 1.0,
    Field.MASK: -1,
    Field.NUM_TOP: -1,
}


class Chosen(IntEnum):
    """A row of the matrix [NUM_CHOSEN, B] int32 that a choice writes. From TOP_ID and TOP_LOGPROB on there are MAX_LOGPROBS each."""

    TOKEN = 0
    """-1: the row's logits are not a distribution."""
    LOGPROB = 1
    """Float; this and what follows only where the row asked for it."""
    RANK = 2
    TOP_ID = 3
    TOP_LOGPROB = 3 + MAX_LOGPROBS


NUM_CHOSEN = 3 + 2 * MAX_LOGPROBS


class ChoiceKind(NamedTuple):
    """What some row of a step asks for."""

    sampled: bool = False
    filtered: bool = False
    edited: bool = False
    reported: bool = False


CHOICE_KINDS = [ChoiceKind(*flags) for flags in product((False, True), repeat=4) if flags[0] or not flags[1]]


@dataclass(frozen=True, slots=True)
class SlotTensors:
    """Slot N is that of padding rows.

    tables    [G, N + 1, M] int32 block ids
    newest    [N + 1] int32 token chosen last
    seen      [N + 1, V] int32 tokens of prompt and output, valid for slots with a penalty
    bias_ids  [N + 1, MAX_LOGIT_BIAS] int32, valid up to the row's NUM_BIAS; biases float32
    end_ids   [N + 1, E] int32, different ids, valid up to the row's NUM_ENDS
    """

    tables: Tensor
    newest: Tensor
    seen: Tensor
    bias_ids: Tensor
    biases: Tensor
    end_ids: Tensor

    @classmethod
    def zeros(cls, num_slots: int, tables_shape: tuple[int, int], vocab_size: int, max_ends: int, device: str) -> SlotTensors:
        """tables_shape: (G, M)."""
        count, (groups, width) = num_slots + 1, tables_shape

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        biases = torch.zeros((count, MAX_LOGIT_BIAS), dtype=torch.float32, device=device)
        bias_ids, end_ids = ints(count, MAX_LOGIT_BIAS), ints(count, max_ends)
        return cls(ints(groups, count, width), ints(count), ints(count, vocab_size), bias_ids, biases, end_ids)


@dataclass(frozen=True, slots=True)
class RowTensors:
    """One step's rows on the device, at addresses that a captured graph knows.

    edited   [N, V] float32, free for a choice of an edited kind
    masks    [N, ceil(V / 32)] int32 words of grammar masks
    chosen   [NUM_CHOSEN, N] int32
    """

    edited: Tensor
    masks: Tensor
    chosen: Tensor

    @classmethod
    def zeros(cls, num_rows: int, vocab_size: int, device: str) -> RowTensors:
        return cls(
            torch.zeros((num_rows, vocab_size), dtype=torch.float32, device=device),
            torch.zeros((num_rows, num_words(vocab_size)), dtype=torch.int32, device=device),
            torch.zeros((NUM_CHOSEN, num_rows), dtype=torch.int32, device=device),
        )


class DecodeRows(NamedTuple):
    """ids [B] int64, positions [B] int64, slot mappings [G, B] int64, block tables [G, B, M] int32, valid up to the row's context."""

    ids: Tensor
    positions: Tensor
    slot_mappings: Tensor
    block_tables: Tensor


class DeviceChoice(Protocol):
    """Nothing waits for the device: all of it can be captured."""

    def write_tables(self, tables: Tensor, changes: Tensor) -> None:
        """Write block ids into tables [G, N + 1, M].

        changes  [1 + 2 * MAX_TABLE_CHANGES] int32: their number, places in the flat tables, block ids. No place comes twice
        """
        ...

    def decode_rows(self, fields: Tensor, slots: SlotTensors, block_size: int) -> DecodeRows: ...

    def choose(self, logits: Tensor, fields: Tensor, slots: SlotTensors, rows: RowTensors, kind: ChoiceKind) -> None:
        """Choose a token for each of the rows in fields [NUM_FIELDS, B], from logits [B, V] of any float dtype, into `rows.chosen`.

        The token becomes the slot's newest, 0 where there is none, and one more of its `seen` where the row has a penalty.
        """
        ...
