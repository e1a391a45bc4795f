"""Keeps a matcher for each of a runner's slots with a grammar, and fills each step's masks while the forward pass runs.

The filling thread advances the matcher first, or builds it anew after a rollback, so that the state follows from the grammar and the
output ids alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import HeadraceError
from headrace.core.grammar import CANNOT_CONTINUE, Grammar
from headrace.core.plan import Started
from headrace.engine.failpoints import failpoint
from headrace.engine.grammar.compiling import one_line
from headrace.engine.grammar.limits import MASK_BURST_S, MASK_CPU_S, MAX_RENEWAL_S, start_deep_thread
from headrace.engine.runner.masks import NO_MASKS, StepMasks
from headrace.tensor.sampling import RowMasks

if TYPE_CHECKING:
    from llguidance import LLMatcher

LEXER_IS_FULL = "too many states"

OVERSPENT = f"its masks take more than {MASK_CPU_S * 1000:g} ms of CPU time on average"

MIN_SHARED_TOKENS = 64
"""A lexer that is full again within this many tokens is replaced by one that is not shared."""


class MatcherSource(Protocol):
    """Called on the thread that fills masks. Every method raises HeadraceError where the grammar cannot be compiled."""

    num_words: int

    def template(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the grammar's start, copied and never advanced."""
        ...

    def renewed(self, grammar: Grammar) -> LLMatcher:
        """With an empty lexer; `template` gives it from now on."""
        ...

    def unshared(self, grammar: Grammar) -> LLMatcher:
        """For the caller alone."""
        ...


@dataclass(slots=True, eq=False)
class _Slot:
    """token_ids    the sequence's output so far; the matcher has consumed the first `num_consumed`
    num_ahead    drafts that the matcher has consumed beyond them, while masks are filled
    has_erred_ahead   on a draft: no more is filled ahead for this sequence, since the matcher has to be built anew then
    renewal_s    CPU time spent on new lexers for this sequence
    renewed_at   `num_consumed` when its lexer was last found full
    overspent_s  CPU time beyond MASK_CPU_S for each token; never below 0
    """

    grammar: Grammar
    token_ids: list[int]
    matcher: LLMatcher | None = None
    template: LLMatcher | None = None
    num_consumed: int = 0
    num_ahead: int = 0
    has_erred_ahead: bool = False
    renewal_s: float = 0.0
    renewed_at: int = -MIN_SHARED_TOKENS
    overspent_s: float = 0.0
    failure: str | None = None

    def match_with(self, template: LLMatcher) -> None:
        self.template, self.matcher, self.num_consumed = template, template.deep_copy(), 0

    def fill(self, words: NDArray[np.uint32]) -> str:
        """Returns "" or an error."""
        matcher = self.matcher
        assert matcher is not None, "match_with comes first"
        begin, num_new = time.thread_time(), len(self.token_ids) - self.num_consumed
        for token_id in self.token_ids[self.num_consumed :]:
            matcher.consume_token(token_id)  # `consume_tokens` would refuse an end token after a complete output
        self.num_consumed = len(self.token_ids)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)  # releases the GIL
        spent = time.thread_time() - begin
        self.overspent_s = max(0.0, self.overspent_s + spent - MASK_CPU_S * max(1, num_new))
        error: str = matcher.get_error()
        return error or (OVERSPENT if self.overspent_s > MASK_BURST_S else "")

    def fill_ahead(self, draft: int, before: NDArray[np.uint32], words: NDArray[np.uint32]) -> bool:
        """The mask behind a draft, whose own mask is `before`. False: there is none. Its time is not charged to the sequence, since drafts
        are no client's choice; there is none where the grammar is short of time.
        """
        matcher = self.matcher
        if matcher is None or self.has_erred_ahead or self.overspent_s or not before[draft >> 5] >> np.uint32(draft & 31) & 1:
            return False
        self.num_ahead += 1
        if not matcher.consume_token(draft):
            return False
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return not matcher.is_error()

    def come_back(self) -> None:
        """From drafts, which are consumed again once they are committed."""
        if self.num_ahead and not (self.matcher is not None and self.matcher.rollback(self.num_ahead)):
            self.matcher, self.num_consumed, self.has_erred_ahead = None, 0, True
        self.num_ahead = 0


_Position = tuple[int, _Slot, int]
"""Its place among those of the step, its slot, and the draft before it or -1."""


