"""`engine.runner_masks.Matchers` without a thread or a library: a grammar is a function from output ids to the ids that may follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

from headrace.core.plan import Started
from headrace.engine.runner_slots import Ints
from headrace.tensor.kernels.masks import Words, num_words

Language = Callable[[list[int]], Collection[int]]


class PlainMatchers:
    """Checks that it is used as its protocol says.

    broken  slots whose matcher fails; each fill of their masks says so
    """

    def __init__(self, language: Language, vocab_size: int) -> None:
        self.language, self.vocab_size = language, vocab_size
        self.outputs: dict[int, list[int]] = {}
        self.broken: set[int] = set()
        self.is_closed = False
        self._begun: list[int] | None = None

    def start(self, started: Started) -> None:
        assert started.grammar is not None
        self.outputs[started.slot] = started.token_ids[started.num_prompt_tokens :].tolist()

    def end(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.outputs.pop(slot, None)

    def begin(self, slots: Ints) -> None:
        self._begun = slots.tolist()
        assert self._begun
        assert set(self._begun) <= self.outputs.keys()

    def wait(self) -> tuple[Words, Mapping[int, str]]:
        assert self._begun is not None, "nothing was begun"
        slots, self._begun = self._begun, None
        words = np.zeros((len(slots), num_words(self.vocab_size)), dtype=np.uint32)
        for row, slot in enumerate(slots):
            for token in self.language(self.outputs[slot]):
                words[row, token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32), {row: f"slot {slot} is broken" for row, slot in enumerate(slots) if slot in self.broken}

    def commit(self, slots: Ints, token_ids: Ints) -> None:
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            assert token_id in self.language(self.outputs[slot]), "a token that the mask forbids was sampled"
            self.outputs[slot].append(token_id)

    def retract(self, slot: int, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.outputs[slot])
        del self.outputs[slot][-num_tokens:]

    def close(self) -> None:
        self.is_closed = True
