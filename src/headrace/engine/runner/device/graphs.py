"""Captures the parts of a step as graphs: forward passes over rows of one token, forward passes over prompts, and the choice of tokens.

A forward pass is captured for each padded number of rows or tokens, and the choice for each padded number of rows and kind. They are
captured apart for two reasons: a kind of choice needs no capture of the whole model, and a step with prompts replays the pass of its other
rows. The choice begins with the model's head, which so reads its weights once for the rows of both passes.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

from headrace.engine.runner.device.prompts import PromptSize
from headrace.tensor.kernels.choice import CHOICE_KINDS, ChoiceKind
from headrace.tensor.launches import Launches

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Numbers of rows that are captured, up to the engine's most. A step is padded to the next."""

LOG_INTERVAL_S = 5.0
"""Seconds between two lines of progress."""


class StepGraphs:
    """The captured graphs of steps. prompts, decode, choose: enqueue a pass over prompts, one over rows of one token, the choice"""

    def __init__(
        self,
        launches: Launches,
        prompt_sizes: list[PromptSize],
        max_rows: int,
        prompts: Callable[[PromptSize], None],
        decode: Callable[[int], None],
        choose: Callable[[int, ChoiceKind], None],
    ) -> None:
        """prompt_sizes: ascending."""
        self.prompt_sizes = prompt_sizes
        self._launches, self._prompts, self._decode, self._choose = launches, prompts, decode, choose
        self._sizes = [size for size in SIZES if size < max_rows] + [max_rows]
        self._captured: dict[object, Callable[[], None]] = {}

    def capture(self) -> None:
        """Capture all sizes, the largest first, so that smaller ones use its memory. Logs progress."""
        began = logged = time.perf_counter()
        bodies: dict[object, Callable[[], None]] = {size: lambda size=size: self._prompts(size) for size in reversed(self.prompt_sizes)}  # type: ignore[misc]
        for size in reversed(self._sizes):
            bodies[size] = lambda size=size: self._decode(size)  # type: ignore[misc]
            for kind in CHOICE_KINDS:
                bodies[size, kind] = lambda size=size, kind=kind: self._choose(size, kind)  # type: ignore[misc]
        for key, body in bodies.items():
            self._captured[key] = self._launches.capture(body)
            if (now := time.perf_counter()) - logged >= LOG_INTERVAL_S:
                logged = now
                log.info("prepared %d of %d parts of steps in %.0f s", len(self._captured), len(bodies), now - began)
        most = self.prompt_sizes[-1].tokens
        log.info("prepared %d parts of steps, of %d rows and %d prompt tokens at most, in %.1f s", len(bodies), max(self._sizes), most,
                 time.perf_counter() - began)  # fmt: skip

    def decode(self, count: int) -> None:
        """Enqueue the forward pass of `count` rows."""
        self._captured[self._padded(count)]()

    def choose(self, count: int, kind: ChoiceKind) -> None:
        """Enqueue the choice of `count` tokens."""
        self._captured[self._padded(count), kind]()

    def prompts(self, size: PromptSize) -> None:
        """Enqueue the forward pass over prompts of one of the sizes."""
        self._captured[size]()

    def prompt_size(self, num_tokens: int, num_rows: int) -> PromptSize | None:
        """The smallest size with room for these tokens and rows; None where there is none."""
        return next((size for size in self.prompt_sizes if size.takes(num_tokens, num_rows)), None)

    def _padded(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]