class SlotGrammars:
    """Its thread is started at the first mask."""

    def __init__(self, source: MatcherSource) -> None:
        self._source = source
        self._slots: dict[int, _Slot] = {}
        self._filling: Future[StepMasks] | None = None
        self._jobs: queue.SimpleQueue[tuple[list[_Position], Future[StepMasks]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._words = np.zeros((0, 0), dtype=np.uint32)

    def start(self, started: Started) -> None:
        self._finish_filling()
        if started.grammar is None:
            self._slots.pop(started.slot, None)
        else:
            self._slots[started.slot] = _Slot(started.grammar, started.token_ids[started.num_prompt_tokens :].tolist())

    def end(self, slots: Iterable[int]) -> None:
        self._finish_filling()
        for slot in slots:
            self._slots.pop(slot, None)

    def begin(self, slots: Sequence[int], given: Sequence[int] = ()) -> None:
        self._finish_filling()
        if unknown := [slot for slot in slots if slot >= 0 and slot not in self._slots]:
            raise ValueError(f"mask_slots: slots {unknown} hold no grammar")
        drafts = given or [-1] * len(slots)
        positions = [(place, self._slots[slot], drafts[place]) for place, slot in enumerate(slots) if slot >= 0]
        if not positions:
            return
        if self._thread is None:
            self._thread = start_deep_thread(self._run, "headrace-masks")
        self._filling = Future()
        self._jobs.put((positions, self._filling))

    def wait(self) -> StepMasks:
        filling, self._filling = self._filling, None
        return NO_MASKS if filling is None else filling.result()

    def commit(self, slots: Iterable[int], token_ids: Iterable[int]) -> None:
        self._finish_filling()
        if not self._slots:
            return
        for slot, token_id in zip(slots, token_ids, strict=True):
            if (held := self._slots.get(slot)) is not None:
                held.token_ids.append(token_id)

    def retract(self, slot: int, token_ids: Sized) -> None:
        self._finish_filling()
        if (held := self._slots.get(slot)) is not None:
            num_kept = len(held.token_ids) - len(token_ids)
            assert num_kept >= 0, "more tokens are taken back than were committed"
            del held.token_ids[num_kept:]
            if held.num_consumed > len(held.token_ids):
                held.matcher, held.num_consumed, held.failure = None, 0, None

    def close(self) -> None:
        self._finish_filling()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        for slot, held in self._slots.items():
            assert held.num_consumed <= len(held.token_ids), f"slot {slot} has matched tokens that were taken back"
            assert held.matcher is not None or not held.num_consumed, f"slot {slot} has matched tokens and no matcher"

    def _finish_filling(self) -> None:
        """Slots must not change while masks are filled."""
        if self._filling is not None:
            self._filling.exception()
            self._filling = None

    # on the thread that fills

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            positions, future = job
            try:
                future.set_result(self._fill(positions))
            except BaseException as error:  # `wait` raises it
                future.set_exception(error)

    def _fill(self, positions: list[_Position]) -> StepMasks:
        failpoint("grammar.fill")
        if len(self._words) < len(positions):
            self._words = np.zeros((len(positions), self._source.num_words), dtype=np.uint32)
        words = self._words[: len(positions)]
        failures: dict[int, str] = {}
        unknown: list[int] = []
        is_known = False  # the mask of the position before
        num_with_drafts = sum(draft < 0 <= following for (_, _, draft), (_, _, following) in pairwise(positions))
        left_s = MASK_CPU_S * num_with_drafts  # for filling ahead: the whole step waits for this thread
        for index, (place, held, draft) in enumerate(positions):
            if draft >= 0:
                if is_known and left_s > 0:
                    begin = time.thread_time()
                    is_known = held.fill_ahead(draft, words[index - 1], words[index])
                    left_s -= time.thread_time() - begin
                else:
                    is_known = False
                if not is_known:
                    words[index] = 0
                    unknown.append(place)
                continue
            if held.failure is None:
                held.failure = self._fill_one(held, words[index])
            if held.failure is not None:
                words[index] = 0
                failures[place] = held.failure
            is_known = held.failure is None
        for _, held, _ in positions:
            held.come_back()
        return StepMasks(RowMasks(np.array([place for place, _, _ in positions], dtype=np.int64), words), failures, unknown)

    def _fill_one(self, held: _Slot, words: NDArray[np.uint32]) -> str | None:
        try:
            if held.matcher is None:
                held.match_with(self._source.template(held.grammar))
            error = held.fill(words)
            if LEXER_IS_FULL in error:
                error = self._fill_with_another_lexer(held, words)
        except HeadraceError as reason:
            error = str(reason)
        if error:
            return CANNOT_CONTINUE + one_line(error)
        if not words.any():
            return CANNOT_CONTINUE + "no token of the model's vocabulary continues it"
        return None

    def _fill_with_another_lexer(self, held: _Slot, words: NDArray[np.uint32]) -> str:
        """A lexer that was renewed for another sequence is tried first."""
        lasted, held.renewed_at = held.num_consumed - held.renewed_at, held.num_consumed
        is_shared = lasted >= MIN_SHARED_TOKENS
        newest = self._source.template(held.grammar)
        if is_shared and newest is not held.template:
            held.match_with(newest)
            error = held.fill(words)
            if LEXER_IS_FULL not in error:
                return error
        if held.renewal_s > MAX_RENEWAL_S:
            return f"{LEXER_IS_FULL}, and renewing its lexer took more than {MAX_RENEWAL_S:g} s"
        begin = time.thread_time()
        template = self._source.renewed(held.grammar) if is_shared else self._source.unshared(held.grammar)
        held.renewal_s += time.thread_time() - begin
        held.match_with(template)
        return held.fill(words)
