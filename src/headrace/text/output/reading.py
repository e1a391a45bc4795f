"""What the readers of calls share: how far one has come, and the record of the calls it found."""

from __future__ import annotations

from collections.abc import Set
from enum import Enum
from typing import Protocol

from headrace.text.output.delta import CallPiece
from headrace.text.output.markers import first_non_space

MAX_CALLS = 128
"""Tool calls of one output. What looks like a call after them is text."""

MAX_HELD_CHARS = 64 << 10
"""Characters held back until it is known whether they are a call. Text that stays undecided for longer is no call."""


class Reading(Enum):
    GOES_ON = 1
    DONE = 2
    FAILED = 3
    """The text is no call, or none any more: what the log holds is text, and so is what follows."""


class CallLog:
    """The calls found in one output.

    names    functions that the request offers
    pieces   what was found since `take_pieces`
    is_open  the last call's arguments are not complete
    """

    def __init__(self, names: Set[str]) -> None:
        self.names = names
        self.num_calls = 0
        self.pieces: list[CallPiece] = []
        self.is_open = False
        self._held: list[str] = []
        self.room = MAX_HELD_CHARS

    def hold(self, text: str) -> None:
        """Keep text that was read and is not known to be a call's. At most `room` characters."""
        self._held.append(text)
        self.room -= len(text)

    def take_held(self) -> str:
        held = "".join(self._held)
        self.forget_held()
        return held

    def forget_held(self) -> None:
        """What is held belongs to a call's form."""
        self._held.clear()
        self.room = MAX_HELD_CHARS

    def begin(self, name: str, arguments: str = "", *, is_whole: bool = False) -> bool:
        """A new call, with all its arguments where `is_whole`. False at MAX_CALLS: it is none then."""
        if self.num_calls >= MAX_CALLS:
            return False
        self.pieces.append(CallPiece(self.num_calls, name, arguments))
        self.num_calls += 1
        self.is_open = not is_whole
        self.forget_held()
        return True

    def add(self, arguments: str, *, is_last: bool = False) -> None:
        """More arguments of the last call."""
        self.pieces.append(CallPiece(self.num_calls - 1, None, arguments))
        self.is_open = not is_last

    def take_pieces(self) -> list[CallPiece]:
        pieces, self.pieces = self.pieces, []
        return pieces


class EndMarker:
    """Reads a format's end marker after white space; a format without one ends at once."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._num_matched = 0

    @property
    def first_char(self) -> str:
        return self._marker[:1]

    def feed(self, log: CallLog, text: str, at: int, end: int) -> tuple[int, Reading]:
        """Read `text` from `at`, at most up to `end`. Returns where it stopped, and how far it came."""
        begin = at
        if not self._num_matched and self._marker:
            at = first_non_space(text, at, end)
        while at < end and self._num_matched < len(self._marker) and text[at] == self._marker[self._num_matched]:
            at += 1
            self._num_matched += 1
        log.hold(text[begin:at])
        if self._num_matched == len(self._marker):
            log.forget_held()
            return at, Reading.DONE
        return at, Reading.GOES_ON if at == end else Reading.FAILED


class CallReader(Protocol):
    """Reads the calls between a format's markers."""

    reading: Reading

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. Returns where it stopped: at the end, unless `reading` says that the reader is through."""
        ...
