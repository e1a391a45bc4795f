"""Tests two stages of a model over Triton's kernels, each with memory of its own, against the whole model: the same bits.

As `test_whole_steps.py`, on a GPU by itself, and without one in the process of `test_interpreter.py`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from rank_kit import Ranks
from runner_kit import save_tiny_llama

from headrace.core.parallelism import Parallelism, Place
from headrace.engine.ranks.frames import HEADER, StepLimits, batch_on, read_step, step_frame
from headrace.tensor.batch import ForwardBatch, GroupBatch, allocate_kv
from headrace.tensor.device import CPU, CUDA
from headrace.tensor.kernels import Backend
from headrace.tensor.kernels.gpu.backend import TritonKernels
from headrace.tensor.kernels.gpu.linears import TritonPacking
from headrace.tensor.kernels.gpu.tuning import read_tuning
from headrace.tensor.models import LoadedModel, load_model
from headrace.tensor.peers import NoPeers

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.pure if IS_INTERPRETED else pytest.mark.process,  # compiling starts programs
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # the interpreter computes both sides of a choice
]
LIMITS = StepLimits(max_tokens=16, max_rows=4, table_width=2, num_groups=1)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step() -> tuple[Tensor, ForwardBatch]:
    """A prompt of five tokens beside one of two, of each of which the last hidden state is wanted."""
    group = GroupBatch(ints(1, 2, 3, 0).view(2, 2), torch.tensor([4, 5, 6, 7, 8, 12, 13]))
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    batch = ForwardBatch(positions, ints(0, 5, 7), ints(5, 2), max_count=5, groups=(group,), selected=torch.tensor([4, 6]))
    return torch.tensor([5, 6, 7, 8, 9, 40, 3]), batch


def take_card(place: Place) -> None:
    """Each stage has a card of its own where two are found. The current card is the thread's."""
    if not IS_INTERPRETED:
        torch.cuda.set_device(place.stage % torch.cuda.device_count())


def test_stages_have_the_bits_of_the_whole_model(tmp_path: Path) -> None:
    device, tuning = CPU if IS_INTERPRETED else CUDA, read_tuning()
    backend = Backend(name="triton", kernels=TritonKernels(tuning), packing=TritonPacking(tuning))
    load = partial(
        load_model,
        save_tiny_llama(tmp_path),
        backend=backend,
        dtype=torch.float32,
        device=device,
        load_format="auto",
        seed=0,
        max_model_len=None,
    )

    def load_on_card(*, place: Place, peers: NoPeers) -> LoadedModel:
        take_card(place)
        return load(place=place, peers=peers)

    sent = bytearray(step_frame(*step())[HEADER.size :])

    def compute(loaded: LoadedModel) -> Tensor:
        """As a member does with what it is sent."""
        model, (ids, batch) = loaded.model, read_step(sent, LIMITS, {})
        take_card(model.place)
        kv = allocate_kv(model.kv_shapes, model.group_of, (8,), 4, torch.float32, device)
        hidden = model.forward(ids.to(device.name), batch_on(device.name, batch), kv)
        return model.logits(hidden).cpu() if model.place.is_last else hidden.cpu()

    last, first = Ranks(Parallelism(pp=2), load_on_card).run(compute)
    assert torch.equal(last, compute(load()))
    assert len(first) == 0
