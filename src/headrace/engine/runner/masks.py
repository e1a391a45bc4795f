"""Gets the grammar masks of a step's rows from a mask source (docs/structured.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from headrace.core.plan import Started
from headrace.engine.runner.slots import Ints, SlotPart
from headrace.tensor.kernels.filters import ApplyMasks
from headrace.tensor.sampling import NO_ROWS_MASKED, RowMasks


@dataclass(frozen=True, slots=True)
class StepMasks:
    """
    failures  position -> why its sequence cannot go on
    unknown   positions behind drafts whose mask could not be made: their tokens must not be used
    """

    masks: RowMasks
    failures: Mapping[int, str] = field(default_factory=dict)
    unknown: Sequence[int] = ()


NO_MASKS = StepMasks(NO_ROWS_MASKED)


class MaskSource(SlotPart, Protocol):
    """Gives a runner the grammar masks of its slots. A sequence whose grammar cannot go on raises nothing: `wait` names it each time its
    mask is asked for. Every method may be called while masks are being filled, since the step that began them may have failed.
    """

    def begin(self, slots: Sequence[int], given: Sequence[int] = ()) -> None:
        """slots: of each position that is sampled, those of a slot one behind the other; -1: no grammar. given: the draft before each
        position, -1 at a slot's first; empty: no drafts.
        """
        ...

    def wait(self) -> StepMasks:
        """The masks' memory is valid until the next `begin`. Raises the error of filling them."""
        ...

    def close(self) -> None: ...


class NoGrammars:
    def start(self, started: Started) -> None:
        pass

    def end(self, slots: Ints) -> None:
        pass

    def begin(self, slots: Sequence[int], given: Sequence[int] = ()) -> None:
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
    mask(np.zeros((1, 32), dtype=np.float32), np.zeros(1, dtype=np.int64), np.full((1, 1), 2**32 - 1, dtype=np.uint32))
