"""The tensors of a device's steps, at addresses that captured graphs know, and what is enqueued over them.

What a step's rows are, and when they may be computed, is `runner_device`'s. Every method enqueues and returns at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.runner_batch import Upload
from headrace.engine.runner_graphs import StepGraphs
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
from headrace.tensor.kernels.masks import Words
from headrace.tensor.launches import Launches, Mark, pinned, upload_together


class DeviceModel(Protocol):
    """What a device's steps need of a loaded model; `tensor.models.decoder.DecoderModel` is one. activations: the dtype of the head's."""

    vocab_size: int
    activations: torch.dtype

    def forward(self, ids: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """As `runner.Model.forward`. Rows of one token are computed without waiting for the device, so that this can be captured."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [N, E] -> logits [N, V], a new tensor."""
        ...


@dataclass(frozen=True, slots=True)
class HostInputs:
    """One step's inputs in pinned memory.

    fields   [NUM_FIELDS, N], padding rows at first
    changes  of block tables, none at first; see `DeviceChoice.write_tables`
    """

    buffer: Tensor
    fields: NDArray[np.int32]
    changes: NDArray[np.int32]


class Choices(NamedTuple):
    """What a step chose, [NUM_CHOSEN or 1, B] in host memory, valid once the device has reached the mark."""

    chosen: Tensor
    mark: Mark


class DeviceSteps:
    """Enqueues the parts of steps.

    slots        what the device holds by slot
    table_shape  (KV groups, blocks of the longest sequence)
    """

    def __init__(
        self, model: DeviceModel, kv: KvCache, choice: DeviceChoice, launches: Launches, *, max_num_seqs: int, table_shape: tuple[int, int],
        max_ends: int, device: str,
    ) -> None:  # fmt: skip
        self.model, self.kv = model, kv
        self.upload: Upload = partial(upload_together, device=device, launches=launches)
        self._choice, self._launches = choice, launches
        self._num_rows = max_num_seqs
        with torch.inference_mode():
            self.slots = SlotTensors.zeros(max_num_seqs, table_shape, model.vocab_size, max_ends, device)
            self._rows = RowTensors.zeros(max_num_seqs, model.vocab_size, model.activations, device)
            self._row_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
            num_field_values = NUM_FIELDS * max_num_seqs
            self._inputs = torch.zeros(num_field_values + 1 + 2 * MAX_TABLE_CHANGES, dtype=torch.int32, device=device)
            self._fields = self._inputs[:num_field_values].view(NUM_FIELDS, max_num_seqs)
            self._changes = self._inputs[num_field_values:]
        self._padding = np.array([_bits(field) for field in Field], dtype=np.int32)[:, None]
        self._padding[[Field.ROW_SLOT, Field.SLOT]] = max_num_seqs
        self._graphs = StepGraphs(launches, max_num_seqs, self._decode, self._choose)

    def capture(self) -> None:
        """Capture what is replayed. Only padding rows are computed."""
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
        """Replace the step's inputs."""
        self._inputs.copy_(inputs.buffer, non_blocking=True)

    def send_masks(self, words: Words) -> None:
        """words [M, ceil(V / 32)]: the step's grammar masks."""
        if len(words):
            self._rows.masks[: len(words)] = self.upload([words.view(np.int32)])[0]

    def write_tables(self, changes: Tensor | None = None) -> None:
        """Write block-table entries: by default those of the step's inputs, which `decode` writes itself."""
        self._choice.write_tables(self.slots.tables, self._changes if changes is None else changes)

    def decode(self, count: int) -> None:
        """Compute the first `count` rows of the inputs: one token each, its logits to the same row."""
        self._graphs.decode(count)

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states of any batch; it is not captured."""
        return self.model.forward(ids, batch, self.kv)

    def put_logits(self, hidden: Tensor, first: int) -> None:
        """Logits of hidden [N, E] to the rows from `first` on."""
        self._rows.logits[first : first + len(hidden)] = self.model.head(hidden)

    def choose(self, count: int, kind: ChoiceKind) -> None:
        """Choose the tokens of the first `count` rows."""
        self._graphs.choose(count, kind)

    def read(self, count: int, *, is_reported: bool) -> Choices:
        """Copy what was chosen for the first `count` rows to the host."""
        size = NUM_CHOSEN if is_reported else 1
        chosen = pinned((size, count), torch.int32, self._launches)
        chosen.copy_(self._rows.chosen[:size, :count], non_blocking=True)
        return Choices(chosen, self._launches.mark())

    def _decode(self, size: int) -> None:
        """A forward pass over `size` rows of the inputs; the body of a graph."""
        self.write_tables()
        fields = self._fields[:, :size]
        rows = self._choice.decode_rows(fields, self.slots, self.kv.block_size)
        groups = tuple(GroupBatch(table, mapping) for table, mapping in zip(rows.block_tables, rows.slot_mappings, strict=True))
        batch = ForwardBatch(rows.positions, self._row_starts[: size + 1], fields[Field.CONTEXT], 1, groups, num_decodes=size)
        self.put_logits(self.forward(rows.ids, batch), 0)

    def _choose(self, size: int, kind: ChoiceKind) -> None:
        self._choice.choose(self._fields[:, :size], self.slots, self._rows, kind)


def _bits(field: Field) -> Any:
    """A padding row's value of the field, as int32."""
    return np.float32(PADDING[field]).view(np.int32) if field in FLOATS else PADDING[field]
