"""Implements `engine.runner.masks.MaskSource` without a thread or a library: a grammar is a function from output ids to the next allowed
ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from headrace.core.plan import Started
from headrace.engine.runner.masks import StepMasks
from headrace.tensor.kernels.filters import num_words
from headrace.tensor.sampling import RowMasks

Language = Callable[[list[int]], Collection[int]]


class PlainMasks:
    """Checks that it is used as its protocol says.

    broken  slots whose masks cannot be made
    """

    def __init__(self, language: Language, vocab_size: int) -> None:
        self.language, self.vocab_size = language, vocab_size
        self.outputs: dict[int, list[int]] = {}
        self.broken: set[int] = set()
        self.is_closed = False
        self._begun: dict[int, tuple[int, list[int]]] = {}

    def start(self, started: Started) -> None:
        self.outputs.pop(started.slot, None)
        if started.grammar is not None:
            self.outputs[started.slot] = started.token_ids[started.num_prompt_tokens :].tolist()

    def end(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.outputs.pop(slot, None)

    def begin(self, slots: Sequence[int], given: Sequence[int] = ()) -> None:
        ahead: list[int] = []
        self._begun = {}
        for place, (slot, draft) in enumerate(zip(slots, given or [-1] * len(slots), strict=True)):
            ahead = [] if draft < 0 else [*ahead, draft]
            assert draft < 0 or slots[place - 1] == slot, "a draft of another slot than the position before it"
            if slot >= 0:
                assert slot in self.outputs, "a slot without a grammar"
                self._begun[place] = slot, ahead

    def wait(self) -> StepMasks:
        begun, self._begun = self._begun, {}
        words = np.zeros((len(begun), num_words(self.vocab_size)), dtype=np.uint32)
        unknown = []
        for mask, (place, (slot, ahead)) in zip(words, begun.items(), strict=True):
            outputs = self.outputs[slot]
            if any(draft not in self.language([*outputs, *ahead[:count]]) for count, draft in enumerate(ahead)):
                unknown.append(place)
                continue
            for token in self.language([*outputs, *ahead]):
                mask[token // 32] |= np.uint32(1 << token % 32)
        failures = {place: f"slot {slot} is broken" for place, (slot, ahead) in begun.items() if slot in self.broken and not ahead}
        return StepMasks(RowMasks(np.array(list(begun), dtype=np.int64), words), failures, unknown)

    def commit(self, slots: Iterable[int], token_ids: Iterable[int]) -> None:
        for slot, token_id in zip(slots, token_ids, strict=True):
            if slot in self.outputs:
                assert token_id in self.language(self.outputs[slot]), "a token that the mask forbids was sampled"
                self.outputs[slot].append(token_id)

    def retract(self, slot: int, token_ids: Iterable[int]) -> None:
        if slot in self.outputs:
            stale = list(token_ids)
            assert self.outputs[slot][-len(stale) :] == stale, "other tokens are taken back than the last ones"
            del self.outputs[slot][-len(stale) :]

    def close(self) -> None:
        self.is_closed = True
