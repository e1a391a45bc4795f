"""Grammar masks of a step: what the runner needs of the matchers, and how one step uses them.

A matcher follows one sequence through its grammar. `StepMasks` begins to fill the masks of a step before its forward pass and waits for
them before sampling, so that they are made on another thread while the model computes. How a mask acts on logits is `tensor.sampling`'s;
where matchers come from is in docs/structured.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.core.plan import Started
from headrace.engine.runner_slots import Ints
from headrace.tensor.kernels.masks import ApplyMasks, Words
from headrace.tensor.sampling.sampler import NO_MASKS, RowMasks


class Matchers(Protocol):
    """One matcher per slot whose sequence has a grammar. Used by the runner's thread alone.

    A matcher that cannot go on (it exceeded a limit, or was given a token that its grammar does not allow) raises nothing: `wait` names it
    each time its mask is asked for. Any method may be called while a fill that `begin` started is under way, since the step that began it
    may have failed; the fill is then waited for and dropped.
    """

    def start(self, started: Started) -> None:
        """Make the matcher of a sequence with a grammar, at its end: the output ids it has are consumed. An earlier one is replaced."""
        ...

    def end(self, slots: Iterable[int]) -> None:
        """Forget the matchers of these slots, as far as they have any."""
        ...

    def begin(self, slots: Ints) -> None:
        """Begin to fill the masks of the next tokens of slots [M], each of which has a matcher, on another thread."""
        ...

    def wait(self) -> tuple[Words, Mapping[int, str]]:
        """The masks [M, ceil(V / 32)] of the slots last given to `begin`, and what is wrong with the rows of M that have none.

        The memory is valid until the next `begin`.
        """
        ...

    def commit(self, slots: Ints, token_ids: Ints) -> None:
        """Advance the matchers of slots [M] by one token each."""
        ...

    def retract(self, slot: int, num_tokens: int) -> None:
        """Take back the last tokens of a slot: their step is being repeated."""
        ...

    def close(self) -> None:
        """End the threads."""
        ...


class NoMatchers:
    """The matchers of a runner that cannot follow a grammar: a step that needs a mask is refused, and with it its sequence alone."""

    def start(self, started: Started) -> None:
        pass

    def end(self, slots: Iterable[int]) -> None:
        pass

    def begin(self, slots: Ints) -> None:
        raise ValueError("mask_slots: this runner follows no grammars; every row must say -1")

    def wait(self) -> tuple[Words, Mapping[int, str]]:
        raise AssertionError("nothing was begun")

    def commit(self, slots: Ints, token_ids: Ints) -> None:
        raise AssertionError("nothing was begun")

    def retract(self, slot: int, num_tokens: int) -> None:
        raise AssertionError("nothing was begun")

    def close(self) -> None:
        pass


def load_mask_kernel(mask: ApplyMasks) -> None:
    """Apply one mask, so that the function behind `mask` is compiled or loaded now and not at the first request with a grammar."""
    mask(np.zeros((1, 32), dtype=np.float32), np.zeros(1, dtype=np.int64), np.full((1, 1), -1, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of one step. sampling: the plan's rows [S] that sample; masked: which of these [M] have a grammar; slots [M]: theirs."""

    matchers: Matchers
    sampling: Ints
    masked: Ints
    slots: Ints

    @classmethod
    def begin(cls, matchers: Matchers, slots: Ints, mask_slots: Ints, sampling: Ints) -> StepMasks:
        """Begin to fill. slots, mask_slots [R]: the plan's columns. Raises ValueError for a mask slot that is not the row's own."""
        masked = np.flatnonzero(mask_slots[sampling] >= 0)
        if not len(masked):
            return cls(matchers, sampling, masked, masked)
        rows = sampling[masked]
        if (mask_slots[rows] != slots[rows]).any():
            raise ValueError("mask_slots: each row must say -1 or its own slot")
        matchers.begin(slots[rows])
        return cls(matchers, sampling, masked, slots[rows])

    def wait(self) -> tuple[RowMasks, dict[int, str]]:
        """The masks of the rows that sample, and of each row of the plan that cannot have one the reason."""
        if not len(self.masked):
            return NO_MASKS, {}
        words, failures = self.matchers.wait()
        return RowMasks(self.masked, words), {int(self.sampling[self.masked[place]]): reason for place, reason in failures.items()}

    def commit(self, token_ids: Ints, is_good: np.ndarray) -> None:
        """Advance the matchers. token_ids, is_good [S]: what was sampled, and for which rows it counts."""
        kept = is_good[self.masked]
        if kept.any():
            self.matchers.commit(self.slots[kept], token_ids[self.masked[kept]])
