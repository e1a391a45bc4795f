"""Builds a `DeviceRunner` where there is no device: the plain choice on the host's tensors, and captures that call what they captured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from plain_choice import PlainChoice
from runner_kit import CONTEXT

from headrace.engine.runner.device.adapters import NO_PLACES, DevicePlaces
from headrace.engine.runner.device.runner import DeviceRunner
from headrace.engine.runner.device.steps import DeviceModel
from headrace.engine.runner.masks import MaskSource
from headrace.tensor.batch import allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.launches import Launches
from headrace.tensor.models.decoder import DecoderModel


class _Reached:
    def synchronize(self) -> None:
        pass


class HostLaunches:
    """Implements `tensor.launches.Launches`. captured: how many bodies were."""

    pins = False

    def __init__(self) -> None:
        self.captured = 0

    def mark(self) -> _Reached:
        return _Reached()

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        body()
        return body

    def is_lost(self, error: Exception) -> bool:
        return isinstance(error, torch.AcceleratorError)


def make_device_runner(
    decoder: DecoderModel,
    *,
    model: DeviceModel | None = None,
    block_size: int = 4,
    num_blocks: int = 64,
    slots: int = 8,
    most_tokens: int = 64,
    masks: MaskSource | None = None,
    launches: Launches | None = None,
    places: DevicePlaces = NO_PLACES,
) -> DeviceRunner:
    """As `runner_kit.make_runner`, captured."""
    kv = allocate_kv(decoder.kv_shapes, decoder.group_of, (num_blocks,), block_size, torch.float32, CPU)
    runner = DeviceRunner(
        model or decoder, kv, PlainChoice(), launches or HostLaunches(), max_num_seqs=slots, most_tokens=most_tokens, max_model_len=CONTEXT,
        device="cpu", eos_token_ids=(2,), masks=masks, places=places,
    )  # fmt: skip
    runner.capture()
    return runner
