"""Sorts the pieces of tool calls that a foreign server sends into distinct calls.

Servers tell parallel calls apart in their own ways: by index, by id, by both, or by nothing but a further name. Where these do not decide,
the arguments do: nothing can follow a JSON text that is complete, so a name that follows begins another call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from headrace.gateway.upstream.foreign.chunk import SentCall
from headrace.gateway.upstream.foreign.errors import BrokenStream
from headrace.gateway.upstream.foreign.values import SaidText, SplitText
from headrace.gateway.upstream.seam import PassedField, ToolCall, made_call_id

MAX_CALLS = 4096

MAX_HELD_CHARS = 256
"""For a name that is joined of pieces, and for arguments that are held until it is known whether they are an object."""

NO_ARGUMENTS = "{}"
NULLS = ("null", "None")

_MARKS = re.compile(r'[{}\[\]"\\]')
_STRING = re.compile(r'(?:[^"\\]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+')
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_OBJECT_BEGIN = re.compile(r'\s*\{\s*["}]')
_PERHAPS_OBJECT = re.compile(r"\s*(?:\{\s*)?")
_BLANK_STRING = re.compile(r'"\s*"')


class JsonEnd:
    __slots__ = ("_depth", "_is_escaped", "_is_in_string", "has_text")

    def __init__(self) -> None:
        self._depth = 0
        self._is_escaped = self._is_in_string = self.has_text = False

    @property
    def is_complete(self) -> bool:
        return self.has_text and self._depth <= 0 and not self._is_in_string

    def add(self, piece: str) -> None:
        if not piece:
            return
        begin = 1 if self._is_escaped else 0
        self._is_escaped = False
        self.has_text = self.has_text or not piece.isspace()
        for match in _MARKS.finditer(piece):
            if match.start() < begin:
                continue  # behind a backslash
            if match[0] == "\\":
                begin = match.end() + 1
                self._is_escaped = match.end() == len(piece)
            elif match[0] == '"':
                self._is_in_string = not self._is_in_string
            elif not self._is_in_string:
                self._depth += 1 if match[0] in "{[" else -1


class ObjectText:
    """A server may wrap arguments in a JSON string, which is unwrapped, or send null. Other text stays unchanged."""

    __slots__ = ("_held", "_is_plain", "_is_quoted")

    def __init__(self) -> None:
        self._held = ""
        self._is_plain = self._is_quoted = False

    def push(self, piece: str) -> str:
        if self._is_plain:
            return piece
        held = self._held + piece
        if self._is_quoted:
            return self._unquoted(held)
        text = held.strip()
        is_open = any(word.startswith(text) for word in NULLS)
        if text[:1] == '"':
            shown, _ = _decoded(text[1:])
            if _OBJECT_BEGIN.match(shown):
                self._is_quoted = True
                return self._unquoted(held.lstrip()[1:])
            is_open = _PERHAPS_OBJECT.fullmatch(shown) is not None
        is_open = is_open and len(held) <= MAX_HELD_CHARS
        self._held, self._is_plain = held if is_open else "", not is_open
        return "" if is_open else held

    def rest(self) -> str:
        if self._is_quoted:
            return ""
        text = self._held.strip()
        return NO_ARGUMENTS if text in NULLS or _BLANK_STRING.fullmatch(text) else self._held

    def _unquoted(self, text: str) -> str:
        shown, rest = _decoded(text)
        self._is_plain = rest != "" and _CUT_ESCAPE.fullmatch(rest) is None
        self._held = "" if self._is_plain else rest
        return shown + (rest.removeprefix('"') if self._is_plain else "")


def _decoded(text: str) -> tuple[str, str]:
    place = _STRING.match(text).end()  # type: ignore[union-attr]  # it matches nothing too
    return json.loads(f'"{text[:place]}"', strict=False), text[place:]


class _Piece(NamedTuple):
    sent_index: int | None
    sent_id: str | None
    name: str | None
    arguments: str
    passed: Sequence[PassedField]

    @classmethod
    def of(cls, sent: SentCall, passed: Sequence[PassedField]) -> _Piece:
        index = sent.index if sent.index is not None and sent.index >= 0 else None
        function = sent.function
        if function is None:
            return cls(index, sent.id or None, sent.name or None, sent.arguments or "", passed)
        return cls(index, sent.id or None, function.name or sent.name or None, function.arguments or sent.arguments or "", passed)

    @property
    def has_arguments(self) -> bool:
        return self.arguments != "" and not self.arguments.isspace()


class _Call:
    """is_held      the arguments are NO_ARGUMENTS so far and held back: some servers send that before the real arguments
    is_repeated  after complete arguments the name came again alone: arguments that follow are of another call
    """

    __slots__ = (
        *("number", "call_id", "sent_id", "name", "text", "object_text", "end", "said"),
        *("is_begun", "is_held", "is_named", "is_repeated", "passed"),
    )

    def __init__(self, number: int, call_id: str, piece: _Piece, name: str | None) -> None:
        self.number, self.call_id, self.sent_id, self.name = number, call_id, piece.sent_id, name
        self.text, self.end, self.said = SplitText(), JsonEnd(), SaidText()
        self.object_text = ObjectText()
        self.passed: list[PassedField] = []
        self.is_begun = self.is_named = self.is_held = self.is_repeated = False

    def is_same(self, piece: _Piece) -> bool:
        return piece.sent_id is not None and piece.sent_id == self.sent_id

    def is_followed_by(self, piece: _Piece, *, is_listed: bool) -> bool:
        is_named = piece.name is not None
        if self.end.is_complete and piece.has_arguments:
            if self.is_held and (self.is_same(piece) or not (is_named or self.is_repeated)):
                return False
            return is_named or self.is_repeated
        if not is_named or self.name is None or self.is_same(piece) or (not is_listed and self._is_name_of(piece)):
            return False
        return is_listed or (None not in (piece.sent_id, self.sent_id) and piece.sent_id != self.sent_id) or piece.name != self.name

    def is_again(self, piece: _Piece, *, is_numbered: bool) -> bool:
        if not (self.end.is_complete and piece.has_arguments and self.said.rest_of(piece.arguments) == ""):
            return False
        is_same_number = is_numbered and piece.sent_index is not None and piece.name == self.name
        return self.is_same(piece) or (is_same_number and self.sent_id is None and piece.sent_id is None)

    def _is_name_of(self, piece: _Piece) -> bool:
        is_open = not self.is_begun and self.sent_id is not None and piece.sent_id in (None, self.sent_id)
        num_chars = len(self.name or "") + len(piece.name or "")
        return is_open and piece.sent_index is not None and not piece.has_arguments and num_chars <= MAX_HELD_CHARS

    def add(self, piece: _Piece) -> ToolCall | None:
        """Id and name wait for the first arguments, since a name may come in pieces."""
        self.sent_id = self.sent_id or piece.sent_id
        self.passed += piece.passed
        if self.name is None or piece.name is None:
            self.name = self.name or piece.name
        elif self._is_name_of(piece):
            self.name = piece.name if piece.name.startswith(self.name) else self.name + piece.name
        text = self._added_text(piece)
        is_waiting = not self.is_begun and self.name is not None and self.sent_id is not None and not self.end.has_text
        return None if is_waiting else self.give(text)

    def give(self, text: str) -> ToolCall | None:
        call_id, name = None if self.is_begun else self.call_id, None if self.is_named else self.name
        self.is_begun, self.is_named = True, self.name is not None
        passed, self.passed = self.passed, []
        return ToolCall(self.number, call_id, name, text, tuple(passed)) if call_id or name or text or passed else None

    def _added_text(self, piece: _Piece) -> str:
        if self.end.is_complete and not piece.has_arguments:
            self.is_repeated = self.is_repeated or piece.name is not None
        elif not self.end.has_text and piece.arguments.strip() == NO_ARGUMENTS:
            self.is_held = True
        elif self.is_held:
            self.is_held, self.end, self.said = False, JsonEnd(), SaidText()
        self.end.add(piece.arguments)
        self.said.add(piece.arguments)
        return "" if self.is_held else self.text.push(self.object_text.push(piece.arguments))

    def rest(self, *, is_whole: bool) -> str:
        """is_whole: missing arguments become NO_ARGUMENTS"""
        if self.is_held or (is_whole and not self.end.has_text):
            return NO_ARGUMENTS
        return self.text.push(self.object_text.rest(), is_last=True)


class CallPieces:
    def __init__(self, key: str) -> None:
        self._key = key
        self._calls: list[_Call] = []
        self._call_ids: set[str] = set()
        self._index_to_call: dict[int, _Call] = {}
        self._id_to_call: dict[str, _Call] = {}

    @property
    def is_open(self) -> bool:
        return not all(call.end.is_complete for call in self._calls)

    def read(self, sent: Iterable[SentCall], passed: Iterable[Sequence[PassedField]] = repeat(())) -> list[ToolCall] | None:
        """Raises BrokenStream for too many calls."""
        listed: set[int] = set()
        pieces: list[ToolCall | None] = []
        for piece in map(_Piece.of, sent, passed):
            if not (piece.sent_id or piece.name or piece.arguments or piece.passed):
                continue  # some servers end with an empty piece
            known, last = self._known_call(piece), self._calls[-1] if self._calls else None
            if known is not None and known.is_again(piece, is_numbered=len(self._index_to_call) > 1):
                continue  # some servers end with the whole calls again
            call = self._call_of(piece, known, listed)
            if piece.name:
                listed.add(call.number)
            if last is not None and call.number > last.number:
                pieces.append(last.give(""))  # another call follows, so the last one's name is complete
            pieces.append(call.add(piece))
        return [each for each in pieces if each is not None] if pieces else None

    def finish(self, *, is_whole: bool) -> list[ToolCall]:
        """Raises BrokenStream for a call without a name."""
        if not all(call.name for call in self._calls):
            raise BrokenStream("a call has no name")
        return [given for call in self._calls if (given := call.give(call.rest(is_whole=is_whole))) is not None]

    def _call_of(self, piece: _Piece, call: _Call | None, listed: set[int]) -> _Call:
        if call is None or call.is_followed_by(piece, is_listed=call.number in listed):
            call = self._begin(piece, piece.name or (call.name if call is not None else None))
        if piece.sent_index is not None:
            self._index_to_call[piece.sent_index] = call
        if piece.sent_id is not None and call.sent_id in (None, piece.sent_id):
            self._id_to_call.setdefault(piece.sent_id, call)
        if len(self._calls) > MAX_CALLS or len(self._index_to_call) > MAX_CALLS:
            raise BrokenStream(f"it has more than {MAX_CALLS} calls")
        return call

    def _known_call(self, piece: _Piece) -> _Call | None:
        last = self._calls[-1] if self._calls else None
        by_id = None if piece.sent_id is None else self._id_to_call.get(piece.sent_id)
        if piece.sent_index is None:
            return by_id or last
        by_index = self._index_to_call.get(piece.sent_index)
        if by_index is None and piece.name is None and by_id is not None:
            return by_id
        if by_index is None:
            is_new = piece.name is not None or piece.sent_id is not None or last is None or last.end.is_complete
            return None if is_new else last
        is_shared = by_id is not None and not by_index.is_same(piece)
        return by_id if is_shared else by_index

    def _begin(self, piece: _Piece, name: str | None) -> _Call:
        number, call_id = len(self._calls), piece.sent_id
        if call_id is None or call_id in self._call_ids:
            call_id = made_call_id(self._key, number)
        call = _Call(number, call_id, piece, name)
        self._calls.append(call)
        self._call_ids.add(call_id)
        return call
