"""Protocols for work on an asynchronous device such as a GPU: copies from pinned memory, events (`Mark`), and captured graphs.

All work is enqueued in order on the current stream of the calling thread. Only `Mark.synchronize` waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16


class Mark(Protocol):
    """A point in the device's queue."""

    def synchronize(self) -> None:
        """Raises RuntimeError when a kernel launched before has failed."""
        ...


class Launches(Protocol):
    """pins: whether host memory must be pinned for copies beside which the host goes on."""

    pins: bool

    def mark(self) -> Mark:
        """The end of what has been enqueued so far."""
        ...

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Enqueue what `body` enqueues, and return what enqueues it again.

        Memory that `body` allocates is shared by all that is captured, so a result that is to last is written into a tensor made before.
        """
        ...

    def is_lost(self, error: Exception) -> bool:
        """Whether the device itself failed, so that nothing of it can be trusted any more."""
        ...


class CudaLaunches:
    """Captured work is a CUDA graph; all graphs share one memory pool, since one runs after the other."""

    pins = True

    def __init__(self) -> None:
        self._stream: Any = None
        self._pool: Any = None

    def mark(self) -> Mark:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event  # type: ignore[no-any-return]

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """`body` runs once before it is captured, since a capture may neither compile nor load a kernel."""
        if self._stream is None:  # one for all: a library keeps working memory for each stream
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()
            stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            except BaseException:
                with suppress(Exception):  # it complains of the body's error a second time
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._pool = self._pool or graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay

    def is_lost(self, error: Exception) -> bool:
        """Triton reports a failed device by a plain RuntimeError. Its errors of resources are of a launch alone."""
        text = str(error)
        if isinstance(error, torch.AcceleratorError):
            return "out of memory" not in text
        return isinstance(error, RuntimeError) and "Triton Error [CUDA]" in text and "out of " not in text


class EagerLaunches:
    """Without captures: what is to be enqueued again is launched kernel by kernel."""

    def __init__(self, launches: Launches) -> None:
        self.pins, self.mark, self.is_lost = launches.pins, launches.mark, launches.is_lost

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        body()
        return body


def pinned(shape: tuple[int, ...], dtype: torch.dtype, launches: Launches) -> Tensor:
    """Host memory, not written yet, for one copy to or from the device: it may be dropped as soon as the copy is enqueued."""
    return torch.empty(shape, dtype=dtype, pin_memory=launches.pins)


def upload_together(arrays: Sequence[NDArray[Any]], device: str, launches: Launches) -> list[Tensor]:
    """Copy arrays to the device in one copy beside which the host goes on. Returns a tensor for each, of its dtype and shape."""
    starts = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]).tolist()
    buffer = pinned((starts[-1],), torch.uint8, launches)
    host = buffer.numpy()
    for array, start in zip(arrays, starts, strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    copied = buffer.to(device, non_blocking=True)
    return [
        copied[start : start + array.nbytes].view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]
