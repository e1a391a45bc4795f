"""Tests whole steps of a device's runner over Triton's kernels and choice: the plain runner's tokens, prompts and decoding rows mixed.

As `test_equivalence.py`, these run on a GPU by themselves, with graphs, and without one in the process of `test_interpreter.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from device_kit import HostLaunches
from runner_kit import ADAPTER_RANK, CONTEXT, Planner, adapted, load_decoder, make_runner, random_adapter, row_tokens, save_tiny_llama

from headrace.core.sampling import SamplingParams
from headrace.engine.runner.device.adapters import DevicePlaces
from headrace.engine.runner.device.runner import DeviceRunner
from headrace.engine.steps import Runner
from headrace.tensor.batch import allocate_kv
from headrace.tensor.device import CPU, CUDA
from headrace.tensor.kernels import Backend
from headrace.tensor.kernels.gpu.adapters import TritonAdapters
from headrace.tensor.kernels.gpu.backend import TritonKernels
from headrace.tensor.kernels.gpu.choice import TritonChoice
from headrace.tensor.kernels.gpu.linears import TritonPacking
from headrace.tensor.kernels.gpu.tuning import read_tuning
from headrace.tensor.launches import EagerLaunches
from headrace.tensor.models import load_model

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.pure if IS_INTERPRETED else pytest.mark.process,  # compiling starts programs
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # the interpreter computes both sides of a choice
]

PARAMS = (
    SamplingParams(temperature=0.0, seed=0, presence_penalty=0.5, logprobs=2),
    SamplingParams(temperature=0.9, seed=5, min_p=0.01),
    SamplingParams(temperature=0.0, seed=0),
)
PLACE_OF = {0: 0, 1: 0, 2: 2}
"""Of the third prompt's adapter: steps without adapters come first, then prompts with them, then rows that decode."""
PROMPTS = ([5, 6, 7, 8, 9], [40, 3], [20, 21, 22, 23, 24, 25, 26])


class NotRunWhenCaptured(HostLaunches):
    """Under the interpreter all kinds of choice would take long."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        return body


def make_triton_runner(folder: Path, *, is_eager: bool) -> DeviceRunner:
    """With two adapters."""
    device, tuning = CPU if IS_INTERPRETED else CUDA, read_tuning()
    adapters = TritonAdapters(device.name)
    backend = Backend(name="triton", kernels=TritonKernels(tuning), packing=TritonPacking(tuning), adapters=adapters)
    loaded = load_model(
        folder, backend=backend, dtype=torch.float32, device=device, load_format="auto", seed=0, max_model_len=None, enable_lora=True
    )
    model = loaded.model
    resident = (None, *(random_adapter(model, seed) for seed in (1, 2)))
    kv = allocate_kv(model.kv_shapes, model.group_of, (32,), 4, torch.float32, device)
    launches = device.make_launches() or NotRunWhenCaptured()
    launches = EagerLaunches(launches) if is_eager else launches
    runner = DeviceRunner(
        model, kv, TritonChoice(), launches, max_num_seqs=4, most_tokens=32, max_model_len=CONTEXT, device=device.name, eos_token_ids=(2,),
        places=DevicePlaces(lambda: resident, ADAPTER_RANK),
    )  # fmt: skip
    runner.capture()
    return runner


def tokens_of(runner: Runner, place_of: dict[int, int]) -> list[list[list[int]]]:
    """Two prompts, then a third one beside them, then all decode; two plans at a time are in flight."""
    planner = Planner()
    for slot in (0, 1):
        planner.start(slot, PROMPTS[slot], PARAMS[slot])
    plans = [adapted(planner, place_of, *((slot, 0, len(PROMPTS[slot]), 1) for slot in (0, 1)))]
    planner.start(2, PROMPTS[2], PARAMS[2])
    plans.append(adapted(planner, place_of, (0, 5, 1, 1), (1, 2, 1, 1), (2, 0, 7, 1)))
    plans += [adapted(planner, place_of, (0, 6 + n, 1, 1), (1, 3 + n, 1, 1), (2, 7 + n, 1, 1)) for n in range(3)]
    tickets, tokens = [runner.submit(plans[0])], []
    for plan in plans[1:]:
        tickets.append(runner.submit(plan))
        tokens.append(row_tokens(tickets.pop(0).result()))
    return [*tokens, row_tokens(tickets.pop().result())]


@pytest.mark.parametrize("is_eager", [False] if IS_INTERPRETED else [False, True])
def test_whole_steps_give_the_plain_runners_tokens(is_eager: bool, tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path)
    decoder = load_decoder(folder, enable_lora=True)
    resident = (None, *(random_adapter(decoder, seed) for seed in (1, 2)))
    plain = partial(make_runner, decoder, resident=lambda: resident)
    tokens = tokens_of(make_triton_runner(folder, is_eager=is_eager), PLACE_OF)
    assert tokens == tokens_of(plain(), PLACE_OF)
    assert tokens != tokens_of(plain(), dict.fromkeys(PLACE_OF, 0))
