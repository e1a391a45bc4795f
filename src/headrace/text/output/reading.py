"""What the readers of calls share."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from enum import Enum
from typing import NamedTuple, Protocol

_NO_SPACE = re.compile(r"\S")


def num_held(text: str, marker: str, begin: int = 0) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    if not marker:
        return 0
    at = text.find(marker[0], max(begin, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


def first_non_space(text: str, at: int = 0, end: int | None = None) -> int:
    end = len(text) if end is None else end
    match = _NO_SPACE.search(text, at, end)
    return match.start() if match else end


class CallPiece(NamedTuple):
    """name       None after the call's first piece"""

    number: int
    name: str | None
    arguments: str


class ParsedDelta(NamedTuple):
    """All deltas joined depend on the whole text alone."""

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[CallPiece] = ()


MAX_CALLS = 128
"""Text after the last of these calls is never a call."""

NAMESPACE = "functions."
"""OpenAI's own models write this before a function's name."""

MAX_HELD_CHARS = 64 << 10
NO_ARGUMENTS = "{}"


class Reading(Enum):
    GOES_ON = 1
    DONE = 2
    FAILED = 3


class CallLog:
    """is_open: the last call's arguments are incomplete"""

    def __init__(self, names: Set[str]) -> None:
        self.names = names
        self.num_calls = 0
        self.pieces: list[CallPiece] = []
        self.is_open = False
        self._held: list[str] = []
        self.room = MAX_HELD_CHARS

    def meant(self, written: str) -> str:
        """The offered function of that name, ignoring white space and a namespace; else the name as written."""
        name = written.strip().removeprefix(NAMESPACE)
        return name if name in self.names else written

    def hold(self, text: str) -> None:
        self._held.append(text)
        self.room -= len(text)

    def take_held(self) -> str:
        held = "".join(self._held)
        self.forget_held()
        return held

    def forget_held(self) -> None:
        self._held.clear()
        self.room = MAX_HELD_CHARS

    def begin(self, name: str, arguments: str = "", *, is_whole: bool = False) -> bool:
        """False after MAX_CALLS: the text is no call."""
        if self.num_calls >= MAX_CALLS:
            return False
        self.pieces.append(CallPiece(self.num_calls, name, arguments))
        self.num_calls += 1
        self.is_open = not is_whole
        self.forget_held()
        return True

    def add(self, arguments: str, *, is_last: bool = False) -> None:
        if arguments:
            self.pieces.append(CallPiece(self.num_calls - 1, None, arguments))
        self.is_open = not is_last

    def add_argument(self, name: str, key: str, value: str) -> bool:
        """The first one of a call begins it. value: JSON, or the beginning of it. False as of `begin`"""
        item = f"{json.dumps(key, ensure_ascii=False)}: {value}"
        if not self.is_open:
            return self.begin(name, "{" + item)
        self.add(", " + item)
        self.forget_held()
        return True

    def end(self, name: str) -> bool:
        """After the last `add_argument` of a call, or without any. False as of `begin`"""
        if not self.is_open:
            return self.begin(name, NO_ARGUMENTS, is_whole=True)
        self.add("}", is_last=True)
        self.forget_held()
        return True

    def take_pieces(self) -> list[CallPiece]:
        pieces, self.pieces = self.pieces, []
        return pieces


class TagChoice:
    """Reads one of several tags after white space."""

    def __init__(self, *tags: str) -> None:
        self._tags = tuple([tag for tag in tags if tag])
        self._matched = ""
        self.found = ""

    def may_begin_with(self, char: str) -> bool:
        return any(tag.startswith(char) for tag in self._tags)

    def feed(self, log: CallLog, text: str, at: int, end: int) -> tuple[int, Reading]:
        """Returns where it stopped, and the state of the reading."""
        begin = at
        if not self._matched and self._tags:
            at = first_non_space(text, at, end)
        while at < end and not self.found and self.may_begin_with(self._matched + text[at]):
            self._matched += text[at]
            self.found = self._matched if self._matched in self._tags else ""
            at += 1
        log.hold(text[begin:at])
        if self.found or not self._tags:
            return at, Reading.DONE
        return at, Reading.GOES_ON if at == end else Reading.FAILED


class TextUntil:
    def __init__(self, marker: str, max_chars: int = MAX_HELD_CHARS) -> None:
        self._marker = marker
        self._room = max_chars + len(marker)
        self._pieces: list[str] = []
        self._tail = ""
        self.text = ""

    def feed(self, log: CallLog, text: str, at: int, end: int) -> tuple[int, Reading]:
        """FAILED after `max_chars` characters without the marker."""
        end = min(end, at + self._room)
        marker_end = self._end_of_marker(text, at, end)
        after = end if marker_end is None else marker_end
        piece = text[at:after]
        log.hold(piece)
        self._pieces.append(piece)
        self._room -= len(piece)
        if marker_end is not None:
            self.text = "".join(self._pieces)[: -len(self._marker)]
            return after, Reading.DONE
        self._tail = (self._tail + piece)[1 - len(self._marker) :] if len(self._marker) > 1 else ""
        return after, Reading.GOES_ON if self._room else Reading.FAILED

    def _end_of_marker(self, text: str, at: int, end: int) -> int | None:
        head = self._tail + text[at : min(end, at + len(self._marker) - 1)]
        place = head.find(self._marker)
        if place >= 0:
            return at + place + len(self._marker) - len(self._tail)
        place = text.find(self._marker, at, end)
        return place + len(self._marker) if place >= 0 else None


class CallReader(Protocol):
    reading: Reading

    def feed(self, text: str, at: int) -> int:
        """Returns where reading stopped."""
        ...
