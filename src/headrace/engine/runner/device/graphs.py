"""Captures the parts of a step as graphs: forward passes over rows of one token, forward passes over prompts, and the choice of tokens.
Passes with adapters are captured beside those without, which are spared their launches.

Passes and choices are captured apart: a kind of choice needs no capture of the whole model.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.runner.batch import Rows, token_places
from headrace.engine.runner.slots import SlotState
from headrace.tensor.kernels.choice import CHOICE_KINDS, ChoiceKind
from headrace.tensor.launches import Launches

log = logging.getLogger(__name__)

TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
TOKENS_PER_ROW = 16
MAX_PADDING = 4
"""At most this many times a step's tokens, unless the size is one of SMALL_TOKENS or fewer."""
SMALL_TOKENS = 128

Array = TypeVar("Array", Tensor, NDArray[np.int64])


class PromptSize(NamedTuple):
    tokens: int
    rows: int

    def takes(self, num_tokens: int, num_rows: int) -> bool:
        is_near = self.tokens <= max(SMALL_TOKENS, MAX_PADDING * num_tokens)
        return num_tokens <= self.tokens and num_rows <= self.rows and is_near

    def num_values(self, groups: int) -> int:
        return (TOKEN_LINES + groups) * self.tokens + len(RowLine) * (self.rows + 1)


class RowLine(IntEnum):
    """FIRST has one value more than there are rows: the end of the last row."""

    FIRST = 0
    CONTEXT = 1
    SLOT = 2
    LAST = 3
    """For each sampling row, the token whose hidden state it needs; PLACE is where the choice reads that state."""
    PLACE = 4


TOKEN_LINES = 2


def sizes_up_to(most_tokens: int, max_rows: int) -> list[PromptSize]:
    counts = [count for count in TOKENS if count < most_tokens] + [min(most_tokens, TOKENS[-1])]
    return [PromptSize(count, min(max_rows, max(1, count // TOKENS_PER_ROW))) for count in dict.fromkeys(counts)]


def lines(buffer: Array, size: PromptSize, groups: int) -> tuple[Array, Array]:
    """Views of the buffer: tokens [TOKEN_LINES + groups, T], and rows [len(RowLine), R + 1]."""
    num_token_values = (TOKEN_LINES + groups) * size.tokens
    of_rows = buffer[num_token_values : size.num_values(groups)]
    return buffer[:num_token_values].reshape(-1, size.tokens), of_rows.reshape(len(RowLine), -1)


def fill(buffer: NDArray[np.int64], size: PromptSize, rows: Rows, state: SlotState, first_place: int) -> None:
    """first_place: in the choice, of the first row that samples"""
    of_tokens, of_rows = lines(buffer, size, len(state.tables))
    token_slots, positions = token_places(rows)
    num_tokens, num_rows = len(positions), len(rows.slots)
    of_tokens[:TOKEN_LINES, num_tokens:] = 0
    of_tokens[TOKEN_LINES:, num_tokens:] = -1
    of_tokens[0, :num_tokens], of_tokens[1, :num_tokens] = state.token_ids[token_slots, positions], positions
    of_tokens[TOKEN_LINES:, :num_tokens] = state.cache_places(token_slots, positions)
    last = rows.row_starts[1:][rows.samples > 0] - 1
    padding = {RowLine.FIRST: num_tokens, RowLine.CONTEXT: 0, RowLine.LAST: num_tokens - 1}
    for line in RowLine:
        of_rows[line] = padding.get(line, len(state.known))  # the slot, and the place in the choice, that no sequence uses
    of_rows[RowLine.FIRST, :num_rows], of_rows[RowLine.CONTEXT, :num_rows] = rows.row_starts[:-1], rows.ends
    of_rows[RowLine.SLOT, :num_rows] = rows.slots
    of_rows[RowLine.LAST, : len(last)], of_rows[RowLine.PLACE, : len(last)] = last, first_place + np.arange(len(last))


SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)

LOG_INTERVAL_S = 5.0


class StepGraphs:
    """The captured graphs of a step's parts, by their sizes."""

    def __init__(
        self,
        launches: Launches,
        prompt_sizes: list[PromptSize],
        max_rows: int,
        prompts: Callable[[PromptSize, bool], None],
        decode: Callable[[int, bool], None],
        choose: Callable[[int, ChoiceKind], None],
        *,
        has_adapters: bool,
    ) -> None:
        """prompts, decode: the bool says whether the pass is one with adapters"""
        self.prompt_sizes = prompt_sizes
        self._launches, self._prompts, self._decode, self._choose = launches, prompts, decode, choose
        self._adapted = (False, True) if has_adapters else (False,)
        self._sizes = [size for size in SIZES if size < max_rows] + [max_rows]
        self._captured: dict[object, Callable[[], None]] = {}

    def capture(self) -> None:
        """The largest first, so that smaller ones use its memory."""
        began = logged = time.perf_counter()
        bodies: dict[object, Callable[[], None]] = {}
        for size, adapted in product(reversed(self.prompt_sizes), self._adapted):
            bodies[size, adapted] = partial(self._prompts, size, adapted)
        for rows in reversed(self._sizes):
            bodies |= {(rows, adapted): partial(self._decode, rows, adapted) for adapted in self._adapted}
            bodies |= {(rows, kind): partial(self._choose, rows, kind) for kind in CHOICE_KINDS}
        for key, body in bodies.items():
            self._captured[key] = self._launches.capture(body)
            if (now := time.perf_counter()) - logged >= LOG_INTERVAL_S:
                logged = now
                log.info("prepared %d of %d parts of steps in %.0f s", len(self._captured), len(bodies), now - began)
        most = self.prompt_sizes[-1].tokens
        log.info("prepared %d parts of steps, of %d rows and %d prompt tokens at most, in %.1f s", len(bodies), max(self._sizes), most,
                 time.perf_counter() - began)  # fmt: skip

    def decode(self, count: int, adapted: bool) -> None:
        self._captured[self._padded(count), adapted]()

    def choose(self, count: int, kind: ChoiceKind) -> None:
        self._captured[self._padded(count), kind]()

    def prompts(self, size: PromptSize, adapted: bool) -> None:
        self._captured[size, adapted]()

    def prompt_size(self, num_tokens: int, num_rows: int) -> PromptSize | None:
        return next((size for size in self.prompt_sizes if size.takes(num_tokens, num_rows)), None)

    def _padded(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]
