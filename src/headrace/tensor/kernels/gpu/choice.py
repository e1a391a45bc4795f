"""Sampling on the GPU: implements `DeviceChoice` with the Triton kernels of `choice_edits`, `choice_filters` and `choice_logprobs`.

The reference implementation is `kernels.plain_choice`; tests/tensor/kernels/gpu/test_choice.py compares the two. Sums over the vocabulary
are made in another order than on the host, and in single precision. A random number that falls on the border between two tokens may
therefore choose the other token.
"""

from __future__ import annotations

from torch import Tensor

from headrace.tensor.kernels.choice import ChoiceKind, DecodeRows, RowTensors, SlotTensors
from headrace.tensor.kernels.gpu import choice_edits, choice_filters, choice_inputs, choice_logprobs


class TritonChoice:
    """Implements `DeviceChoice`; holds no state."""

    def write_tables(self, tables: Tensor, changes: Tensor) -> None:
        choice_inputs.write_tables(tables, changes)

    def decode_rows(self, fields: Tensor, slots: SlotTensors, block_size: int) -> DecodeRows:
        return choice_inputs.decode_rows(fields, slots, block_size)

    def choose(self, logits: Tensor, fields: Tensor, slots: SlotTensors, rows: RowTensors, kind: ChoiceKind) -> None:
        chosen = rows.chosen[:, : fields.shape[1]]
        choice_filters.choose(choice_edits.edit(logits, fields, slots, rows) if kind.edited else logits, fields, slots, chosen, kind)
        if kind.reported:
            choice_logprobs.report(logits, fields, chosen)
