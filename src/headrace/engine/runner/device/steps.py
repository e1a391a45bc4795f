"""Holds the tensors of a device's steps at fixed addresses, which captured graphs know.

Every method enqueues and returns at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.plan import Plan
from headrace.engine.runner.batch import Rows, Upload
from headrace.engine.runner.device.adapters import NO_PLACES, AdapterInputs, DevicePlaces
from headrace.engine.runner.device.graphs import TOKEN_LINES, PromptSize, RowLine, StepGraphs, fill, lines, sizes_up_to
from headrace.engine.runner.slots import SlotState, column
from headrace.tensor.batch import ForwardBatch, GroupBatch, KvCache
from headrace.tensor.kernels.choice import (
    FLOATS,
    MAX_TABLE_CHANGES,
    NUM_CHOSEN,
    NUM_FIELDS,
    PADDING,
    ChoiceKind,
    DeviceChoice,
    Field,
    RowTensors,
    SlotTensors,
)
from headrace.tensor.kernels.filters import Words
from headrace.tensor.launches import Launches, Mark, pinned, upload_together


class DeviceModel(Protocol):
    vocab_size: int
    hidden_size: int
    activations: torch.dtype

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """Rows of one token are computed without waiting for the device, so that this can be captured."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [N, E] -> logits [N, V], a new tensor."""
        ...


@dataclass(frozen=True, slots=True)
class HostInputs:
    """Inputs of one step in pinned memory. fields: [NUM_FIELDS, N]"""

    buffer: Tensor
    fields: NDArray[np.int32]
    changes: NDArray[np.int32]


class Choices(NamedTuple):
    """The tokens that a step chose: [NUM_CHOSEN or 1, B] in host memory, valid once the device has reached the mark."""

    chosen: Tensor
    mark: Mark


