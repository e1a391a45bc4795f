"""How a model's layers are run for a step: as they are called, or put off by the backend's `StepExecutor` and recorded.

A decode step asks for the same operations every time; only token ids, positions, block tables and lengths differ. So these are written
into tensors of their own, the step that reads them is recorded once per shape, and the next of its shape is a few copies and one call.
The plain twin is no executor: calling the layers.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.tensor.batch import ForwardBatch, GroupBatch, KvCache
from headrace.tensor.kernels import Recording, StepExecutor

MOST_KEPT = 32
"""Shapes that are kept: under load the number of sequences goes up and down with every arrival."""
LARGEST_KEPT = 4
"""So many of the largest size there is (`StepExecutor.max_recorded_bytes`) may be among them; the one used longest ago goes first."""
TABLE_MULTIPLE = 64
"""Block tables are recorded with room to grow, so that a new block does not mean a new recording."""

Layers = Callable[[Tensor, Tensor, ForwardBatch, KvCache], Tensor]
"""(branch, residual, batch, cache) -> hidden."""


class RecordedSteps:
    """The steps of one model. executor: None where there is none, or where a layer does not say that it may be deferred."""

    def __init__(self, executor: StepExecutor | None, layers: Layers) -> None:
        self._executor, self._layers = executor, layers
        self._kept: OrderedDict[tuple[object, ...], _Step] = OrderedDict()
        self._most_tokens = sys.maxsize

    @property
    def most_bytes(self) -> int:
        """Of results that are kept, and of one recording more: what a longer block table replaces is there until its successor is made."""
        return 0 if self._executor is None else (LARGEST_KEPT + 1) * self._executor.max_recorded_bytes

    @property
    def num_recorded(self) -> int:
        return len(self._kept)

    def next_layer(self) -> None:
        """The layers say where one begins."""
        if self._executor is not None:
            self._executor.next_layer()

    def run(self, branch: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """The layers' result, a new tensor. branch may be written over."""
        if self._executor is None:
            return self._layers(branch, torch.zeros_like(branch), batch, kv)
        recording = self._executor.recording(batch.num_tokens) if self._is_repeatable(batch) else None
        if recording is not None:
            return self._repeat(recording, branch, batch, kv)
        residual = torch.zeros_like(branch)
        with self._executor.together(batch.num_tokens):
            return self._layers(branch, residual, batch, kv)

    def _is_repeatable(self, batch: ForwardBatch) -> bool:
        is_plain = batch.adapter_slots is None and batch.selected is None
        return batch.max_count == 1 and batch.num_tokens <= self._most_tokens and is_plain

    def _repeat(self, recording: AbstractContextManager[Recording], branch: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """A recorded step of this shape, or this one recorded with `recording`."""
        key = (len(batch.context_lens), batch.num_tokens, id(kv))
        step = self._kept.pop(key, None)
        if step is None or not step.load(branch, batch) or not step.recording.repeat():
            inputs = _Inputs.of(branch, batch)
            with recording as recorded:
                out = self._layers(inputs.branch, inputs.residual, inputs.batch, kv)
            step = _Step(inputs, recorded, out, kv)
        if step.recording.is_whole:
            self._kept[key] = step
            self._forget()
        else:  # and neither would be a larger one
            self._most_tokens = batch.num_tokens - 1
        return step.out.clone()

    def _forget(self) -> None:
        assert self._executor is not None
        most = LARGEST_KEPT * self._executor.max_recorded_bytes
        held = sum(step.recording.kept_bytes for step in self._kept.values())
        while len(self._kept) > MOST_KEPT or held > most:
            held -= self._kept.popitem(last=False)[1].recording.kept_bytes


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Tensors that a recorded step reads: copies of a step's, of its size or with room to grow."""

    branch: Tensor
    residual: Tensor
    batch: ForwardBatch

    @classmethod
    def of(cls, branch: Tensor, batch: ForwardBatch) -> _Inputs:
        with torch.inference_mode(False):  # such tensors may be written in any mode
            groups = tuple(GroupBatch(_roomy(group.block_table), _copied(group.slot_mapping)) for group in batch.groups)
            positions, starts, lens = _copied(batch.positions), _copied(batch.row_starts), _copied(batch.context_lens)
            own = ForwardBatch(positions, starts, lens, batch.max_count, groups)
            return cls(_copied(branch), torch.zeros(branch.shape, dtype=branch.dtype), own)

    def load(self, branch: Tensor, batch: ForwardBatch) -> bool:
        """Write another step's values. False where a block table has outgrown its room."""
        mine = self.batch
        for own, group in zip(mine.groups, batch.groups, strict=True):
            width = group.block_table.shape[1]
            if width > own.block_table.shape[1]:
                return False
            own.block_table[:, :width] = group.block_table
            own.slot_mapping.copy_(group.slot_mapping)
        mine.positions.copy_(batch.positions)
        mine.row_starts.copy_(batch.row_starts)
        mine.context_lens.copy_(batch.context_lens)
        self.branch.copy_(branch)
        self.residual.zero_()
        return True


@dataclass(frozen=True, slots=True)
class _Step:
    """kv is held so that no other cache can take its place in memory."""

    inputs: _Inputs
    recording: Recording
    out: Tensor
    kv: KvCache

    def load(self, branch: Tensor, batch: ForwardBatch) -> bool:
        return self.inputs.load(branch, batch)


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _roomy(table: Tensor) -> Tensor:
    rows, width = table.shape
    room = torch.zeros((rows, -(-(width + 1) // TABLE_MULTIPLE) * TABLE_MULTIPLE), dtype=table.dtype)
    room[:, :width] = table
    return room
