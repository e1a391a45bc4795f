"""Brings the sampling parameters of slots to the device, where tokens are chosen: into a step's matrix of rows, or into the slot's
memory.

Tokens are counted on the device as they are chosen (`SlotTensors.seen`); the host writes a slot's counts anew where it is unknown
whether a token was counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.plan import NO_LOGPROBS, LogprobColumns, Started
from headrace.core.sampling import MAX_LOGPROBS
from headrace.engine.runner.batch import Upload
from headrace.engine.runner.slots import Ints, SlotState
from headrace.tensor.kernels.choice import IN_PROMPT, ChoiceKind, Chosen, Field, SlotTensors
from headrace.tensor.sampling import Sampled, uniform
from headrace.tensor.sampling.logprobs import scattered
from headrace.tensor.sampling.sampler import SamplingColumns

_BELOW_ONE = np.float32(1 - 2.0**-24)


@dataclass(frozen=True, slots=True)
class _Edits:
    bias_ids: NDArray[np.int32]
    biases: NDArray[np.float32]
    end_ids: NDArray[np.int32]
    is_counted: bool


def read_chosen(chosen: NDArray[np.int32], num_top: Ints, vocab_size: int) -> Sampled:
    """chosen   [NUM_CHOSEN, N], or [1, N] where no row asked for log-probabilities"""
    token_ids = chosen[Chosen.TOKEN].astype(np.int64)
    failed = token_ids < 0
    asked = np.flatnonzero(~failed & (num_top >= 0))
    if not len(asked):
        return Sampled(token_ids, failed, NO_LOGPROBS)
    mine, counts = chosen[:, asked], np.minimum(num_top[asked], vocab_size).astype(np.int32)
    is_listed = np.arange(MAX_LOGPROBS) < counts[:, None]
    lists = [mine[first : first + MAX_LOGPROBS].T[is_listed] for first in (Chosen.TOP_ID, Chosen.TOP_LOGPROB)]
    values = (mine[Chosen.TOKEN], mine[Chosen.LOGPROB], mine[Chosen.RANK], counts, *lists)
    columns = LogprobColumns(*(array(code, value.tobytes()) for code, value in zip("ifiiif", values, strict=True)))
    return Sampled(token_ids, failed, scattered(columns, asked, len(token_ids)))


class SlotChoice:
    """The `SlotPart` of sampling on the device: parameters and edits by slot."""

    def __init__(self, slots: SlotState, tensors: SlotTensors, upload: Upload, eos_token_ids: tuple[int, ...]) -> None:
        self._slots, self._tensors, self._upload, self._eos_token_ids = slots, tensors, upload, frozenset(eos_token_ids)
        num_slots, self._vocab_size = len(slots.known), tensors.seen.shape[1]
        self._columns = SamplingColumns()
        self._penalties = np.zeros((3, num_slots), dtype=np.float32)
        self._penalties[0] = 1.0
        self._num_bias = np.zeros(num_slots, dtype=np.int32)
        self._num_ends = np.zeros(num_slots, dtype=np.int32)
        self._ends_allowed_from = np.zeros(num_slots, dtype=np.int64)
        self._edits: dict[int, _Edits] = {}
        self._unsent: set[int] = set()

    def start(self, started: Started) -> None:
        slot, params = started.slot, started.params
        self._columns.fill(slot, params, started.index, self._vocab_size)
        self.end([slot])
        bias = params.logit_bias
        ends = sorted(params.end_ids(self._eos_token_ids)) if params.min_tokens > 0 else []
        self._penalties[:, slot] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._num_bias[slot], self._num_ends[slot] = len(bias), len(ends)
        self._ends_allowed_from[slot] = started.num_prompt_tokens + params.min_tokens
        if self._columns.edited[slot]:
            biases = np.fromiter(bias.values(), dtype=np.float32)
            ids = np.fromiter(bias.keys(), dtype=np.int32)
            self._edits[slot] = _Edits(ids, biases, np.array(ends, dtype=np.int32), params.has_penalties)
            self._unsent.add(slot)

    def end(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._edits.pop(int(slot), None)
            self._unsent.discard(int(slot))

    def commit(self, slots: Ints, token_ids: Ints) -> None:
        """The device has counted these tokens itself."""

    def retract(self, slot: int, token_ids: Ints) -> None:
        self.mark_unsent([slot])

    def mark_unsent(self, slots: Iterable[int]) -> None:
        self._unsent.update(int(slot) for slot in slots if int(slot) in self._edits)

    def unsent(self, slots: Ints) -> NDArray[np.bool_]:
        return np.isin(slots, list(self._unsent)) if self._unsent else np.zeros(len(slots), dtype=np.bool_)

    def send(self, slots: Ints) -> None:
        """No token of these slots may be in flight."""
        due = slots[self.unsent(slots)].tolist()
        for slot in due:
            edits, tensors = self._edits[slot], self._tensors
            bias_ids, biases, end_ids = self._upload([edits.bias_ids, edits.biases, edits.end_ids])
            tensors.bias_ids[slot, : len(bias_ids)] = bias_ids
            tensors.biases[slot, : len(biases)] = biases
            tensors.end_ids[slot, : len(end_ids)] = end_ids
            if edits.is_counted:
                tensors.seen[slot] = self._upload([self._seen(slot)])[0]
        self._unsent.difference_update(due)

    def _seen(self, slot: int) -> NDArray[np.int32]:
        slots, num_prompt = self._slots, self._slots.num_prompt[slot]
        seen = np.bincount(slots.token_ids[slot, num_prompt : slots.known[slot]], minlength=self._vocab_size).astype(np.int32)
        seen[slots.token_ids[slot, :num_prompt]] += IN_PROMPT
        return seen

    def fill(self, fields: NDArray[np.int32], slots: Ints, positions: Ints, mask_places: Ints) -> ChoiceKind:
        """fields       [NUM_FIELDS, B], changed in place
        slots        [B]; positions [B] of the tokens being chosen
        mask_places  [B] place of the row's grammar mask among the step's masks; -1: none
        """
        columns, floats = self._columns, fields.view(np.float32)
        is_greedy = columns.greedy[slots]
        fields[Field.SLOT] = slots
        floats[Field.TEMPERATURE] = np.where(is_greedy, np.float32(0), columns.temperature[slots])
        fields[Field.TOP_K], floats[Field.TOP_P] = columns.top_k[slots], columns.top_p[slots]
        floats[Field.MIN_P] = columns.min_p[slots]
        floats[Field.REPETITION : Field.PRESENCE + 1] = self._penalties[:, slots]
        fields[Field.NUM_BIAS] = self._num_bias[slots]
        fields[Field.NUM_ENDS] = np.where(positions < self._ends_allowed_from[slots], self._num_ends[slots], 0)
        fields[Field.MASK], fields[Field.NUM_TOP] = mask_places, columns.num_top[slots]
        if not is_greedy.all():
            numbers = uniform(columns.seed[slots], columns.index[slots], positions)
            floats[Field.UNIFORM] = np.minimum(numbers, _BELOW_ONE)
        is_filtered = (columns.top_k[slots] < self._vocab_size) | (columns.top_p[slots] < 1.0)
        return ChoiceKind(
            sampled=not is_greedy.all(),
            filtered=bool((is_filtered & ~is_greedy).any()),
            edited=bool((columns.edited[slots] | (mask_places >= 0)).any()),
            reported=bool((columns.num_top[slots] >= 0).any()),
        )

    def num_top(self, slots: Ints) -> Ints:
        return self._columns.num_top[slots]
