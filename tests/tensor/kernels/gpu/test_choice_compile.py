"""Tests choosing tokens, compiled ahead of time for A100 and H100 in every kind of choice; nothing waits for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from ahead_of_time import compiling_for

from headrace.tensor.kernels.choice import CHOICE_KINDS, MAX_TABLE_CHANGES, NUM_FIELDS, RowTensors, SlotTensors
from headrace.tensor.kernels.gpu.choice import TritonChoice

pytestmark = [pytest.mark.slow, pytest.mark.process]

MAX_ROWS, VOCAB, NUM_ENDS, BLOCK_SIZE = 64, 128256, 66, 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kind_of_choice_compiles_and_fits_the_registers(tmp_path: Path, capability: int, dtype: torch.dtype) -> None:
    choice, slots = TritonChoice(), SlotTensors.zeros(MAX_ROWS, (2, 513), VOCAB, NUM_ENDS, "meta")
    rows, logits = RowTensors.zeros(MAX_ROWS, VOCAB, "meta"), torch.empty((MAX_ROWS, VOCAB), dtype=dtype, device="meta")
    fields = torch.empty((NUM_FIELDS, MAX_ROWS), dtype=torch.int32, device="meta")
    with compiling_for(capability, tmp_path) as compiled:
        choice.write_tables(slots.tables, torch.empty(1 + 2 * MAX_TABLE_CHANGES, dtype=torch.int32, device="meta"))
        for count in (1, 3, 16, MAX_ROWS):
            choice.decode_rows(fields[:, :count], slots, BLOCK_SIZE)
            for kind in CHOICE_KINDS:
                choice.choose(logits[:count], fields[:, :count], slots, rows, kind)
    assert len({kernel.name for kernel in compiled}) == 11
    assert not [kernel for kernel in compiled if kernel.local_bytes]
