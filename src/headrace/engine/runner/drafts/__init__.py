"""Drafts tokens that may follow a sequence's (docs/speculation.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.engine.runner.slots import Ints, SlotPart, SlotState
from headrace.tensor.sampling import Sampler


class Drafter(SlotPart, Protocol):
    """A part of a runner's state that drafts. It hears of a slot's tokens before it is asked."""

    def draft(self, slots: Ints, most: Ints) -> Sequence[Ints]:
        """Per slot, at most `most` tokens that may follow those committed; none is an answer too. Raises nothing that a client's tokens
        cause: what it gives is checked, so a poor draft costs time alone.
        """
        ...

    def close(self) -> None: ...


MakeDrafter = Callable[[SlotState, Sampler], Drafter]
"""For the slots and the sampler of one runner."""
