"""Gets the grammar masks of a step's rows from a mask source: the tokens that each row's grammar allows.

The masks of a step are begun before its forward pass and waited for before sampling, so that they are filled on another thread while the
model computes. How a mask acts on logits is `tensor.sampling`'s; where masks come from is in docs/structured.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from headrace.core.plan import Started
from headrace.engine.runner.slots import Ints, SlotPart
from headrace.tensor.kernels.masks import ApplyMasks
from headrace.tensor.sampling import NO_ROWS_MASKED, RowMasks


@dataclass(frozen=True, slots=True)
class StepMasks:
    """failures: row -> why its sequence cannot go on; such a row's mask allows no token"""

    masks: RowMasks
    failures: Mapping[int, str] = field(default_factory=dict)


NO_MASKS = StepMasks(NO_ROWS_MASKED)


class MaskSource(SlotPart, Protocol):
    """Slots without a grammar are skipped.

    A sequence whose grammar cannot go on (a limit is exceeded, or its output does not match) raises nothing: `wait` names it each time its
    mask is asked for. Every method may be called while masks are being filled, since the step that began them may have failed; the masks
    are then waited for and dropped.
    """

    def begin(self, slots: Sequence[int]) -> None:
        """-1 for a row without a mask."""
        ...

    def wait(self) -> StepMasks:
        """Returned once. Their memory is valid until the next `begin`. Raises the error of filling them."""
        ...

    def close(self) -> None: ...


class NoGrammars:
    """A step that needs a mask is refused, which ends only that sequence."""

    def start(self, started: Started) -> None:
        pass

    def end(self, slots: Ints) -> None:
        pass

    def begin(self, slots: Sequence[int]) -> None:
        if any(slot >= 0 for slot in slots):
            raise ValueError("mask_slots: this runner follows no grammars; every row must say -1")

    def wait(self) -> StepMasks:
        return NO_MASKS

    def commit(self, slots: Ints, token_ids: Ints) -> None:
        pass

    def retract(self, slot: int, token_ids: Ints) -> None:
        pass

    def close(self) -> None:
        pass


def load_mask_kernel(mask: ApplyMasks) -> None:
    """Compiled or loaded now and not at the first request with a grammar."""
    mask(np.zeros((1, 32), dtype=np.float32), np.zeros(1, dtype=np.int64), np.full((1, 1), 2**32 - 1, dtype=np.uint32))
