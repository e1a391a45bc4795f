"""Keeps what a device's steps read of adapters at fixed addresses: where the resident adapters are, and the places of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from headrace.engine.runner.batch import Resident, Rows
from headrace.engine.runner.device.graphs import PromptSize
from headrace.tensor.batch import DeviceAdapter, StepAdapters
from headrace.tensor.launches import Launches, pinned


@dataclass(frozen=True, slots=True)
class DevicePlaces:
    """resident: what is in the places now, of the same length at each call. max_rank: the largest rank of an adapter there"""

    resident: Callable[[], Resident]
    max_rank: int


NO_PLACES = DevicePlaces(tuple, 0)


class AdapterInputs:
    """Captured passes read views of one buffer, which is written by one copy before the launch of a step with adapters."""

    def __init__(self, places: DevicePlaces, max_rows: int, largest: PromptSize, launches: Launches, device: str) -> None:
        self._places, self._launches = places, launches
        self._sizes = [2 * len(places.resident()), max_rows, largest.tokens, largest.rows]
        self._buffer = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        addresses, self._decodes, self._tokens, self._last = torch.split(self._buffer, self._sizes)
        self._addresses = addresses.view(torch.int64)

    def send(self, resident: Resident, decodes: Rows, prompts: Rows) -> None:
        """Prompts beyond the largest captured size are not sent: their batch brings the places of its tokens (`placed`)."""
        buffer = pinned(tuple(self._buffer.shape), torch.int32, self._launches)
        host = buffer.numpy()
        host[:] = 0
        addresses, of_decodes, of_tokens, of_last = np.split(host, list(accumulate(self._sizes))[:-1])
        addresses.view(np.int64)[:] = [each.address if isinstance(each, DeviceAdapter) else 0 for each in resident]
        of_decodes[: len(decodes.slots)] = decodes.adapters
        if prompts.row_starts[-1] <= len(of_tokens):
            of_tokens[: prompts.row_starts[-1]] = np.repeat(prompts.adapters, prompts.counts)
            last = prompts.adapters[prompts.samples > 0][: len(of_last)]
            of_last[: len(last)] = last
        self._buffer.copy_(buffer, non_blocking=True)

    def of_decodes(self, count: int) -> StepAdapters:
        return self.placed(StepAdapters(self._decodes[:count], self._places.resident()))

    def of_prompts(self, size: PromptSize) -> StepAdapters:
        return self.placed(StepAdapters(self._tokens[: size.tokens], self._places.resident(), self._last[: size.rows]))

    def placed(self, adapters: StepAdapters) -> StepAdapters:
        return replace(adapters, addresses=self._addresses, max_rank=self._places.max_rank)
