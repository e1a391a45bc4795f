"""Runs a model's layers for a step: at once, deferred by the backend's `StepExecutor`, or recorded and replayed.

Steps of one number of tokens run the same operations on other token ids, positions, block tables and lengths. These are copied into input
tensors that stay in place; the next step of that number is a few copies and one call, as with CUDA graphs.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.tensor.batch import ForwardBatch, GroupBatch, KvCache
from headrace.tensor.kernels import Recording, StepExecutor

MAX_SHAPES = 32
"""Under load the number of sequences, and with it the shape of a step, changes with every arrival."""
MAX_RAGGED_TOKENS = 32
"""Steps of rows with several tokens (drafts, or a short prompt beside many decodes) are recorded up to this number, so that they are at
most MAX_SHAPES by themselves. A prompt's step wants few of its hidden states, and is not recorded. What is saved, the launches, is the
same for any number of tokens, so that it matters less the more there are. Tokens are not padded: one costs what its launches would."""
MAX_LARGEST = 4
"""Memory limit of all recorded steps, in units of the largest possible step (`StepExecutor.max_recorded_bytes`). Beyond it the least
recently used step is dropped first."""
TABLE_MULTIPLE = 64
"""Blocks. Recorded block tables are as wide as a multiple of it, so that a new block rarely needs a new recording."""

Layers = Callable[[Tensor, Tensor, ForwardBatch, KvCache], tuple[Tensor, ...]]
"""(branch, residual, batch, cache) -> (hidden states,), or (branch, residual) for the next stage."""


class RecordedSteps:
    """executor: None where the backend has no executor, or where a layer must not be deferred."""

    def __init__(self, executor: StepExecutor | None, layers: Layers) -> None:
        self._executor, self._layers = executor, layers
        self._kept: OrderedDict[tuple[object, ...], _Step] = OrderedDict()
        self._most_tokens = {False: sys.maxsize, True: sys.maxsize}  # True: of steps with adapters

    @property
    def most_bytes(self) -> int:
        """One step more is counted: a replaced step is dropped after its successor was recorded."""
        return 0 if self._executor is None else (MAX_LARGEST + 1) * self._executor.max_recorded_bytes

    def forget(self) -> None:
        self._kept.clear()

    def next_layer(self) -> None:
        """Called by the model before each layer."""
        if self._executor is not None:
            self._executor.next_layer()

    def run(self, branch: Tensor, residual: Tensor, batch: ForwardBatch, kv: KvCache) -> tuple[Tensor, ...]:
        """Returns what the layers do, in tensors that no later step overwrites. `branch` and `residual` may be overwritten."""
        if self._executor is None:
            return self._layers(branch, residual, batch, kv)
        recording = self._executor.recording(batch.num_tokens) if self._is_replayable(batch) else None
        if recording is not None:
            return self._replay(recording, branch, residual, batch, kv)
        with self._executor.deferred(batch.num_tokens):
            return self._layers(branch, residual, batch, kv)

    def _is_replayable(self, batch: ForwardBatch) -> bool:
        most = self._most_tokens[batch.adapters is not None]
        return batch.selected is None and batch.num_tokens <= (most if batch.max_count == 1 else min(most, MAX_RAGGED_TOKENS))

    def _replay(
        self, recording: AbstractContextManager[Recording], branch: Tensor, residual: Tensor, batch: ForwardBatch, kv: KvCache
    ) -> tuple[Tensor, ...]:
        key = (batch.num_tokens, id(kv), batch.adapters is None)
        step = self._kept.pop(key, None)
        if step is None or not step.inputs.load(branch, residual, batch) or not step.recording.replay():
            inputs = _Inputs.of(branch, residual, batch)
            with recording as recorded:
                out = self._layers(inputs.branch, inputs.residual, inputs.batch, kv)
            step = _Step(inputs, recorded, out, kv)
        step.inputs.drop_adapters()
        if step.recording.is_whole:
            self._kept[key] = step
            self._keep_within()
        else:  # a larger step cannot be recorded whole either
            self._most_tokens[batch.adapters is not None] = batch.num_tokens - 1
        return tuple(out.clone() for out in step.out)

    def _keep_within(self) -> None:
        assert self._executor is not None
        most = MAX_LARGEST * self._executor.max_recorded_bytes
        held = sum(step.recording.kept_bytes for step in self._kept.values())
        while len(self._kept) > MAX_SHAPES or held > most:
            held -= self._kept.popitem(last=False)[1].recording.kept_bytes


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Copies of the first step's inputs, with wider block tables and as many rows as tokens."""

    branch: Tensor
    residual: Tensor
    batch: ForwardBatch

    @classmethod
    def of(cls, branch: Tensor, residual: Tensor, batch: ForwardBatch) -> _Inputs:
        num_rows = batch.num_tokens
        with torch.inference_mode(False):  # so that they may be written in any mode later
            groups = tuple(GroupBatch(_widened(group.block_table, num_rows), _like(group.slot_mapping)) for group in batch.groups)
            starts, lens = batch.row_starts.new_empty(num_rows + 1), batch.context_lens.new_empty(num_rows)
            adapters = None if batch.adapters is None else replace(batch.adapters, slots=_like(batch.adapters.slots), selected_slots=None)
            own = ForwardBatch(_like(batch.positions), starts, lens, batch.max_count, groups, adapters)
            inputs = cls(_like(branch), _like(residual), own)
        assert inputs.load(branch, residual, batch)
        return inputs

    def load(self, branch: Tensor, residual: Tensor, batch: ForwardBatch) -> bool:
        mine, num_rows = self.batch, len(batch.context_lens)
        for own, group in zip(mine.groups, batch.groups, strict=True):
            width = group.block_table.shape[1]
            if width > own.block_table.shape[1]:
                return False
            own.block_table[:num_rows, :width] = group.block_table
            own.slot_mapping.copy_(group.slot_mapping)
        mine.positions.copy_(batch.positions)
        mine.row_starts[: num_rows + 1] = batch.row_starts
        mine.row_starts[num_rows + 1 :] = batch.num_tokens
        mine.context_lens[:num_rows] = batch.context_lens
        mine.context_lens[num_rows:] = 0
        if mine.adapters is not None and batch.adapters is not None:
            mine.adapters.slots.copy_(batch.adapters.slots)
            mine.adapters.resident = batch.adapters.resident
        self.branch.copy_(branch)
        self.residual.copy_(residual)
        return True

    def drop_adapters(self) -> None:
        """A recorded step is kept for long, and must not keep adapters that have left the pool."""
        if self.batch.adapters is not None:
            self.batch.adapters.resident = ()


@dataclass(frozen=True, slots=True)
class _Step:
    """kv: held so that no other cache can take its address."""

    inputs: _Inputs
    recording: Recording
    out: tuple[Tensor, ...]
    kv: KvCache


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _widened(table: Tensor, num_rows: int) -> Tensor:
    return table.new_zeros((num_rows, -(-(table.shape[1] + 1) // TABLE_MULTIPLE) * TABLE_MULTIPLE))
