"""The parts of a step that are captured: a forward pass over rows of one token, and the choice of tokens, per padded number of rows.

Forward and choice are captured apart, so that every kind of choice needs no capture of the whole model, and so that a step with prompts
replays the forward pass of its other rows. A step without prompts is two replays.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

from headrace.tensor.kernels.choice import CHOICE_KINDS, ChoiceKind
from headrace.tensor.launches import Launches

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Numbers of rows that are captured, up to the engine's most. A step is padded to the next."""

LOG_INTERVAL_S = 5.0
"""Seconds between two lines of progress."""


class StepGraphs:
    """decode, choose: enqueue a forward pass, and a choice, for a padded number of rows."""

    def __init__(self, launches: Launches, max_rows: int, decode: Callable[[int], None], choose: Callable[[int, ChoiceKind], None]) -> None:
        self._launches, self._decode, self._choose = launches, decode, choose
        self._sizes = [size for size in SIZES if size < max_rows] + [max_rows]
        self._decodes: dict[int, Callable[[], None]] = {}
        self._choices: dict[tuple[int, ChoiceKind], Callable[[], None]] = {}

    def capture(self) -> None:
        """Capture all sizes, the largest first: the memory that it takes serves the smaller ones. Logs how far it is."""
        began = logged = time.perf_counter()
        count = len(self._sizes) * (1 + len(CHOICE_KINDS))
        for size in reversed(self._sizes):
            self._decodes[size] = self._launches.capture(lambda size=size: self._decode(size))  # type: ignore[misc]
            for kind in CHOICE_KINDS:
                self._choices[size, kind] = self._launches.capture(lambda size=size, kind=kind: self._choose(size, kind))  # type: ignore[misc]
            if (now := time.perf_counter()) - logged >= LOG_INTERVAL_S:
                logged = now
                log.info("captured %d of %d graphs in %.0f s", len(self._decodes) + len(self._choices), count, now - began)
        log.info("captured %d graphs of steps up to %d rows in %.1f s", count, self._sizes[-1], time.perf_counter() - began)

    def decode(self, count: int) -> None:
        """Enqueue the forward pass of `count` rows."""
        self._decodes[self._padded(count)]()

    def choose(self, count: int, kind: ChoiceKind) -> None:
        """Enqueue the choice of `count` tokens."""
        self._choices[self._padded(count), kind]()

    def _padded(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]