class DeviceSteps:
    """Enqueues the parts of steps on the device, by captured graphs where they fit."""

    def __init__(
        self, model: DeviceModel, kv: KvCache, choice: DeviceChoice, launches: Launches, *, max_num_seqs: int, most_tokens: int,
        table_shape: tuple[int, int], max_ends: int, device: str, places: DevicePlaces = NO_PLACES,
    ) -> None:  # fmt: skip
        self.model, self.kv = model, kv
        self.upload: Upload = partial(upload_together, device=device, launches=launches)
        self._choice, self._launches = choice, launches
        self._num_rows = max_num_seqs
        with torch.inference_mode():
            self.slots = SlotTensors.zeros(max_num_seqs, table_shape, model.vocab_size, max_ends, device)
            self._rows = RowTensors.zeros(max_num_seqs, model.vocab_size, device)
            self._hidden = torch.zeros((max_num_seqs + 1, model.hidden_size), dtype=model.activations, device=device)
            self._row_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
            num_field_values = NUM_FIELDS * max_num_seqs
            self._inputs = torch.zeros(num_field_values + 1 + 2 * MAX_TABLE_CHANGES, dtype=torch.int32, device=device)
            self._fields = self._inputs[:num_field_values].view(NUM_FIELDS, max_num_seqs)
            self._changes = self._inputs[num_field_values:]
            self._graphs = StepGraphs(
                launches, sizes_up_to(most_tokens, max_num_seqs), max_num_seqs, self._prompts, self._decode, self._choose,
                has_adapters=places.max_rank > 0,
            )  # fmt: skip
            largest = self._graphs.prompt_sizes[-1]
            self.adapters = AdapterInputs(places, max_num_seqs, largest, launches, device)
            self._prompt_inputs = torch.zeros(largest.num_values(len(kv.pools)), dtype=torch.int64, device=device)
        self._padding = np.array([_bits(field) for field in Field], dtype=np.int32)[:, None]
        self._padding[[Field.ROW_SLOT, Field.SLOT]] = max_num_seqs

    def capture(self) -> None:
        with torch.inference_mode():
            self.send(self.new_inputs())
            self._graphs.capture()

    def new_inputs(self) -> HostInputs:
        buffer = pinned(tuple(self._inputs.shape), torch.int32, self._launches)
        host = buffer.numpy()
        fields, changes = host[: self._fields.numel()].reshape(NUM_FIELDS, -1), host[self._fields.numel() :]
        fields[:], changes[0] = self._padding, 0
        return HostInputs(buffer, fields, changes)

    def send(self, inputs: HostInputs) -> None:
        self._inputs.copy_(inputs.buffer, non_blocking=True)

    def send_masks(self, words: Words) -> None:
        """words [M, ceil(V / 32)]"""
        if len(words):
            self._rows.masks[: len(words)] = self.upload([words.view(np.int32)])[0]

    def write_tables(self, changes: Tensor | None = None) -> None:
        self._choice.write_tables(self.slots.tables, self._changes if changes is None else changes)

    def decode(self, count: int, adapted: bool = False) -> None:
        self._graphs.decode(count, adapted)

    def prompts(self, rows: Rows, state: SlotState, first_place: int) -> bool:
        """False: the rows fit no captured size."""
        size = self._graphs.prompt_size(int(rows.row_starts[-1]), len(rows.slots))
        if size is None:
            return False
        buffer = pinned((size.num_values(len(state.tables)),), torch.int64, self._launches)
        fill(buffer.numpy(), size, rows, state, first_place)
        self._prompt_inputs[: len(buffer)].copy_(buffer, non_blocking=True)
        self._graphs.prompts(size, bool(rows.adapters.any()))
        return True

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        if batch.adapters is not None:
            batch.adapters = self.adapters.placed(batch.adapters)
        return self.model.forward(ids, batch, self.kv)

    def put_hidden(self, hidden: Tensor, first_place: int) -> None:
        """hidden: [N, E]"""
        self._hidden[first_place : first_place + len(hidden)] = hidden

    def choose(self, count: int, kind: ChoiceKind) -> None:
        self._graphs.choose(count, kind)

    def read(self, count: int, *, is_reported: bool) -> Choices:
        size = NUM_CHOSEN if is_reported else 1
        chosen = pinned((size, count), torch.int32, self._launches)
        chosen.copy_(self._rows.chosen[:size, :count], non_blocking=True)
        return Choices(chosen, self._launches.mark())

    def _decode(self, size: int, adapted: bool) -> None:
        self.write_tables()
        fields = self._fields[:, :size]
        rows = self._choice.decode_rows(fields, self.slots, self.kv.block_size)
        groups = tuple(GroupBatch(table, mapping) for table, mapping in zip(rows.block_tables, rows.slot_mappings, strict=True))
        adapters = self.adapters.of_decodes(size) if adapted else None
        batch = ForwardBatch(rows.positions, self._row_starts[: size + 1], fields[Field.CONTEXT], 1, groups, adapters, num_decodes=size)
        self.put_hidden(self.model.forward(rows.ids, batch, self.kv), 0)

    def _prompts(self, size: PromptSize, adapted: bool) -> None:
        of_tokens, of_rows = lines(self._prompt_inputs, size, len(self.kv.pools))
        each = of_rows[:, : size.rows]
        tables = (table.index_select(0, each[RowLine.SLOT]) for table in self.slots.tables)
        groups = tuple(GroupBatch(table, mapping) for table, mapping in zip(tables, of_tokens[TOKEN_LINES:], strict=True))
        batch = ForwardBatch(
            of_tokens[1], of_rows[RowLine.FIRST].int(), each[RowLine.CONTEXT].int(), size.tokens, groups,
            self.adapters.of_prompts(size) if adapted else None, selected=each[RowLine.LAST],
        )  # fmt: skip
        self._hidden.index_copy_(0, each[RowLine.PLACE], self.model.forward(of_tokens[0], batch, self.kv))

    def _choose(self, size: int, kind: ChoiceKind) -> None:
        self._choice.choose(self.model.head(self._hidden[:size]), self._fields[:, :size], self.slots, self._rows, kind)


def _bits(field: Field) -> Any:
    return np.float32(PADDING[field]).view(np.int32) if field in FLOATS else PADDING[field]


class TableChanges:
    """Block-table entries that the device's tables lack. A change is kept until a launch has succeeded."""

    def __init__(self, num_groups: int, num_slots: int, width: int) -> None:
        self._shape = (num_groups, num_slots, width)
        self._blocks: dict[int, int] = {}

    def add(self, plan: Plan) -> None:
        if not plan.table_slots:
            return
        groups, slots, indices, blocks = (
            column(values) for values in (plan.table_groups, plan.table_slots, plan.table_indices, plan.table_blocks)
        )
        places = np.ravel_multi_index((groups, slots, indices), self._shape)
        self._blocks.update(zip(places.tolist(), blocks.tolist(), strict=True))

    def fill(self, changes: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
        """Yields the changes that do not fit, to be written first."""
        entries = iter(self._blocks.items())
        _write(changes, list(islice(entries, MAX_TABLE_CHANGES)))
        while more := list(islice(entries, MAX_TABLE_CHANGES)):
            yield _write(np.zeros_like(changes), more)

    def clear(self) -> None:
        self._blocks.clear()


def _write(changes: NDArray[np.int32], entries: list[tuple[int, int]]) -> NDArray[np.int32]:
    changes[0] = len(entries)
    if entries:
        first = 1 + MAX_TABLE_CHANGES
        changes[1 : 1 + len(entries)], changes[first : first + len(entries)] = np.array(entries, dtype=np.int64).T
    return changes
